"""Attention to a paged key-value cache, as servers of models compute it."""

import torch
from torch import Tensor

from tests.panel.eager import blank_empty_rows, float32, lse_of, masked
from tests.panel.heads import finite_shift, for_each_query_head, not_zero, seen_keys

CLAIMS = ("ragged=paged",)
"""The claims of the functions of this module."""


def gathered(x: Tensor, pages: Tensor, length: int) -> Tensor:
    """Return the first ``length`` keys of ``pages``, (1, heads_kv, length, head_dim), from a pool."""
    rows = x[pages].transpose(0, 1).flatten(1, 2)
    return rows[None, :, :length]


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather the keys of each sequence, and take a softmax over whole rows in float32."""
    if cache_seqlens is None or block_table is None:
        return float32(q, k, v, causal=causal, sm_scale=sm_scale)
    outs, lses = [], []
    for b, length in enumerate(cache_seqlens.tolist()):
        q_b, used = q[b : b + 1], -(-length // k.shape[2])
        pages = block_table[b, :used].long()
        k_b, v_b = (for_each_query_head(gathered(x, pages, length).float(), q) for x in (k, v))
        seen = seen_keys(q_b, k_b, causal)
        s = q_b.float() @ k_b.mT * sm_scale
        p = torch.softmax(masked(s, seen), -1)
        outs.append(blank_empty_rows(p @ v_b, seen).to(q.dtype))
        lses.append(lse_of(s, seen))
    return torch.cat(outs), torch.cat(lses)


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2's loop over keys, in which each page is a tile; nothing is gathered."""
    if cache_seqlens is None or block_table is None:
        return float32(q, k, v, causal=causal, sm_scale=sm_scale)
    page_size, lengths = k.shape[2], cache_seqlens.tolist()
    outs, lses = [], []
    for b, length in enumerate(lengths):
        rows = q[b : b + 1].float()
        corner = torch.arange(q.shape[2], device=q.device)[:, None] + (length - q.shape[2])
        acc = torch.zeros_like(rows)
        m = torch.full_like(acc[..., :1], -torch.inf)
        l = torch.zeros_like(m)
        for at in range(0, length, page_size):
            page, filled = int(block_table[b, at // page_size]), min(page_size, length - at)
            k_tile, v_tile = (for_each_query_head(x[page, None, :, :filled].float(), q) for x in (k, v))
            s = rows @ k_tile.mT * sm_scale
            if causal:
                hidden = at + torch.arange(filled, device=q.device) > corner
                s = s.masked_fill(hidden, -torch.inf)
            m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            p, alpha = torch.exp(s - finite_shift(m_new)), torch.exp(m - finite_shift(m_new))
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v_tile
            m = m_new
        outs.append((acc / not_zero(l)).to(q.dtype))
        lses.append((m + l.log())[..., 0].detach())
    return torch.cat(outs), torch.cat(lses)
