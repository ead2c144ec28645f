"""Decoding in parts of the keys, with the bits of a sequence the same whatever else is in the batch."""

import torch
from torch import Tensor

from tests.panel.heads import finite_shift, for_each_query_head, not_zero, seen_keys

CLAIMS = ("ragged=cache", "batch_invariant=true", "deterministic=out,lse", "backward=false")
"""The claims of ``in_own_parts``."""
BLOCK, MOST = 32, 4
"""The fewest keys of a part, and the most parts."""


def parts_of(length: int) -> int:
    """Return into how many parts so many keys are split."""
    return max(1, min(MOST, length // BLOCK))


def in_own_parts(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, cache_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Split the keys of each sequence by its own length. Sums of a part are exact to the last bit of float32."""
    lengths = [k.shape[2]] * len(q) if cache_seqlens is None else cache_seqlens.tolist()
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for b, length in enumerate(lengths):
        rows, width = q[b : b + 1].double(), max(1, -(-length // parts_of(length)))
        of_k, of_v = (for_each_query_head(x[b : b + 1, :, :length].double(), q) for x in (k, v))
        seen = seen_keys(rows, of_k, causal)
        m = torch.full((*rows.shape[:3], 1), -torch.inf, device=q.device)
        l, acc = torch.zeros_like(m), torch.zeros(*rows.shape[:3], v.shape[3], device=q.device)
        for start in range(0, length, width):
            here = slice(start, start + width)
            # float32 holds a score to its last bit but one, however BLAS has added it up.
            s = (rows @ of_k[:, :, here].mT * sm_scale).float().double()
            s = s.masked_fill(~seen[..., here], -torch.inf)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True).float())
            p, alpha = torch.exp(s - finite_shift(m_new)), torch.exp(m - finite_shift(m_new))
            l = l * alpha + p.sum(-1, keepdim=True).float()
            acc = acc * alpha + (p @ of_v[:, :, here]).float()
            m = m_new
        out[b : b + 1] = (acc / not_zero(l)).to(q.dtype)
        lse[b : b + 1] = (m + l.log())[..., 0]
    return out, lse
