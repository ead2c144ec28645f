"""Attention of packed queries to keys in pages, the main call of servers, which mix decoding with prefill."""

import torch
from torch import Tensor

from tests.panel.eager import blank_empty_rows, float32, lse_of, masked
from tests.panel.heads import finite_shift, for_each_query_head, not_zero
from tests.panel.paged import gathered

CLAIMS = ("ragged=packed_paged", "window=0,1,8,33,100")
"""The claims of the functions of this module."""
ROWS = 16
"""The rows of a tile of ``tiled``: queries of all the query heads of one key head."""


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    window: int = 0,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather the keys of each sequence, and take a softmax over whole rows in float32."""
    if cu_seqlens_q is None or cache_seqlens is None or block_table is None:
        return plain(q, k, v, causal, sm_scale, window)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    starts = cu_seqlens_q.tolist()
    for b, length in enumerate(cache_seqlens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        pages = block_table[b, : -(-length // k.shape[2])].long()
        of_k, of_v = (gathered(x, pages, length) for x in (k, v))
        out[:, :, rows], lse[:, :, rows] = plain(q[:, :, rows], of_k, of_v, causal, sm_scale, window)
    return out, lse


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Attend with whole rows of scores in float32; a window ends at the query's own place."""
    if not window:
        return float32(q, k, v, causal=causal, sm_scale=sm_scale)
    rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    here = rows[:, None] + k.shape[2] - q.shape[2]
    seen = (here - keys < window) & (keys <= here if causal else torch.ones_like(keys <= here))
    of_k, of_v = (for_each_query_head(x.float(), q) for x in (k, v))
    s = q.float() @ of_k.mT * sm_scale
    p = torch.softmax(masked(s, seen), -1)
    return blank_empty_rows(p @ of_v, seen).to(q.dtype), lse_of(s, seen)


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    window: int = 0,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiles of queries from all sequences in one list, as vLLM's unified attention has them, and a page at a time.

    A program of the list finds its sequence by itself. Their number is a bound, as the host does not know the lengths.
    """
    if cu_seqlens_q is None or cache_seqlens is None or block_table is None:
        return plain(q, k, v, causal, sm_scale, window)
    group, page_size = q.shape[1] // k.shape[1], k.shape[2]
    tile, sequences = max(1, ROWS // group), len(cache_seqlens)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    starts, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    for program in range(q.shape[2] // tile + sequences):
        # Sequence b has its tiles from number starts[b] // tile + b on.
        b = max(x for x in range(sequences) if starts[x] // tile + x <= program)
        first = starts[b] + (program - starts[b] // tile - b) * tile
        end = min(first + tile, starts[b + 1])
        if first >= end:
            continue
        length, queries = lengths[b], starts[b + 1] - starts[b]
        here = torch.arange(first - starts[b], end - starts[b], device=q.device)[:, None] + length - queries
        rows = q[:, :, first:end].float()
        acc = torch.zeros(*rows.shape[:3], v.shape[3], device=q.device)
        m = torch.full_like(rows[..., :1], -torch.inf)
        l = torch.zeros_like(m)
        last = min(length, int(here.max()) + 1) if causal else length
        begin = max(0, int(here.min()) - window + 1) // page_size * page_size if window else 0
        for at in range(begin, last, page_size):
            page, filled = int(block_table[b, at // page_size]), min(page_size, length - at)
            k_tile, v_tile = (for_each_query_head(x[page, None, :, :filled].float(), q) for x in (k, v))
            keys = at + torch.arange(filled, device=q.device)
            seen = torch.ones(len(here), filled, dtype=torch.bool, device=q.device)
            if causal:
                seen &= keys <= here
            if window:
                seen &= here - keys < window
            s = (rows @ k_tile.mT * sm_scale).masked_fill(~seen, -torch.inf)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, alpha = torch.exp(s - finite_shift(m_new)), torch.exp(m - finite_shift(m_new))
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v_tile
            m = m_new
        out[:, :, first:end] = (acc / not_zero(l)).to(q.dtype)
        lse[:, :, first:end] = (m + l.log())[..., 0]
    return out, lse
