"""The code of kernels on disk: a second process that needs the same code compiles nothing, nor does a copy of the file.

Each kernel has two files in the folder, for each set of constants that it was launched with: the source, to be read,
and the compiled code, to be run. Their names are the kernel's and a hash of all that the code depends on.
"""

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import triton

from tests.harness.interpreter.ttir.calls import atomics, control, memory, numbers, shapes
from tests.harness.interpreter.ttir.ir.parse import Frame
from tests.harness.interpreter.ttir.writing.translate import Code

NO_COLUMNS = 13
"""The code of an entry of Python's table of lines that gives a line and no columns."""

OWN = ""
"""What stands for the file that a kernel is in, in code that is kept, so that copies of the file share it."""

FOLDER = "FLASHPROOF_CACHE_DIR"
"""The variable that names the folder; without it, it is ``flashproof/ttir`` where caches of the user lie."""


@dataclass(frozen=True)
class Compiled:
    """What runs a kernel: its code, and what ``Code`` tells of it besides."""

    function: Callable[..., Any]
    places: list[tuple[Frame, ...]]
    largest: int
    one_by_one: bool
    pointers: dict[int, str]


def folder() -> Path:
    """Return the folder that code is kept in."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "flashproof" / "ttir"


@cache
def version() -> str:
    """Return what all code depends on: the packages, and the files that write it."""
    files = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return hashlib.sha256(repr((sys.version, np.__version__, triton.__version__, files)).encode()).hexdigest()


def key_of(*told: Any) -> str:
    """Return a hash of all that the code of a kernel depends on."""
    return hashlib.sha256(repr((version(), *told)).encode()).hexdigest()[:32]


def path_of(name: str, key: str) -> Path:
    """Return the file of a kernel's compiled code; its source lies beside it, and ends with ``.py``."""
    return folder() / f"{name}-{key}.bin"


def find(name: str, key: str, path: str) -> Compiled | None:
    """Return the code of a kernel in a file; None if it is not kept, or can't be read.

    The functions that it calls from other files must come from the same files, which are told of them.
    """
    with suppress(OSError, ValueError, EOFError, TypeError):
        code, told = marshal.loads(path_of(name, key).read_bytes())
        others = {file for frames in told["places"] for file, _ in frames} - {OWN}
        if others <= {getattr(module, "__file__", None) for module in sys.modules.values()}:
            return _at(path, code, told)
    return None


def keep(name: str, key: str, code: Code, path: str) -> Compiled:
    """Compile the code of a kernel, and keep it if the folder can be written to.

    Args:
        name: the kernel's.
        key: the hash.
        code: what was translated.
        path: the file that the kernel is in: exceptions and faults then tell its lines.
    """
    told = {x.name: getattr(code, x.name) for x in fields(Compiled) if x.name != "function"}
    told["places"] = _renamed(code.places, path, OWN)
    compiled = _relocated(compile(code.text, OWN, "exec"), code.lines)
    with suppress(OSError):
        at = path_of(name, key)
        at.parent.mkdir(parents=True, exist_ok=True)
        _write(at.with_suffix(".py"), code.text.encode())
        _write(at, marshal.dumps((compiled, told)))
    return _at(path, compiled, told)


def _at(path: str, code: CodeType, told: Mapping[str, Any]) -> Compiled:
    """Return what runs a kernel that is in a file."""
    return Compiled(
        _function(_in_file(code, path)), **{**told, "places": _renamed(told["places"], OWN, path)}
    )


def _renamed(places: Sequence[tuple[Frame, ...]], path: str, other: str) -> list[tuple[Frame, ...]]:
    """Return places in which a file has another name."""
    return [tuple((other if file == path else file, line) for file, line in frames) for frames in places]


def _in_file(code: CodeType, path: str) -> CodeType:
    """Return code that is said to be of a file."""
    constants = tuple(_in_file(x, path) if isinstance(x, CodeType) else x for x in code.co_consts)
    return code.replace(co_filename=path, co_consts=constants)


def _relocated(code: CodeType, lines: list[int]) -> CodeType:
    """Return code with other numbers of lines, given for each line of its source; 0 stands for the one before.

    The table that says which instructions are of which line is that of Python 3.11 on (Objects/locations.md).
    """
    table = bytearray()
    first = before = lines[code.co_firstlineno - 1] or 1
    for start, end, line in code.co_lines():
        now = (lines[line - 1] if line else 0) or before
        units = (end - start) // 2
        while units:
            part = min(units, 8)
            table.append(0x80 | NO_COLUMNS << 3 | part - 1)
            table += _signed(now - before)
            units, before = units - part, now
    constants = tuple(_relocated(x, lines) if isinstance(x, CodeType) else x for x in code.co_consts)
    return code.replace(co_linetable=bytes(table), co_firstlineno=first, co_consts=constants)


def _signed(number: int) -> bytes:
    """Return a number as that table has it: 6 bits in each byte, the lowest ones first, and the sign in the lowest."""
    rest = -number << 1 | 1 if number < 0 else number << 1
    found = bytearray()
    while rest >= 0x40:
        found.append(0x40 | rest & 0x3F)
        rest >>= 6
    found.append(rest)
    return bytes(found)


def _function(code: CodeType) -> Callable[..., Any]:
    """Return the function of a kernel, which finds what it calls among its globals."""
    names = {
        name: value
        for part in (numbers, shapes, memory, atomics, control)
        for name, value in vars(part).items()
        if not name.startswith("_")
    }
    exec(code, names)
    found: Callable[..., Any] = names["kernel"]
    return found


def _write(path: Path, content: bytes) -> None:
    """Write a file at once, as other processes may read it, or write the same."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
