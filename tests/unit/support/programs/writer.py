"""Writing a program: its lines, its arguments, and the values that a line may use."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.unit.support.programs.spans import EIGHT_BITS, INTEGERS, Span, anything, bits_of, is_float, settled
from tests.unit.support.programs.values import Argument, Numbers, Shape, Value

T = TypeVar("T")

COMPUTED = (
    ("int32",) * 5
    + ("int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64")
    + (("float32",) * 5 + ("float16",) * 3 + ("bfloat16",) * 3 + ("float64",))
)
"""Types that are computed in, each as often as it is to be drawn."""


class Writer:
    """Collects the lines of one program.

    ``exact`` keeps to what a GPU computes with the same bits: no numbers that are not finite, no functions that a GPU
    approximates, no sums whose order is not told and shows. ``watched`` adds a line that calls ``observe`` after each
    definition, or ``tl.static_assert`` of its type, to check what is said of it.
    """

    def __init__(self, seed: int, exact: bool, grid: Shape, watched: str = "") -> None:
        self.random = random.Random(seed)
        self.exact, self.grid, self.watched = exact, grid, watched
        self.prefix = f"program_{seed}"
        self.lines: list[str] = []
        self.indent = 1
        self.values: list[Value] = []
        self.arguments: list[Argument] = []
        self.helpers: dict[str, str] = {}
        self.sizes: dict[int, str] = {}
        self.used: set[str] = set()
        self.count = 0
        self.depth = 0

    @property
    def programs(self) -> int:
        """Return how many programs the grid has."""
        return math.prod(self.grid)

    # Drawing.

    def chance(self, probability: float) -> bool:
        """Return true with this probability."""
        return self.random.random() < probability

    def pick(self, *options: T) -> T:
        """Return one of the options."""
        return options[int(self.random.random() * len(options))]

    def among(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return self.pick(*options)

    def whole(self, low: int, high: int) -> int:
        """Return an integer from low to high."""
        return low + int(self.random.random() * (high - low + 1))

    # Lines and names.

    def emit(self, *lines: str) -> None:
        """Append lines at the current depth."""
        self.lines += ["    " * self.indent + line for line in lines]

    def name(self, prefix: str = "v") -> str:
        """Return a name that is not yet used."""
        self.count += 1
        return f"{prefix}{self.count}"

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Write the lines of a block below its header; what is defined in it is not used after it."""
        self.emit(header)
        kept = list(self.values)
        self.indent += 1
        yield
        self.indent -= 1
        self.values = kept

    def define(
        self,
        text: str,
        dtype: str,
        shape: Shape,
        span: Span | None = None,
        *,
        name: str = "",
        into: bool = True,
    ) -> Value:
        """Give an expression a name, by which other lines may use it."""
        name = name or self.name()
        self.emit(f"{name} = {text}")
        return self.known(Value(name, dtype, shape, settled(span or anything(dtype), dtype)), into=into)

    def known(self, value: Value, *, into: bool = True) -> Value:
        """Take a value that lines above define among those that other lines may use."""
        if self.watched == "types" and not value.loose:
            right = [f"{value.text}.shape[{d}] == {n}" for d, n in enumerate(value.shape)]
            right = [f"{value.text}.dtype == tl.{value.dtype}", *right]
            self.emit(f"tl.static_assert({' and '.join(right)}, '{value.text}: {value.dtype} {value.shape}')")
        elif self.watched == "numbers" and not value.loose:
            self.emit(
                f"observe({value.text!r}, {value.text}, {value.dtype!r}, {value.shape}, {_written(value.span)})"
            )
        if into:
            self.values.append(value)
        return value

    # Arguments.

    def argument(self, given: Any, prefix: str, annotation: str = "", *, is_output: bool = False) -> str:
        """Add an argument and return its name."""
        name = self.name(prefix)
        self.arguments.append(Argument(name, given, annotation, is_output))
        return name

    def number(self, value: int) -> str:
        """Return an integer as text: a literal, an argument or a constant."""
        how = self.random.random()
        if how < 0.25:
            return self.argument(value, "n")
        if how < 0.35:
            return self.argument(value, "N", ": tl.constexpr")
        return str(value) if value >= 0 else f"({value})"

    def numbers(
        self, dtype: str, count: int, kind: str = "", low: int = 0, high: int = 0
    ) -> tuple[Numbers, Span]:
        """Return the numbers of a tensor of inputs and what is known of them."""
        seed = self.whole(0, 2**31 - 1)
        if not kind and is_float(dtype):
            kind = (
                self.pick("whole", "normal", "normal") if self.exact else self.pick("whole", "normal", "bits")
            )
        elif not kind:
            kind = self.pick("whole", "bits")
        if (low, high) == (0, 0):
            high = self.pick(2, 4, 7)
            low = 0 if dtype.startswith("uint") else -high
        made = Numbers(dtype, count, kind, low, high, seed)
        if kind == "bits":
            return made, anything(dtype)
        return made, settled(Span(low, high, kind == "whole"), dtype)

    def size(self, size: int) -> str:
        """Return the size of a dimension as text; some sizes are constants among the arguments."""
        if size not in self.sizes:
            constant = self.depth == 0 and self.chance(0.3)
            self.sizes[size] = self.argument(size, "SIZE", ": tl.constexpr") if constant else str(size)
        return self.sizes[size]

    def lanes(self, shape: Shape) -> list[str]:
        """Return the index along each dimension, as a tensor that broadcasts to the shape."""
        return [expanded(f"tl.arange(0, {self.size(n)})", d, len(shape)) for d, n in enumerate(shape)]

    # Choosing values.

    def candidates(self, fits: Callable[[Value], bool]) -> list[Value]:
        """Return the values in reach that fit."""
        return [x for x in self.values if fits(x)]

    def recent(self, options: Sequence[T]) -> T:
        """Return one of the options, the later ones more often."""
        at = max(self.random.random(), self.random.random())
        return options[int(at * len(options))]

    def tensor(self, fits: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """Return a tensor in reach that fits; one of 8-bit numbers only if nothing can be done but cast it."""
        options = self.candidates(
            lambda x: bool(x.shape) and x.dtype not in (*EIGHT_BITS, "int1") and fits(x)
        )
        return self.recent(options) if options else None

    def mask(self, shape: Shape) -> Value:
        """Return a condition for each entry of a shape."""
        options = self.candidates(lambda x: x.dtype == "int1" and x.shape == shape)
        if options and self.chance(0.5):
            return self.recent(options)
        lane = self.among(self.lanes(shape))
        text = self.pick(f"({lane} % {self.whole(2, 5)}) != 0", f"{lane} >= {self.whole(0, 5)}")
        if len(shape) > 1:
            text = f"tl.broadcast_to({text}, {list(shape)})"
        return self.define(text, "int1", shape, Span(0, 1))

    def scalar(self, fits: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """Return a number in reach that fits."""
        options = self.candidates(lambda x: not x.shape and fits(x))
        return self.recent(options) if options else None

    def literal(self, dtype: str) -> Value:
        """Return a constant that takes the type of what it is beside."""
        if is_float(dtype):
            number: float = self.pick(0.5, 1.5, 3.0, -2.0, 0.25, 1.0, -1.0, 0.1)
            whole = number == int(number)
            return Value(str(number), dtype, (), settled(Span(number, number, whole), dtype))
        number = self.whole(1, 7) if dtype.startswith("uint") else self.pick(-3, -2, -1, 1, 2, 3, 5, 7)
        return Value(str(number) if number >= 0 else f"({number})", dtype, (), Span(number, number))

    def cast(self, value: Value, dtype: str) -> Value | None:
        """Return a value in another type; None where that has no meaning, or not the same on every device."""
        source, text = value.dtype, value.text
        if source == dtype:
            return value
        if value.loose:
            return None
        span = value.span
        if is_float(source) and not is_float(dtype):
            if source in EIGHT_BITS or not span.fits(dtype):
                return None
            low, high = INTEGERS[dtype]
            span = Span(max(math.trunc(span.low), low), min(math.trunc(span.high), high))
        elif not is_float(source) and is_float(dtype):
            narrow = bits_of(dtype) <= 16
            if dtype in EIGHT_BITS or (self.exact and narrow and span.bound > 2**24):
                return None
        elif is_float(source) and is_float(dtype):
            pair = {source, dtype}
            if pair & set(EIGHT_BITS) and (pair <= set(EIGHT_BITS) or "float64" in pair):
                return None
            if pair == {"float64", "bfloat16"}:
                text += ".to(tl.float32)"
            if dtype in EIGHT_BITS and span.finite:  # too large numbers become the largest
                largest = 448.0 if dtype == "float8e4nv" else 57344.0
                ends = (max(span.low, -largest), min(span.high, largest))
                span = Span(min(ends), max(ends), span.whole and span.bound <= largest, True, True)
                return Value(f"{text}.to(tl.{dtype})", dtype, value.shape, _kept(span, dtype))
        result = Value(f"{text}.to(tl.{dtype})", dtype, value.shape, settled(span, dtype))
        return result if self.allows(result.span) else None

    def allows(self, span: Span) -> bool:
        """Whether such numbers may occur: those that are not finite only where bits need not be a GPU's."""
        return span.finite or not self.exact

    def partner(self, value: Value) -> Value:
        """Return something of the same type that broadcasts to the shape of a value, to be combined with it."""
        how = self.random.random()
        if how < 0.6:
            other = self.tensor(lambda x: x.shape == value.shape and x.text != value.text)
            found = other and self.cast(other, value.dtype)
            if found:
                return found
        if how < 0.75:
            other = self.scalar(lambda x: not x.loose and x.dtype != "int1")
            found = other and self.cast(other, value.dtype)
            if found:
                return found
        if how < 0.9 and len(value.shape) > 1:
            axis = self.whole(0, len(value.shape) - 1)
            other = self.tensor(lambda x: x.shape == (value.shape[axis],))
            found = other and self.cast(other, value.dtype)
            if found:
                text = expanded(found.text, axis, len(value.shape))
                return Value(text, value.dtype, value.shape, found.span)
        if value.dtype == "int32" and how > 0.95:
            loose = self.scalar(lambda x: x.loose)
            if loose:
                return loose
        return self.literal(value.dtype)

    def without_negative_zero(self, value: Value) -> Value:
        """Return a value with 0 for -0, so that it does not matter which of them is the larger one."""
        if not value.span.negative_zero:
            return value
        span = Span(value.span.low, value.span.high, value.span.whole, value.span.finite)
        return Value(f"({value.text} + 0.0)", value.dtype, value.shape, span)


def expanded(text: str, axis: int, rank: int) -> str:
    """Return a vector as a tensor of this rank, along the axis."""
    if rank == 1:
        return text
    return f"{text}[{', '.join(':' if d == axis else 'None' for d in range(rank))}]"


def _kept(span: Span, dtype: str) -> Span:
    kept = settled(span, dtype)
    return kept if kept.finite else Span(-57344.0 * 1.1, 57344.0 * 1.1, False, True, True)


def _written(span: Span) -> str:
    ends = ", ".join(f"float('{x}')" if isinstance(x, float) else str(x) for x in (span.low, span.high))
    return f"({ends}, {span.whole}, {span.finite}, {span.negative_zero})"
