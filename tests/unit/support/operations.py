"""Random numbers of each format, and what a Triton kernel of one program makes of them."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.unit.support.calling import DEVICE

COUNT = 4096
WIDE = ("float16", "bfloat16", "float32")
"""Formats that attention is computed in."""
FLUSHED = 2.0**-126
"""Numbers smaller than this may be taken for 0 by PTX's approximate functions."""


def patterns(dtype: str, count: int = COUNT, seed: int = 0) -> Tensor:
    """Return numbers (count,) with random bits: half with any exponent, half of a size that occurs in attention."""
    to: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (count * to.itemsize,), generator=generator, dtype=torch.uint8)
    usual = (torch.randn(count, generator=generator, dtype=torch.float64) * 4).to(to)
    return torch.where(torch.arange(count) % 2 == 0, bits.view(to).to(torch.float64), usual.double()).to(to)


def run(
    kernel: Any, *inputs: Any, out: torch.dtype, shape: tuple[int, ...] = (COUNT,), **options: Any
) -> Tensor:
    """Return what a kernel of one program stores in its last argument, which has this dtype and shape."""
    result = torch.full(shape, 77, dtype=torch.float64).to(out).to(DEVICE)
    kernel[(1,)](*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in inputs), result, **options)
    return result.cpu()


def assert_same(actual: Tensor, expected: Tensor, relative: float = 0.0, absolute: float = 0.0) -> None:
    """Assert that there is NaN where NaN is expected, and elsewhere the number, within what is allowed."""
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape
    error = (actual - expected).abs()
    right = (error <= relative * expected.abs() + absolute) | (actual == expected)
    right |= actual.isnan() & expected.isnan()
    wrong = (~right).nonzero()[:4]
    told = [(i.tolist(), float(actual[tuple(i)]), float(expected[tuple(i)])) for i in wrong]
    assert not told, f"{int((~right).sum())} of {right.numel()} (index, actual, expected): {told}"


def nearest(values: Tensor, dtype: str) -> Tensor:
    """Return float64 numbers rounded to nearest even by the table of all numbers, and too large ones as on a GPU."""
    to: torch.dtype = getattr(torch, dtype)
    bits = torch.arange(2 ** (8 * to.itemsize - 1)).to(torch.int16 if to.itemsize == 2 else torch.uint8)
    table = bits.view(to).double()
    table = table[: int(table.isfinite().sum())]
    sizes = values.abs()
    above = torch.searchsorted(table, sizes).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    down, up = sizes - table[below], table[above] - sizes
    chosen = torch.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    rounded = table[chosen]
    if to.itemsize == 2:  # half an ulp beyond the largest number is infinity; in 8 bits PTX saturates
        limit = table[-1] + (table[-1] - table[-2]) / 2
        rounded = torch.where(sizes >= limit, math.inf, rounded)
    return torch.where(values.isnan(), math.nan, rounded.copysign(values))
