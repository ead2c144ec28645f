"""Functions that spread, hide or move NaN, or leave out a product with it, and a case with NaN."""

from typing import Any

import torch
from torch import Tensor

from strategies.case import Case, Spike
from tests.unit.support.toys import sound

NAN = Spike("q", (0, 0, 1, 0), "nan")
CASE = Case(seqlen_q=4, seqlen_k=3, dtype="float32", spikes=(NAN,))


def spreads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """NaN in one row of the first head makes the whole of out NaN."""
    out, lse = sound(q, k, v, **options)
    return torch.where(q[:, :1].isnan().any(), torch.nan, out), lse


def hides(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """NaN in out becomes 0."""
    out, lse = sound(q, k, v, **options)
    return out.nan_to_num(0.0), lse


def moves(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """NaN in a row of out moves to the next."""
    out, lse = sound(q, k, v, **options)
    return torch.where(out.isnan().roll(1, 2), torch.nan, out.nan_to_num(0.0)), lse


def spreads_and_hides(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """NaN in one row makes all rows of the first head NaN; in those of other heads it becomes 0."""
    (first, lse), (others, _) = (bug(q, k, v, **options) for bug in (spreads, hides))
    return torch.cat([first[:, :1], others[:, 1:]], 1), lse


def leaves_out(q: Tensor, k: Tensor, v: Tensor, *, sm_scale: float, **options: Any) -> Any:
    """A product of q and k that is multiplied by 0 is not computed, as BLAS has it."""
    q, k = (x if sm_scale else torch.zeros_like(x) for x in (q, k))
    return sound(q, k, v, sm_scale=sm_scale, **options)
