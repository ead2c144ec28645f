"""Where the source of a kernel is: its file and line, found without importing it."""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from kernels.registry import SpecError, locate


def source_of(spec: str) -> tuple[str | None, int | None]:
    """Return the file and the line of what a SPEC names, each None if it is not known.

    The file is a path as the SPEC has it; that of a module is an absolute path, or one from the current folder if it is
    below that.
    """
    try:
        location, attribute = locate(spec)
        path = Path(location) if location.endswith(".py") else _file_of(location)
        text = path.read_text() if path else ""
        line = next(_lines(text, attribute.partition(".")[0]), None)
    except (SpecError, OSError, ValueError, SyntaxError):
        return None, None
    here = path and path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if path and here else path) if path else None, line


def _file_of(module: str) -> Path | None:
    """Return the file of a module, which is looked for along ``sys.path``; None if it has none."""
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    found = None
    for name in module.split("."):
        found = PathFinder.find_spec(name, places)
        places = list(found.submodule_search_locations or ()) if found else []
    return Path(found.origin) if found and found.origin else None


def _lines(text: str, name: str) -> Iterator[int]:
    """Yield the line of each definition or assignment of a name at the top of a module, the last one first."""
    for node in reversed(ast.parse(text).body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {getattr(node, "name", None), *(getattr(x, "id", None) for x in targets)}
        if name in names:
            yield node.lineno
