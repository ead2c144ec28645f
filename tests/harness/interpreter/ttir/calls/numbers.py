"""What the code of a kernel calls to compute with numbers.

A value that is the same in all programs and places is a number of Python or NumPy. Any other is an array whose first
dimension is that of the programs, and whose further ones are those of the tensor; a dimension along which all is equal
may have size 1. Integers are signed, with the width of their type. Numbers of 16 and 8 bits with a fraction are float32
arrays of what they stand for ("wide"), or arrays of their bits as they lie in memory ("raw").
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import np_erf_fp32, np_erf_fp64, np_umulhi_u64

from tests.harness.interpreter.formats import (
    decode,
    float_toward_zero,
    fused_to_odd,
    to_8_bits,
    to_bfloat16,
    to_integers,
)
from tests.harness.interpreter.repaired import fused_float64

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "i1": np.bool_,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "f16": np.float32,
    "bf16": np.float32,
    "f32": np.float32,
    "f64": np.float64,
    "ptr": np.int64,
}
"""The types of arrays, by that of the elements in TTIR: of those with a fraction, the wide one."""

RAW: dict[str, Any] = {"f16": np.float16, "bf16": np.uint16}
"""The types of arrays of bits, where they are not those of ``DTYPES``."""

EIGHT_BITS = {
    "f8E4M3FN": "fp8e4nv",
    "f8E5M2": "fp8e5",
    "f8E4M3FNUZ": "fp8e4b8",
    "f8E5M2FNUZ": "fp8e5b16",
    "f8E4M3B11FNUZ": "fp8e4b15",
}
"""8-bit formats: their names in TTIR and in Triton."""
DTYPES |= dict.fromkeys(EIGHT_BITS, np.float32)
RAW |= dict.fromkeys(EIGHT_BITS, np.uint8)

FORMATS_OF_TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8E4M3FN": torch.float8_e4m3fn,
    "f8E5M2": torch.float8_e5m2,
}
"""Formats that PyTorch converts as PTX does, to nearest even, and faster than NumPy."""

SATURATES = {"f8E4M3FN": 448.0, "f8E5M2": 57344.0}
"""By format, the largest number, which larger ones become."""

UNSIGNED = {np.dtype(f"i{size}"): np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
SIGNED = {unsigned: signed for signed, unsigned in UNSIGNED.items()}


def raw_dtype(element: str) -> np.dtype[Any]:
    """Return the type of elements as they lie in memory."""
    return np.dtype(RAW.get(element) or DTYPES[element])


def narrow(x: Any, element: str) -> Array:
    """Return the bits of numbers in a format of 16 or 8 bits, rounded to nearest even."""
    values = np.asarray(x, np.float32) if not isinstance(x, np.ndarray) else x
    to = FORMATS_OF_TORCH.get(element)
    if to is None or values.dtype == np.float64:
        return narrow_slowly(values, element)
    if element in SATURATES:
        values = np.asarray(np.clip(values, -SATURATES[element], SATURATES[element]))
    bits = _torch(values).to(to)
    return bits.numpy() if element == "f16" else bits.view(_BITS_OF_TORCH[to.itemsize]).numpy()


_BITS_OF_TORCH = {1: torch.uint8, 2: torch.uint16}


def _torch(values: Array) -> Tensor:
    """Return an array as a tensor of PyTorch, which wants one that it may write to."""
    flags = values.flags
    return torch.from_numpy(values if flags.writeable and flags.c_contiguous else values.copy())


def narrow_slowly(values: Array, element: str, *, toward_zero: bool = False) -> Array:
    """Return what ``narrow`` does of any format and width, or rounded toward zero."""
    if element == "f16":
        return float_toward_zero(values, np.dtype(np.float16)) if toward_zero else values.astype(np.float16)
    if element == "bf16":
        return to_bfloat16(values, toward_zero)
    return to_8_bits(values, EIGHT_BITS[element], toward_zero)


def widen(bits: Array, element: str) -> Array:
    """Return the numbers that bits of a format of 16 or 8 bits stand for."""
    if element == "f16":
        if bits.size < FEW:
            return bits.astype(np.float32)
        return _torch(bits).to(torch.float32).numpy()
    if element == "bf16":
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    return decode(bits, EIGHT_BITS[element])


FEW = 256
"""Below so many elements NumPy converts faster than PyTorch, which takes microseconds to be called."""


def rounded(x: Any, element: str) -> Any:
    """Return numbers rounded to a format of 16 or 8 bits."""
    found = widen(narrow(x, element), element)
    return found if isinstance(x, np.ndarray) else found[()]


def cut(x: Any, element: str) -> Any:
    """Return numbers rounded toward zero to another format."""
    values = np.asarray(x)
    if element in RAW:
        found = widen(narrow_slowly(values, element, toward_zero=True), element)
    else:
        found = float_toward_zero(values, np.dtype(DTYPES[element]))
    return found if isinstance(x, np.ndarray) else found[()]


def wrap(x: int, bits: int) -> int:
    """Return the integer of so many bits that has the lowest bits of x."""
    half = 1 << (bits - 1)
    return ((x + half) & ((1 << bits) - 1)) - half


def unsigned(x: Any, bits: int) -> Any:
    """Return integers as unsigned ones of the same bits."""
    if isinstance(x, np.ndarray):
        return x.view(UNSIGNED[x.dtype])
    return x & ((1 << bits) - 1)


def signed(x: Any, bits: int) -> Any:
    """Return unsigned integers as signed ones of the same bits."""
    if isinstance(x, np.ndarray):
        return x.view(SIGNED[x.dtype])
    return wrap(int(x), bits)


def quotient(a: Any, b: Any) -> Any:
    """Return a / b, rounded toward zero; 0 where b is 0."""
    if isinstance(a, int) and isinstance(b, int):
        return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    if isinstance(b, int) and b > 0:
        found = np.floor_divide(a, b)
        if (a < 0).any():
            found = found + ((found < 0) & (found * b != a))
        return found.astype(a.dtype, copy=False)
    of = a.dtype if isinstance(a, np.ndarray) else b.dtype
    a, b = np.asarray(a, of), np.asarray(b, of)
    return np.floor_divide(a - np.fmod(a, b), b)


def remainder(a: Any, b: Any) -> Any:
    """Return what ``quotient`` leaves, with the sign of a; 0 where b is 0."""
    if isinstance(a, int) and isinstance(b, int):
        return 0 if b == 0 else int(math.fmod(a, b)) if abs(a) < 2**53 > abs(b) else a - quotient(a, b) * b
    of = a.dtype if isinstance(a, np.ndarray) else b.dtype
    return np.fmod(np.asarray(a, of), np.asarray(b, of))


def unsigned_quotient(a: Any, b: Any) -> Any:
    """Return a / b of unsigned integers, cut off; 0 where b is 0."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b else 0
    return np.floor_divide(a, b)


def unsigned_remainder(a: Any, b: Any) -> Any:
    """Return what ``unsigned_quotient`` leaves."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b if b else 0
    return np.remainder(a, b)


def high_product(a: Any, b: Any, bits: int) -> Any:
    """Return the upper half of the product of two integers that count as unsigned."""
    if isinstance(a, int) and isinstance(b, int):
        return wrap(((a & ((1 << bits) - 1)) * (b & ((1 << bits) - 1))) >> bits, bits)
    of = a.dtype if isinstance(a, np.ndarray) else b.dtype
    a, b = (np.asarray(x, of).view(UNSIGNED[of]) for x in (a, b))
    if bits == 64:
        return np_umulhi_u64(*np.broadcast_arrays(a, b)).astype(np.uint64).view(of)
    wide = np.dtype(f"u{bits // 4}")
    return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(UNSIGNED[of]).view(of)


def shifted_right(x: Any, by: Any, bits: int) -> Any:
    """Return unsigned integers shifted to the right."""
    if isinstance(x, int) and isinstance(by, int):
        return wrap((x & ((1 << bits) - 1)) >> by, bits)
    of = x.dtype if isinstance(x, np.ndarray) else by.dtype
    x, by = (np.asarray(value, of).view(UNSIGNED[of]) for value in (x, by))
    return (x >> by).view(of)


def select(condition: Any, a: Any, b: Any, element: str) -> Any:
    """Return a where the condition holds, and b elsewhere."""
    if not isinstance(condition, np.ndarray):
        return a if condition else b
    of = DTYPES[element]
    a = a if isinstance(a, np.ndarray) else of(a)
    b = b if isinstance(b, np.ndarray) else of(b)
    return np.where(condition, a, b)


def integer(x: Any, element: str) -> Any:
    """Return numbers cut off to signed integers, as ``cvt.rzi`` does."""
    found = to_integers(np.asarray(x), np.dtype(DTYPES[element]))
    return found if isinstance(x, np.ndarray) else int(found)


def unsigned_integer(x: Any, element: str) -> Any:
    """Return numbers cut off to unsigned integers, with the bits of these."""
    of = np.dtype(DTYPES[element])
    found = to_integers(np.asarray(x), UNSIGNED[of]).view(of)
    return found if isinstance(x, np.ndarray) else int(found)


def number(x: Any, element: str) -> Any:
    """Return integers, or numbers with a fraction, as numbers of a wide type."""
    of = DTYPES[element]
    return x.astype(of) if isinstance(x, np.ndarray) else of(x)


def bits_of(x: Any, source: str, element: str) -> Any:
    """Return the bits of values of one type as values of another one, of the same width."""
    values = x if isinstance(x, np.ndarray) else np.asarray(x, raw_dtype(source))
    found = values.view(raw_dtype(element))
    if isinstance(x, np.ndarray):
        return found
    return found.item() if found.dtype.kind in "ib" else found[()]


def fma(x: Any, y: Any, z: Any, element: str) -> Any:
    """Return x * y + z, rounded once, except for float64."""
    if element == "f64":
        return fused_float64(x, y, z)
    odd = fused_to_odd(np.asarray(x), np.asarray(y), np.asarray(z))
    found = widen(narrow_slowly(odd, element), element) if element in RAW else odd.astype(np.float32)
    return found if any(isinstance(v, np.ndarray) for v in (x, y, z)) else found[()]


def erf(x: Any) -> Any:
    """Return the error function."""
    return np_erf_fp32(x) if x.dtype == np.float32 else np_erf_fp64(x)


def rsqrt(x: Any) -> Any:
    """Return the reciprocal of the square root."""
    return 1 / np.sqrt(x)


def clamped(x: Any, low: Any, high: Any, *, propagates_nan: bool) -> Any:
    """Return x limited to a range; NaN stays, or becomes the lower limit."""
    at_least, at_most = (np.maximum, np.minimum) if propagates_nan else (np.fmax, np.fmin)
    return at_most(at_least(x, low), high)


OWN = {"rsqrt": ("rsqrt", 1), "erf": ("erf", 1)}
"""Functions of a device library that are above: their names in code, and how many arguments they take."""


@cache
def library_function(symbol: str, arguments: int) -> str | None:
    """Return the code of what stands for a function of NVIDIA's device library; None if there is none for numbers."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    for candidate in (name.removesuffix("f"), name):
        if OWN.get(candidate, ("", 0))[1] == arguments:
            return OWN[candidate][0]
        found = getattr(np, candidate, None)
        if isinstance(found, np.ufunc) and found.nin == arguments and not found.types[0].endswith("?"):
            return f"np.{candidate}"
    return None
