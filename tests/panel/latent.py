"""Attention whose v may be the first columns of k, as in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Where v lies in k's memory, each function loads k alone and takes v from what it has loaded, as FlashMLA does.
"""

from typing import Any

import torch
from torch import Tensor

from tests.panel.eager import whole_rows
from tests.panel.flash import recomputed
from tests.panel.heads import (
    Heads,
    Options,
    attend_by_launches,
    finite_shift,
    for_each_query_head,
    heads_of,
    not_zero,
)
from tests.panel.rotated import rotated

SIZES = ("head_dims=16,24,64,96,576", "v_head_dim=0,16,64,512")
"""The head dims of all functions, among them those of DeepSeek's models: 576 of q and k, and 512 of v."""
CLAIMS = ("v_in_k=true", *SIZES, "rotary=halves,interleaved")
"""The claims of ``eager``."""
SERVED = ("v_in_k=true", *SIZES, "ragged=cache,paged,append", "fp8_cache=head,page", "backward=false")
"""The claims of ``tiled``."""
ONE_BUFFER = ("v_in_k=always", *SERVED[1:])
"""The claims of ``of_one_buffer``."""

TILE = 64
"""The keys of a tile of a cache that has no pages."""


def is_in(v: Tensor, k: Tensor) -> bool:
    """Whether v is the first columns of k."""
    return v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[3] <= k.shape[3]


def loaded(
    k: Tensor, v: Tensor, k_scale: Tensor | float = 1.0, v_scale: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return k and v in float32, times their scales; both are from one load if v is the first columns of k."""
    keys = k.float() * k_scale
    return keys, keys[..., : v.shape[3]] if is_in(v, k) else v.float() * v_scale


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k and take a softmax over whole rows; the backward gives dk and dv as those of two arguments."""
    start = torch.zeros(1, dtype=torch.long, device=q.device)
    first = start + (k.shape[2] - q.shape[2])

    def turned(x: Tensor, first: Tensor, sign: float = 1.0) -> Tensor:
        """Return rows rotated forward, or back if ``sign`` is -1."""
        if rotary_cos is None or rotary_sin is None:
            return x
        return rotated(x, first, rotary_cos, sign * rotary_sin, rotary_interleaved)

    def rotated_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Heads:
        """Return the heads of a call whose v is not rotated."""
        keys, values = loaded(k, v)
        return heads_of(turned(q, first), turned(keys, start), values, causal, sm_scale)

    def launch(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
        """Return out as it is stored, and lse."""
        out, lse = whole_rows(rotated_heads(q, k, v, causal, sm_scale))
        return out.to(q.dtype), lse[..., 0].contiguous()

    def gradients(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, o: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q and k before the rotation, and that of v."""
        heads = rotated_heads(q, k, v, o.causal, o.sm_scale)
        dq, dk, dv = recomputed(heads, dout.float(), out.float(), lse[..., None])
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
        dq, dk = turned(dq, first, -1.0), turned(dk, start, -1.0)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    return attend_by_launches(q, k, v, causal=causal, sm_scale=sm_scale, launch=launch, gradients=gradients)


def append(cache: Tensor, added: Tensor, cache_seqlens: Tensor, block_table: Tensor | None) -> None:
    """Write the new rows of all sequences behind their old ones, in pages if there is a table of these."""
    at = cache_seqlens.long()[:, None] + torch.arange(added.shape[2], device=cache.device)
    if block_table is None:
        pages = torch.arange(len(added), device=cache.device)[:, None].expand_as(at)
    else:
        pages = block_table.gather(1, at // cache.shape[2]).long()
        at = at % cache.shape[2]
    cache[pages, :, at] = added.transpose(1, 2)


def of_page(scale: Tensor | None, page: int) -> Tensor | float:
    """Return the scale of each head of a page, (heads_kv, 1, 1), or 1 if nothing is scaled."""
    if scale is None:
        return 1.0
    return (scale if scale.ndim == 1 else scale[page])[:, None, None]


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2's loop over tiles of a cache, or over its pages, of which each is loaded once."""
    lengths = [k.shape[2]] * len(q)
    if cache_seqlens is not None:
        if k_new is not None and v_new is not None:
            append(k, k_new, cache_seqlens, block_table)
            if not is_in(v, k):
                append(v, v_new, cache_seqlens, block_table)
            cache_seqlens = cache_seqlens + k_new.shape[2]
        lengths = cache_seqlens.tolist()
    size = TILE if block_table is None else k.shape[2]
    outs, lses = [], []
    for b, length in enumerate(lengths):
        rows = q[b : b + 1].float()
        corner = torch.arange(q.shape[2], device=q.device)[:, None] + (length - q.shape[2])
        acc = rows.new_zeros(*rows.shape[:3], v.shape[3])
        m = torch.full_like(rows[..., :1], -torch.inf)
        l = torch.zeros_like(m)
        for at in range(0, length, size):
            page, start = (b, at) if block_table is None else (int(block_table[b, at // size]), 0)
            k_tile, v_tile = (x[page, None, :, start : start + size] for x in (k, v))
            keys, values = loaded(k_tile, v_tile, of_page(k_scale, page), of_page(v_scale, page))
            number = at + torch.arange(keys.shape[2], device=q.device)
            keys, values = (x.masked_fill(number[:, None] >= length, 0.0) for x in (keys, values))
            keys, values = (for_each_query_head(x, q) for x in (keys, values))
            s = rows @ keys.mT * sm_scale
            hidden = number >= length
            s = s.masked_fill(hidden | (number > corner) if causal else hidden, -torch.inf)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, alpha = torch.exp(s - finite_shift(m_new)), torch.exp(m - finite_shift(m_new))
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ values
            m = m_new
        outs.append((acc / not_zero(l)).to(q.dtype))
        lses.append((m + l.log())[..., 0])
    return torch.cat(outs), torch.cat(lses)


def of_one_buffer(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """``tiled`` with one buffer, as FlashMLA and FlashInfer take it: of v, nothing but the head_dim is looked at."""
    return tiled(q, k, k[..., : v.shape[3]], causal=causal, sm_scale=sm_scale, **options)
