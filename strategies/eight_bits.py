"""Quantise keys and values to 8 bits, as a cache of them holds many."""

import random

import torch
from torch import Tensor

from reference.arithmetic import FLOAT8_E4M3

SMALLEST_SCALE = 2.0**-15
"""The smallest scale, with which the smallest number of ``float8_e4m3fn``, 2^-9, is still one of float16."""
MOST_SPARE = 3
"""A scale may be up to 2 to this power times as large as its numbers need it to be."""


def quantised(x: Tensor, chance: random.Random, *, of_pages: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers as ``float8_e4m3fn``, their scales, and what the 8-bit numbers stand for, in the dtype of x.

    x is (batch or pages, heads, rows, head_dim). Scales are float32 powers of two, (heads,), or (pages, heads) if they
    are ``of_pages``, and their products with the 8-bit numbers are exact. NaN stays NaN and takes no part in a scale.
    They differ between heads and pages even if the numbers there are of the same size (``MOST_SPARE``).
    """
    # What is larger than half of the largest number may be rounded up to one that the dtype does not have.
    most = torch.finfo(x.dtype).max / 2
    limited = x.double().clamp(-most, most)
    largest = limited.nan_to_num(0.0).abs().amax((2, 3) if of_pages else (0, 2, 3))
    spare = torch.tensor([chance.randint(0, MOST_SPARE) for _ in range(largest.numel())], device=x.device)
    scale = (
        (largest / FLOAT8_E4M3.maximum).clamp_min(SMALLEST_SCALE).log2().ceil() + spare.view_as(largest)
    ).exp2()
    by_row = (scale if of_pages else scale[None])[:, :, None, None]
    eight = (limited / by_row).to(torch.float8_e4m3fn)
    return eight, scale.float(), (eight.double() * by_row).to(x.dtype)
