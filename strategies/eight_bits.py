"""Quantise queries, keys and values to 8 bits, as models pass them, or as a cache of them holds many."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.arithmetic import FLOAT8_E4M3
from reference.heads import fold, unfold
from strategies.layouts import Window, place

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
    # A tensor without rows has no largest number, so a row of zeros is added to each.
    sizes = torch.nn.functional.pad(limited.nan_to_num(0.0).abs(), (0, 0, 0, 1))
    largest = sizes.amax((2, 3) if of_pages else (0, 2, 3))
    drawn = [chance.randint(0, MOST_SPARE) for _ in range(largest.numel())]
    spare = torch.tensor(drawn, dtype=torch.long, device=x.device)
    scale = (
        (largest / FLOAT8_E4M3.maximum).clamp_min(SMALLEST_SCALE).log2().ceil() + spare.view_as(largest)
    ).exp2()
    by_row = (scale if of_pages else scale[None])[:, :, None, None]
    eight = (limited / by_row).to(torch.float8_e4m3fn)
    return eight, scale.float(), (eight.double() * by_row).to(x.dtype)


@dataclass(frozen=True, eq=False)
class EightBits:
    """8-bit numbers as a kernel is passed them, and their scales, (batch, heads_kv) float32."""

    window: Window
    scale: Tensor

    @classmethod
    def of(cls, x: Tensor, heads_kv: int, layout: str, chance: random.Random) -> "EightBits":
        """Quantise x (batch, heads, rows, head_dim), and lay the numbers out in one of ``kernels.contract.LAYOUTS``."""
        eight, scale, _ = quantised(fold(x, heads_kv), chance, of_pages=True)
        return cls(place(unfold(eight, x.shape[1]), layout, device=x.device), scale)

    def meant(self, dtype: torch.dtype) -> Tensor:
        """Return what the numbers stand for, contiguous: their products with the scales, exact in ``dtype``."""
        eight = self.window.tensor
        by_row = self.scale[..., None, None]
        return unfold(fold(eight.double(), self.scale.shape[1]) * by_row, eight.shape[1]).to(dtype)
