"""The operator mutants for a SPEC: those of its module or package, and of modules from which these import."""

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path

from kernels.mutants.mutant import load_module, source_of
from kernels.registry import locate
from tests.mutation.operators import SourceMutant, source_mutants

STUB = """{diff}
from pathlib import Path

from {loader} import load_module

{attribute} = load_module({entry!r}, {{{module!r}: Path(__file__).with_name("mutant.txt").read_text()}}).{attribute}
"""


@dataclass(frozen=True)
class Target:
    """One mutant of one module; the module belongs to the kernel that ``spec`` names."""

    spec: str
    module: str
    mutant: SourceMutant

    @property
    def diff(self) -> str:
        """Return the edit as a unified diff with one line of context."""
        return self.mutant.diff(source_of(self.module))

    @property
    def change(self) -> str:
        """Return a name that outlives edits elsewhere in the file: the function, and the edit among its neighbours."""
        lines = (f"{x[0]} {x[1:].strip()}" for x in self.diff.splitlines()[2:] if x[:2] != "@@")
        return "\n".join([self.mutant.function, *filter(str.strip, lines)])

    def write(self, folder: Path) -> str:
        """Write the mutant as a module below ``folder``, and return the SPEC of its kernel."""
        entry, attribute = locate(self.spec)
        here = folder / self.mutant.name.replace(":", "-")
        here.mkdir(parents=True, exist_ok=True)
        (here / "mutant.txt").write_text(self.mutant.source)
        fields = {
            "diff": textwrap.indent(self.diff, "# "),
            "attribute": attribute,
            "loader": load_module.__module__,
        }
        (here / "kernel.py").write_text(
            STUB.format(entry=absolute(entry), module=absolute(self.module), **fields)
        )
        return f"{here / 'kernel.py'}:{attribute}"


def targets(spec: str) -> list[Target]:
    """Return every operator mutant of a kernel. Raises SpecError, and SyntaxError for a file that doesn't parse."""
    entry, _ = locate(spec)
    return [
        Target(spec, module, mutant)
        for module in sources(entry)
        for mutant in source_mutants(source_of(module))
    ]


def sources(entry: str) -> list[str]:
    """Return a module or file, and all from which it, or a module in it that it imports, imports."""
    found = [entry]
    for module in found:  # which grows
        if f"{module}.".startswith(f"{entry}."):
            found += [name for name in neighbours(module) if name not in found]
    return found


def neighbours(module: str) -> list[str]:
    """Return the modules from which a module imports: of the same outermost package, or beside the file."""
    imported = [
        node.module
        for node in ast.walk(ast.parse(source_of(module)))
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    if module.endswith(".py"):
        paths = [Path(module).with_name(f"{name}.py") for name in dict.fromkeys(imported)]
        return [str(path) for path in paths if path.is_file()]
    package = module.partition(".")[0]
    return [name for name in dict.fromkeys(imported) if name.startswith(f"{package}.")]


def absolute(module: str) -> str:
    """Return a file's path made absolute, so that it holds from any folder, or a module's name as it is."""
    return str(Path(module).resolve()) if module.endswith(".py") else module
