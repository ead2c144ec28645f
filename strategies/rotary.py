"""Rotary position embedding by quarter turns: rotating by them is exact in every dtype, and so is rotating back.

Pairs of columns of each row of q and k are rotated by angles that belong to the row's position (Su et al. 2021, arXiv
2104.09864, section 3.4). Where every angle is a multiple of 90 degrees, a rotated row has the same numbers with other
signs and in other columns.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_SPARE = 2
"""Tables have up to so many more positions than are needed."""


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return a contiguous copy of x (batch, heads, rows, head_dim) whose first columns are rotated by quarter turns.

    cos and sin (..., rows, rotary_dim // 2) broadcast to the rows of x. A pair (x1, x2) of the first rotary_dim columns
    becomes (x1 cos - x2 sin, x2 cos + x1 sin). Columns 2c and 2c + 1 are a pair if ``interleaved``, else columns c and
    c + rotary_dim // 2. One of the two terms is 0 and is left out, so that signs of 0, infinity and NaN stay too.
    """
    half = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    x1, x2, turned = x[..., first], x[..., second], x.clone(memory_format=torch.contiguous_format)
    turned[..., first] = torch.where(sin == 0, x1 * cos, -x2 * sin)
    turned[..., second] = torch.where(sin == 0, x2 * cos, x1 * sin)
    return turned


@dataclass(frozen=True, eq=False)
class Rotation:
    """Tables of quarter turns, (positions, rotary_dim // 2) each, and the way in which columns are paired."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @property
    def options(self) -> dict[str, Any]:
        """Return the keywords with which a kernel is asked to rotate."""
        return {
            "rotary_cos": self.cos,
            "rotary_sin": self.sin,
            "rotary_interleaved": self.interleaved,
        }

    def forth(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x rotated by the positions of its rows, (batch or 1, 1, rows)."""
        return rotated(x, self.cos[positions], self.sin[positions], self.interleaved)

    def back(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the tensor that becomes x when it is rotated by the positions of its rows, (batch or 1, 1, rows)."""
        return rotated(x, self.cos[positions], -self.sin[positions], self.interleaved)


def drawn(like: Tensor, positions: int, pairing: str, chance: random.Random) -> Rotation:
    """Return random tables for at least so many positions, of the dtype and on the device of ``like``.

    ``pairing`` is one of ``kernels.contract.ROTARY``. Of the head_dim of ``like``, which is 2 at least, all columns are
    rotated, or about half of them.
    """
    pairs = like.shape[-1] // 2
    pairs = chance.choice((pairs, max(1, pairs // 2)))
    shape = positions + chance.randint(0, MOST_SPARE), pairs
    turns = torch.tensor(
        chance.choices(range(4), k=shape[0] * shape[1]), dtype=torch.long, device="cpu"
    ).view(shape)
    cos, sin = (
        like.new_tensor(quarters)[turns.to(like.device)] for quarters in ((1, 0, -1, 0), (0, 1, 0, -1))
    )
    return Rotation(cos, sin, pairing == "interleaved")


def rows_from(first: Sequence[int], rows: int, device: torch.device) -> Tensor:
    """Return positions (sequences, 1, rows): those of the rows of each sequence count from ``first`` of it."""
    return torch.tensor(first, dtype=torch.long, device=device)[:, None, None] + torch.arange(
        rows, device=device
    )
