"""Number formats that NumPy does not have, and products in the precision of a GPU: as PTX has them.

A stand-alone script contains this file as it is, so it needs nothing but NumPy and Triton.
"""

import functools
from typing import Any

import numpy as np
import triton.language as tl

Array = np.ndarray[Any, Any]


FIRST_NOT_FINITE = {"fp8e4nv": 0x7F, "fp8e5": 0x7C, "fp8e4b8": 0x80, "fp8e5b16": 0x80, "fp8e4b15": 0x80}
"""By 8-bit format, the first pattern that is no finite number, without its sign bit."""


WITHOUT_NEGATIVE_ZERO = ("fp8e4b8", "fp8e5b16")
"""8-bit formats in which the pattern of -0 is NaN."""


INTEGER_LIMITS = {32: (-(2.0**31), 2.0**31 - 1), 64: (-(2.0**63), 2.0**63 - 1024)}
"""By width, the smallest and the largest float64 that can become an integer."""


PARTS = {"tf32x3": ("tf32", 2), "bf16x3": ("bf16", 2), "bf16x6": ("bf16", 3)}
"""By input precision, the format of the parts that a float32 operand of a product is split into, and their number."""


def decode(patterns: Array, name: str) -> Array:
    """Return the numbers of patterns as float32, which can hold all of them."""
    if name == "bf16":
        return np.left_shift(patterns, 16, dtype=np.uint32).view(np.float32)
    return numbers_of_8_bits(name)[patterns]


def to_bfloat16(values: Array, toward_zero: bool) -> Array:
    """Return the patterns of numbers in bfloat16; NaN becomes 0x7fff, as in PTX."""
    single = to_odd_float32(values) if values.dtype == np.float64 else values.astype(np.float32, copy=False)
    bits = single.view(np.uint32)
    rest = np.uint32(0) if toward_zero else ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    patterns = ((bits + rest) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FFF), patterns)


def matrix_product(a: Array, b: Array, precision: str) -> Array:
    """Return the product of matrices of float32, with operands as a Hopper's tensor cores take them.

    ``precision`` is Triton's ``input_precision`` in lower case. "tf32" cuts operands off behind 10 bits. Others but
    "ieee" split them into parts, and leave out the products of the smallest ones; where a number is infinite, its
    second part is NaN, and the small products are left out.
    """
    if precision == "tf32":
        return np.matmul(*((x.view(np.int32) & ~0x1FFF).view(np.float32) for x in (a, b)))
    if precision not in PARTS:
        return np.matmul(a, b)
    element, count = PARTS[precision]
    of_a, of_b = (_parts(x, element, count) for x in (a, b))
    with np.errstate(invalid="ignore"):
        pairs = [(i, j) for i in range(count) for j in range(count) if 0 < i + j < count]
        small = sum(np.matmul(of_a[i], of_b[j]) for i, j in reversed(pairs))
        return np.where(np.isnan(small), np.float32(0), small) + np.matmul(of_a[0], of_b[0])


def _parts(x: Array, element: str, count: int) -> list[Array]:
    """Return float32 numbers rounded to a format, what is missing then rounded to it, and so on."""
    found = []
    with np.errstate(invalid="ignore"):
        for _ in range(count):
            if element == "bf16":
                part = decode(to_bfloat16(x, toward_zero=False), "bf16")
            else:  # to nearest, and halves away from zero
                nearest = ((x.view(np.int32) + 0x1000) & ~0x1FFF).view(np.float32)
                part = np.where(np.isnan(x), x, nearest)
            found.append(part)
            x = x - part
    return found


def to_odd_float32(values: Array) -> Array:
    """Return float64 as float32, with inexact numbers as their odd neighbour, so that a second rounding is right."""
    single = values.astype(np.float32)
    bits = single.view(np.uint32) - (np.abs(single) > np.abs(values)).astype(np.uint32)
    inexact = (single != values) & ~np.isnan(values)
    return (bits | inexact.astype(np.uint32)).view(np.float32)


def to_8_bits(values: Array, name: str, toward_zero: bool) -> Array:
    """Return the patterns of numbers in an 8-bit format; too large ones become the largest, as with ``satfinite``."""
    finite = numbers_of_8_bits(name)[: FIRST_NOT_FINITE[name]].astype(np.float64)
    sizes = np.abs(values.astype(np.float64))
    if toward_zero:
        found = np.searchsorted(finite, sizes, side="right") - 1
    else:
        middles = (finite[1:] + finite[:-1]) / 2
        found = np.searchsorted(middles, sizes)
        tie = sizes == middles[np.minimum(found, len(middles) - 1)]
        found = found + (tie & (found % 2 == 1))
    signed = np.signbit(values) & ((found > 0) | (name not in WITHOUT_NEGATIVE_ZERO))
    patterns = np.minimum(found, len(finite) - 1) | (signed * 0x80)
    nan = 0x80 if name in WITHOUT_NEGATIVE_ZERO else 0x7F
    return np.where(np.isnan(values), nan, patterns).astype(np.uint8)


@functools.cache
def numbers_of_8_bits(name: str) -> Array:
    """Return the number of each pattern of an 8-bit format, float32 (256,)."""
    dtype = tl.dtype(name)
    patterns = np.arange(256)
    sizes = patterns & 0x7F
    exponents, fractions = np.divmod(sizes, 1 << dtype.fp_mantissa_width)
    # A subnormal has the exponent of the smallest normal number, and no leading one.
    wholes = fractions + (exponents > 0) * (1 << dtype.fp_mantissa_width)
    shifts = np.maximum(exponents, 1) - dtype.exponent_bias - dtype.fp_mantissa_width
    numbers = np.ldexp(wholes.astype(np.float32), shifts)
    numbers[sizes >= FIRST_NOT_FINITE[name]] = np.nan
    if name == "fp8e5":
        numbers[sizes == FIRST_NOT_FINITE[name]] = np.inf
    numbers = np.copysign(numbers, np.where(patterns < 0x80, 1, -1)).astype(np.float32)
    if name in WITHOUT_NEGATIVE_ZERO:
        numbers[0x80] = np.nan
    return numbers


def float_toward_zero(values: Array, to: np.dtype[Any]) -> Array:
    """Return numbers in one of NumPy's own formats, rounded toward zero."""
    nearest = values.astype(to)
    bits = nearest.view(f"u{to.itemsize}")
    return (bits - (np.abs(nearest) > np.abs(values)).astype(bits.dtype)).view(to)


def to_integers(values: Array, to: np.dtype[Any]) -> Array:
    """Cut numbers off to integers: too large ones become the largest, and NaN becomes 0, as with ``cvt.rzi``."""
    low, high = INTEGER_LIMITS[64 if to.itemsize == 8 else 32]
    if to.kind == "u":
        low, high = 0.0, 2 * high + 1 if to.itemsize < 8 else 2 * high
    cut = np.clip(np.nan_to_num(np.trunc(values.astype(np.float64)), posinf=high, neginf=low), low, high)
    return cut.astype(np.uint64 if to.kind == "u" else np.int64).astype(to)


def fused_to_odd(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z of narrower formats as float64, with inexact ones as their odd neighbour, to be rounded."""
    product = x.astype(np.float64) * y
    total = product + z
    # What the sum lost (Knuth's two-sum) decides if the sum is a tie of the narrower format.
    part = total - product
    lost = (product - (total - part)) + (z - part)
    inexact = np.isfinite(total) & (lost != 0)
    bits = total.view(np.int64) - (inexact & (np.signbit(lost) != np.signbit(total)))
    return (bits | inexact).view(np.float64)
