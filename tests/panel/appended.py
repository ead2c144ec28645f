"""Attention that appends new keys to its cache in the same call, as servers of models do for each token."""

import torch
from torch import Tensor

from tests.panel.eager import float32, of_filled_parts
from tests.panel.paged import eager as of_pages

CLAIMS = ("ragged=paged,append",)
"""The claims of ``in_pages``."""
IN_A_CACHE = ("ragged=append",)
"""The claims of ``in_a_cache``."""


def in_a_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cache_seqlens: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy the new keys of each sequence behind its old ones, and answer it by itself."""
    if cache_seqlens is None or k_new is None or v_new is None:
        return float32(q, k, v, causal=causal, sm_scale=sm_scale)
    new = k_new.shape[2]
    for b, length in enumerate(cache_seqlens.tolist()):
        k[b, :, length : length + new] = k_new[b]
        v[b, :, length : length + new] = v_new[b]
    return of_filled_parts(q, k, v, cache_seqlens + new, causal=causal, sm_scale=sm_scale)


def in_pages(
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
) -> tuple[Tensor, Tensor]:
    """Scatter the new keys of all sequences to their slots, as vLLM's ``reshape_and_cache`` does, and then attend."""
    if k_new is not None and v_new is not None and cache_seqlens is not None and block_table is not None:
        new, page_size = k_new.shape[2], k.shape[2]
        at = cache_seqlens.long()[:, None] + torch.arange(new, device=q.device)
        pages = block_table.gather(1, at // page_size).long()
        for cache, added in ((k, k_new), (v, v_new)):
            cache[pages, :, at % page_size] = added.transpose(1, 2)
        cache_seqlens = cache_seqlens + new
    return of_pages(
        q, k, v, causal=causal, sm_scale=sm_scale, cache_seqlens=cache_seqlens, block_table=block_table
    )
