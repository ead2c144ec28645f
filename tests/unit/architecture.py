"""Make the tree of packages and modules in ``docs/architecture.md`` from their docstrings.

``python -m tests.unit.architecture`` writes it into the page.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.harness.files import ROOT

PAGE = ROOT / "docs/architecture.md"

FOLDERS = ("strategies", "kernels", "reference", "tests")
"""The outermost packages, in the order in which data flows."""

HARNESS = "tests/harness"
WITH_MODULES = (
    *FOLDERS,
    "kernels/contract",
    "kernels/common",
    "kernels/algorithms",
    "kernels/algorithms/flash_v2",
    "kernels/algorithms/flash_v3",
    HARNESS,
)
"""The packages whose modules have a line each, as those within the harness have. Any other has a line for itself."""

COLUMN, WIDTH = 32, 120
"""Where descriptions begin, and how long lines are at most."""


def tree(root: Path) -> str:
    """Return a line for each package below a folder, and for the modules of those in ``WITH_MODULES``."""
    return "".join(f"{line}\n" for folder in FOLDERS for line in _lines(root, root / folder))


def _lines(root: Path, package: Path) -> Iterator[str]:
    path = package.relative_to(root)
    has_lines = path.as_posix() in WITH_MODULES or path.parent.as_posix() == HARNESS
    indent = "  " * len(path.parts)
    yield _line(f"{indent[2:]}{package.name}/", package / "__init__.py")
    for inner in sorted(package.iterdir()):
        if (inner / "__init__.py").exists():
            yield from _lines(root, inner)
        elif has_lines and inner.suffix == ".py" and inner.name != "__init__.py":
            yield _line(f"{indent}{inner.name}", inner)


def _line(name: str, module: Path) -> str:
    """Return a name and the first sentence of a module's docstring, on several lines if it is long."""
    docstring = ast.get_docstring(ast.parse(module.read_text()))
    if not docstring:
        raise ValueError(f"{module}: expected a docstring that says what it is for")
    sentence = re.split(r"\.(?:\s+(?=[A-Z`])|$)", docstring.partition("\n\n")[0])[0].replace("``", "`")
    begin = f"{name:<{COLUMN}}"
    return textwrap.fill(
        sentence, WIDTH, initial_indent=begin, subsequent_indent=" " * COLUMN, break_on_hyphens=False
    )


def with_tree(page: str, made: str) -> str:
    """Return a page whose one block of text is replaced by a tree."""
    return re.sub(r"(?<=^```text\n).*?(?=^```$)", lambda _: made, page, flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_tree(PAGE.read_text(), tree(ROOT)))
