"""Attention of one sequence, which all stand-ins share."""

import torch
from torch import Tensor

from tests.panel.packed import attended


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: tuple[int, int] = (-1, -1)
) -> tuple[Tensor, Tensor]:
    """Return out (rows, heads_q, head_dim) and the natural lse (rows, heads_q) of attention in float32.

    q is (rows, heads_q, head_dim), and k and v are (keys, heads_kv, head_dim). Row i sees the keys from ``i + keys -
    rows - window[0]`` to ``i + keys - rows + window[1]``, both included, where -1 sets no limit.
    """
    left, right = window[0], 0 if causal else window[1]
    here = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    ahead = torch.arange(len(k), device=q.device) - here
    seen = (ahead >= -left if left >= 0 else True) & (ahead <= right if right >= 0 else ahead == ahead)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = attended(q, k, v, seen, scale, None)
    return out[0].transpose(0, 1), lse[0].T
