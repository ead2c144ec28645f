"""Builds the package ``flashproof``: the four folders as its subpackages, and ``conftest.py`` beside them.

In a checkout the folders are packages of their own, so that nothing has to be installed. Users may have packages called
``kernels`` and ``tests`` themselves; the build therefore puts ``flashproof.`` before each name of ours.
"""

import ast
import io
import re
import shutil
import tokenize
from itertools import pairwise
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import SetupError

NAME = "flashproof"
BUILD = "build"
"""The folder for what setuptools writes: beside conftest.py, pytest would take that for an installed package."""
FOLDERS = ("kernels", "strategies", "reference", "tests")
PUBLIC = f'''"""{{}}."""

from {NAME}.tests.harness.api import Bug, Result, kernel, verify

__all__ = ["verify", "kernel", "Result", "Bug"]
'''
"""The text of the package itself: what users import from it."""
OURS = rf"(?:{'|'.join(FOLDERS)})\.\S*"
STRING = re.compile(rf"""([fFrR]*(?:\"{{3}}|'{{3}}|"|')){OURS}""")
"""A string literal that is the name of a module of ours, without spaces; before Python 3.12, also an f-string."""


def packaged(source: str) -> str:
    """Return a module's text with ``flashproof.`` before the names of our packages, in imports and in strings.

    Imports must be ``from PACKAGE.module import name``. A string counts if it begins with ``PACKAGE.`` and has no
    space, such as ``"kernels.algorithms.flash_v2:KERNEL"`` or ``f"tests.panel.{name}"``. Raises SetupError for ``import PACKAGE``,
    because then PACKAGE is a name in the code that follows.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(x.name.partition(".")[0] in FOLDERS for x in node.names):
            raise SetupError(f"expected `from ... import`, got `{ast.unparse(node)}`")
    imports = {
        (x.lineno, x.col_offset) for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and not x.level
    }
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for before, token in reversed(
        list(pairwise(tokens))
    ):  # from the end: what comes before stays in its place
        if (found := _place(before, token, imports)) is not None:
            row, column = token.start[0] - 1, token.start[1] + found
            lines[row] = f"{lines[row][:column]}{NAME}.{lines[row][column:]}"
    return "".join(lines)


def _place(
    before: tokenize.TokenInfo, token: tokenize.TokenInfo, imports: set[tuple[int, int]]
) -> int | None:
    """Return where in a token the name of a module of ours begins, or None if there is none."""
    if before.start in imports:
        return 0 if token.string in FOLDERS else None
    if token.type == tokenize.STRING and (found := STRING.fullmatch(token.string)):
        return len(found[1])
    in_f_string = tokenize.tok_name[before.type] == "FSTRING_START"  # from Python 3.12 on
    return 0 if in_f_string and re.fullmatch(OURS, token.string) else None


class BuildPackage(build_py):
    """Copies the modules of the four folders into one package, each with its names rewritten by ``packaged``."""

    def run(self) -> None:
        """Delete what an earlier build has left, because it would be installed as well, and build."""
        package = Path(self.build_lib, NAME)
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        (package / "__init__.py").write_text(PUBLIC.format(self.distribution.get_description()))
        (package / "py.typed").touch()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return the modules of a package; at the top level only conftest.py, as the rest is about the repository."""
        found = super().find_package_modules(package, package_dir)
        return [x for x in found if package != NAME or x[1] == "conftest"]

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        """Copy one module with its names rewritten."""
        target, copied = super().build_module(module, module_file, package)
        Path(target).write_text(packaged(Path(module_file).read_text()))
        return target, copied


class RefuseEditable(editable_wheel):
    """Refuses ``pip install -e``, which would install the modules of the checkout, whose imports are not rewritten."""

    def run(self) -> None:
        """Raise SetupError."""
        raise SetupError("install without -e; in a checkout, pytest runs without any installation")


if __name__ == "__main__":
    Path(BUILD).mkdir(exist_ok=True)
    own = [f"tests.{x}{y}" for x in ("unit", "runs") for y in ("", ".*")]
    found = find_packages(include=[f"{x}{y}" for x in FOLDERS for y in ("", ".*")], exclude=own)
    setup(
        packages=[NAME, *(f"{NAME}.{x}" for x in found)],
        package_dir={NAME: "."},
        package_data={
            f"{NAME}.tests.harness.commands": ["*.ini"],
            f"{NAME}.tests.harness.report": ["*.html"],
            f"{NAME}.tests.harness.programs": ["*.json"],
            f"{NAME}.tests.mutation": ["*.toml"],
            f"{NAME}.kernels.mutants": ["*.diff"],
        },
        include_package_data=False,
        cmdclass={"build_py": BuildPackage, "editable_wheel": RefuseEditable},
        options={"egg_info": {"egg_base": BUILD}},
    )
