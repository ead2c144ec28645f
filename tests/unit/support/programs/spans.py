"""What is known of the numbers of a value: between which ends they lie, if they are whole, finite, or -0."""

import math
from dataclasses import dataclass, replace

INTEGERS = {
    "int1": (0, 1),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
"""By type of integer, its smallest and its largest number."""

FLOATS = {
    "float16": (65504.0, 2**11),
    "bfloat16": (2.0**127 * 1.99, 2**8),
    "float32": (2.0**127 * 1.99, 2**24),
    "float64": (2.0**1023, 2**53),
    "float8e4nv": (448.0, 2**4),
    "float8e5": (57344.0, 2**3),
}
"""By format, a number that is as large as its largest, and the integer up to which it has every integer."""

EIGHT_BITS = ("float8e4nv", "float8e5")

MARGIN = 1 / 16
"""What rounding may add to an end, in relation to it, in each of these formats."""


def is_float(dtype: str) -> bool:
    """Whether a type is one of floating-point numbers."""
    return dtype in FLOATS


def bits_of(dtype: str) -> int:
    """Return the width of a type in memory."""
    if dtype in ("int1", *EIGHT_BITS):
        return 8
    return int(dtype[-2:]) if dtype[-2:].isdigit() else int(dtype[-1])


@dataclass(frozen=True)
class Span:
    """Numbers from ``low`` to ``high``; where ``finite`` is false, there may be infinities and NaN among them."""

    low: float
    high: float
    whole: bool = True
    finite: bool = True
    negative_zero: bool = False

    @property
    def bound(self) -> float:
        """Return the size of the largest number."""
        return max(abs(self.low), abs(self.high))

    def __add__(self, other: "Span") -> "Span":
        return self._with(
            other,
            self.low + other.low,
            self.high + other.high,
            self.negative_zero and other.negative_zero,
        )

    def __sub__(self, other: "Span") -> "Span":
        return self._with(other, self.low - other.high, self.high - other.low, self.negative_zero)

    def __mul__(self, other: "Span") -> "Span":
        ends = [x * y for x in (self.low, self.high) for y in (other.low, other.high)]
        positive = all(x.low >= 0 and not x.negative_zero for x in (self, other))
        return self._with(other, min(ends), max(ends), not positive)

    def __or__(self, other: "Span") -> "Span":
        """Return the span of numbers that are in either."""
        return self._with(
            other,
            min(self.low, other.low),
            max(self.high, other.high),
            self.negative_zero or other.negative_zero,
        )

    def __neg__(self) -> "Span":
        return replace(self, low=-self.high, high=-self.low, negative_zero=True)

    def _with(self, other: "Span", low: float, high: float, negative_zero: bool) -> "Span":
        return Span(low, high, self.whole and other.whole, self.finite and other.finite, negative_zero)

    def repeated(self, times: int) -> "Span":
        """Return the span of sums of so many of these numbers, or of none."""
        return replace(self, low=min(self.low * times, 0), high=max(self.high * times, 0))

    def fits(self, dtype: str) -> bool:
        """Whether a type of integers holds what is left of these numbers when they are cut off."""
        low, high = INTEGERS[dtype]
        return self.finite and low - 1 < self.low and self.high < high + 1


def settled(span: Span, dtype: str) -> Span:
    """Return what is known of such numbers in a type: integers wrap around, and numbers are rounded."""
    if dtype in INTEGERS:
        low, high = INTEGERS[dtype]
        inside = span.finite and low <= span.low and span.high <= high
        return Span(int(span.low), int(span.high)) if inside else Span(low, high)
    largest, every = FLOATS[dtype]
    if not span.finite or math.isnan(span.low) or math.isnan(span.high):
        return anything(dtype)
    if span.whole and span.bound <= every:
        return span
    low, high = span.low - abs(span.low) * MARGIN, span.high + abs(span.high) * MARGIN
    if max(abs(low), abs(high)) >= largest:
        return anything(dtype)
    return Span(low, high, False, True, span.negative_zero or (low < 0 and not span.whole))


def anything(dtype: str) -> Span:
    """Return the span of a type's numbers, of which nothing is known."""
    if dtype in INTEGERS:
        return Span(*INTEGERS[dtype])
    return Span(-math.inf, math.inf, False, False, True)
