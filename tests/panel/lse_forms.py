"""Attention that returns lse in other forms than the contract's: in base 2, rows before heads, +inf without keys."""

import torch
from torch import Tensor

from tests.panel.eager import blank_empty_rows, float32, lse_of, masked
from tests.panel.heads import LOG2_E, finite_shift, for_each_query_head, not_zero, seen_keys

BASE_2, ROWS_FIRST, OF_NO_KEYS = ("lse_base=2",), ("lse_layout=bnh",), ("lse_of_no_keys=inf",)
BOTH = (*BASE_2, *ROWS_FIRST)
"""The claims of the functions of this module."""

KEYS = 32
"""The keys of a tile of ``tiled``."""


def converted(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """A natural lse that is converted to base 2 by one product; it claims ``BASE_2``."""
    seen = seen_keys(q, k, causal)
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    s = q.float() @ k.mT * sm_scale
    p = torch.softmax(masked(s, seen), -1)
    return blank_empty_rows(p @ v, seen).to(q.dtype), lse_of(s, seen) * LOG2_E


def transposed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return a natural lse that is a transposed view, with rows before heads; it claims ``ROWS_FIRST``."""
    out, lse = float32(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, lse.transpose(1, 2)


def infinite(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return a natural lse that is +inf in rows that see no key; it claims ``OF_NO_KEYS``."""
    out, lse = float32(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, torch.where(seen_keys(q, k, causal).any(-1), lse, torch.inf)


def tiled(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashInfer's loop: scores, running maximum and lse in base 2, lse with rows before heads; it claims ``BOTH``."""
    seen = seen_keys(q, k, causal)
    rows, keys, values = q.float(), *(for_each_query_head(x.float(), q) for x in (k, v))
    acc = torch.zeros_like(rows)
    m = torch.full_like(rows.detach()[..., :1], -torch.inf)
    l = torch.zeros_like(m)
    for at in range(0, k.shape[2], KEYS):
        tile = slice(at, min(at + KEYS, k.shape[2]))
        s = rows @ keys[:, :, tile].mT * (sm_scale * LOG2_E)
        s = torch.where(seen[:, tile], s, -torch.inf)
        m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        p, alpha = torch.exp2(s - finite_shift(m_new)), torch.exp2(m - finite_shift(m_new))
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ values[:, :, tile]
        m = m_new
    lse = (m + l.detach().log2())[..., 0]
    return (acc / not_zero(l)).to(q.dtype), lse.transpose(1, 2).contiguous()
