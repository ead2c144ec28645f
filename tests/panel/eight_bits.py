"""Attention to a cache of 8-bit keys and values with scales, as servers of models keep it to save memory."""

import torch
from torch import Tensor

from tests.panel.eager import float32, of_filled_parts
from tests.panel.paged import gathered

OF_HEADS = ("ragged=cache", "fp8_cache=head")
"""The claims of ``of_heads``."""
OF_PAGES = ("ragged=paged", "fp8_cache=head,page")
"""The claims of ``of_pages``."""


def of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cache_seqlens: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scale the filled part of each cache back to q's dtype, and answer each sequence by itself."""
    if cache_seqlens is None:
        return float32(q, k, v, causal=causal, sm_scale=sm_scale)
    if k_scale is not None and v_scale is not None:
        k = (k.float() * k_scale[None, :, None, None]).to(q.dtype)
        v = (v.float() * v_scale[None, :, None, None]).to(q.dtype)
    return of_filled_parts(q, k, v, cache_seqlens, causal=causal, sm_scale=sm_scale)


def of_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather the pages of each sequence with their scales, which there is one of for each key then."""
    if cache_seqlens is None or block_table is None:
        return float32(q, k, v, causal=causal, sm_scale=sm_scale)
    answers = []
    for b, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[b, : -(-length // k.shape[2])].long()
        keys, values = (gathered(x.float(), pages, length) for x in (k, v))
        if k_scale is not None and v_scale is not None:
            keys = keys * scales_of_keys(k_scale, pages, k.shape[2], length)
            values = values * scales_of_keys(v_scale, pages, k.shape[2], length)
        keys, values = keys.to(q.dtype), values.to(q.dtype)
        answers.append(float32(q[b : b + 1], keys, values, causal=causal, sm_scale=sm_scale))
    outs, lses = zip(*answers, strict=True)
    return torch.cat(outs), torch.cat(lses)


def scales_of_keys(scale: Tensor, pages: Tensor, page_size: int, length: int) -> Tensor:
    """Return the scale of each head and key of a sequence, (1, heads_kv, length or 1, 1)."""
    if scale.ndim == 1:
        return scale[None, :, None, None]
    return scale[pages].repeat_interleave(page_size, 0)[:length].T[None, :, :, None]
