"""Writing the code of a kernel: its lines, the names of its values, and functions for parts of it."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from tests.harness.interpreter.ttir.calls.numbers import DTYPES, RAW
from tests.harness.interpreter.ttir.ir.parse import (
    Frame,
    Function,
    Operation,
    Type,
    Unsupported,
    Value,
    told_at,
)
from tests.harness.interpreter.ttir.writing.analyse import Root, facts_of

NOTHING = {"gpu.barrier", "ttg.barrier", "tt.debug_barrier", "ttg.local_barrier"}
"""Operations that code for one program after the other, or for all at once, has no need of."""
WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Pointer:
    """Where a pointer points: from the beginning of a parameter's storage on, by a sum of offsets.

    Attributes:
        memory: the name of the memory in the code.
        base: the code of offsets that are numbers.
        parts: the names of offsets that are arrays.
        stepping: those that change in equal steps along a dimension, with its number.
        element: the type of what is pointed to.
    """

    memory: str
    base: tuple[str, ...]
    parts: tuple[str, ...]
    stepping: tuple[tuple[int, str], ...]
    element: str

    @property
    def number(self) -> str:
        """Return the code of the offsets that are numbers, added up."""
        return " + ".join(self.base) or "0"

    @property
    def arrays(self) -> list[str]:
        """Return the names of all offsets that are arrays."""
        return [*self.parts, *(name for _, name in self.stepping)]

    def moved(self, **changes: Any) -> "Pointer":
        """Return another pointer to the same memory."""
        return replace(self, **changes)


@dataclass
class Line:
    """A line of code, and where the operation is in the kernel's source."""

    text: str
    depth: int
    frame: Frame | None
    defines: str = ""
    is_pure: bool = False


class Writer:
    """Writes lines. Subclasses have a method for each operation, called ``do_`` and the name of it."""

    def __init__(self, function: Function, path: str) -> None:
        self.function, self.path = function, path
        self.facts = facts_of(function)
        self.roots = self.facts.roots
        self.lines: list[Line] = []
        self.prelude: list[str] = []
        self.literals: dict[str, str] = {}
        self.depth = 1
        self.frame: Frame | None = None
        self.arrays: set[str] = {"programs"}
        self.pointers: dict[Value, Pointer] = {}
        self.memories: dict[frozenset[Root], str] = {}
        self.masks: dict[Value, tuple[str, ...]] = {}
        self.computed: set[Value] = set()
        self.constants: dict[Value, str] = {}
        self.zeros: set[str] = set()
        self.places: list[tuple[Frame, ...]] = []
        self.count = 0
        self.largest = 1

    # What a value is called.

    def wide(self, value: Value) -> str:
        """Return the code of a value as numbers."""
        if value in self.constants:
            return self.constants[value]
        if value in self.pointers:
            return self.offset(self.pointers[value])
        if value in self.masks and value not in self.computed:
            self.emit_mask(value)
        return value.name

    def raw(self, value: Value) -> str:
        """Return the code of a value as it lies in memory."""
        element = value.type.element
        if element not in RAW:
            return self.wide(value)
        if (code := self.constants.get(value)) in self.literals.values():
            return self.literal(f"narrow({code}, {element!r})")
        if self.is_number(value):
            return f"narrow({self.wide(value)}, {element!r})"
        return f"{value.name}r"

    def is_number(self, value: Value) -> bool:
        """Whether the code of a value is a number of Python or NumPy, not an array."""
        return value in self.facts.uniform

    def array(self, value: Value) -> str:
        """Return the code of a value as an array."""
        if not self.is_number(value):
            return self.wide(value)
        return f"array({self.wide(value)}, {value.type.rank}, {value.type.element!r})"

    def offset(self, pointer: Pointer) -> str:
        """Return the code of a pointer's offset as one number or array."""
        arrays = pointer.arrays
        return f"summed({pointer.number}, {tuple_of(arrays)})" if arrays else f"({pointer.number})"

    def literal(self, code: str) -> str:
        """Return a name for a number with a fraction, which is made once."""
        if "(" not in code:
            return code
        return self.literals.setdefault(code, f"K{len(self.literals)}")

    # Lines.

    def emit(self, text: str, defines: str = "", *, pure: bool = False) -> None:
        """Write a line."""
        self.lines.append(Line(text, self.depth, self.frame, defines, pure))

    def define(self, value: Value, expression: str) -> None:
        """Write a line that computes a value as numbers, and what is needed of it besides."""
        self.emit(f"{value.name} = {expression}", value.name, pure=True)
        self.known(value)

    def known(self, value: Value) -> None:
        """Make a value known that a line has computed as numbers, and write what is needed of it besides."""
        self.mark(value.name, self.is_number(value))
        if value.type.element in RAW and value in self.facts.raw and not self.is_number(value):
            self.assign(f"{value.name}r", f"narrow({value.name}, {value.type.element!r})", False)

    def mark(self, name: str, is_number: bool) -> None:
        """Remember of a name whether it is that of a number or of an array."""
        (self.arrays.discard if is_number else self.arrays.add)(name)

    def define_raw(self, value: Value, expression: str, *, pure: bool = True) -> None:
        """Write a line that gets a value as it lies in memory, and what is needed of it besides."""
        is_number, element = self.is_number(value), value.type.element
        if element not in RAW:
            self.assign(value.name, expression, is_number, pure=pure)
            return
        self.assign(f"{value.name}r", expression, is_number, pure=pure)
        if is_number:
            self.assign(value.name, f"widen(np.asarray({value.name}r), {element!r})[()]", is_number)
        elif value in self.facts.wide:
            self.assign(value.name, f"widen({value.name}r, {element!r})", is_number)

    def define_all(self, results: list[Value], expression: str) -> None:
        """Write a line that computes several values."""
        self.emit(f"{targets_of(results)}{expression}")
        for result in results:
            self.known(result)

    def assign(self, name: str, expression: str, is_number: bool, *, pure: bool = True) -> None:
        """Write an assignment."""
        self.emit(f"{name} = {expression}", name, pure=pure)
        self.mark(name, is_number)

    def emit_mask(self, value: Value) -> None:
        """Write a line that computes a mask, which loads and stores take in parts."""
        self.computed.add(value)
        self.assign(value.name, " & ".join(f"({x})" for x in self.masks[value]), False)

    def new(self, word: str) -> str:
        """Return a name that is not used yet."""
        self.count += 1
        return f"{word}{self.count}"

    def place(self, operation: Operation) -> int:
        """Return a number for an operation that touches memory."""
        self.places.append(operation.frames)
        return len(self.places) - 1

    def drop_unused(self) -> None:
        """Take away lines that compute what no other line uses."""
        while True:
            words: dict[str, int] = {}
            for line in self.lines:
                for word in WORD.findall(line.text):
                    words[word] = words.get(word, 0) + 1
            kept = [
                x
                for x in self.lines
                if not (x.is_pure and words[x.defines] == x.text.split(" = ")[0].count(x.defines))
            ]
            if len(kept) == len(self.lines):
                return
            self.lines = kept

    def operations(self, operations: list[Operation]) -> None:
        """Write operations, each at its place in the source."""
        for operation in operations:
            self.frame = self.shown(operation)
            self.largest = max(self.largest, *(size_of(x.type) for x in operation.results), 1)
            self.operation(operation)

    def shown(self, operation: Operation) -> Frame | None:
        """Return the place of an operation that is told: the innermost one in the kernel's file."""
        inside = [frame for frame in operation.frames if frame[0] == self.path]
        return inside[0] if inside else self.frame

    def operation(self, operation: Operation) -> None:
        """Write one operation. Raises Unsupported if there is no code for it."""
        name = operation.name
        method: Callable[[Operation], None] | None = getattr(self, f"do_{name.replace('.', '_')}", None)
        if method:
            method(operation)
        elif name not in NOTHING:
            raise Unsupported(self.told(f"the operation {name}", operation))

    def told(self, what: str, operation: Operation) -> str:
        """Return what can't be run, with where it is."""
        return told_at(what, [frame for frame in (self.shown(operation),) if frame])

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Write what is inside of a statement of Python. What is computed there may not be known behind it."""
        computed, arrays, depth = {*self.computed}, {*self.arrays}, self.depth
        self.depth += 1
        yield
        self.computed, self.arrays, self.depth = computed, arrays, depth

    def function_of(self, write: Callable[[], None], parameters: Iterable[str]) -> tuple[str, str]:
        """Write a function; return its name, and the code of the arrays from outside that it has to be given first."""
        before, outside, parameters = self.lines, {*self.arrays}, list(parameters)
        self.lines = []
        with self.deeper():
            write()
        body, self.lines = self.lines, before
        words = {word for line in body for word in WORD.findall(line.text)}
        given = sorted((words & outside) - {*parameters})
        name = self.new("part")
        self.emit(f"def {name}({', '.join([*given, *parameters])}):")
        self.lines += body
        return name, tuple_of(given)


def tuple_of(codes: Iterable[str]) -> str:
    """Return the code of a tuple."""
    return f"({''.join(x + ', ' for x in codes)})"


def targets_of(values: list[Value]) -> str:
    """Return the beginning of an assignment to all of some values, "" if there are none."""
    return f"{''.join(x.name + ', ' for x in values)}= " if values else ""


def with_passes(lines: list[Line]) -> Iterator[Line]:
    """Yield lines, with a statement in each block that has none."""
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        yield line
        if line.text.endswith(":") and (following is None or following.depth <= line.depth):
            yield Line("pass", line.depth + 1, line.frame)


def size_of(of: Type) -> int:
    """Return how many elements a tensor has."""
    return prod(of.shape)


def width_of(element: str) -> int:
    """Return how many bits an element has."""
    if element == "ptr":
        return 64
    if element.startswith("f8"):
        return 8
    return int(re.findall(r"\d+", element)[0])


def literal_of(text: str, element: str) -> str:
    """Return the code of a constant."""
    if element == "i1":
        return {"true": "True", "false": "False"}.get(text, "False")
    if element[0] == "i":
        return str(int(text, 0))
    if text.startswith("0x"):
        of, bits = ("f64", 64) if element == "f64" else (element, width_of(element))
        if of in RAW:
            return f"widen(np.array({text}, np.uint{bits}).view(raw_dtype({of!r})), {of!r})[()]"
        return f"np.uint{bits}({text}).view(np.{np.dtype(DTYPES[of]).name})"
    number = f"np.{np.dtype(DTYPES[element]).name}({float(text)!r})"
    return f"rounded({number}, {element!r})" if element in RAW else number
