"""Stands for FlashInfer: plan and run, rows before heads, lse (rows, heads) in base 2, windows without the query.

Signatures and conventions are those of ``flashinfer/prefill.py`` in flashinfer-ai/flashinfer. Arguments that no adapter
passes are left out.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.unit.support.conventions.flash_attn import of_pages
from tests.unit.support.conventions.one_sequence import attend


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    return_lse: bool = False,
) -> Any:
    """Return out (rows, heads, head_dim), or (out, lse) with lse (rows, heads) in base 2, of one sequence."""
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    out, lse = attend(q, k, v, scale, causal, (window_left, -1))
    return (out, lse / math.log(2.0)) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper:
    """Attends to a paged cache: what a batch has is told to ``plan``, and its tensors to ``run``."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        """Pools are (pages, page_size, heads_kv, head_dim) for "NHD"; for "HND", heads_kv comes before page_size."""
        assert float_workspace_buffer.dtype == torch.uint8
        self.kv_layout = kv_layout

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        """Sequence b has the rows ``qo_indptr[b]`` to ``qo_indptr[b + 1]``, and pages that are given likewise.

        These are ``paged_kv_indices[paged_kv_indptr[b]:paged_kv_indptr[b + 1]]``, of which the last has
        ``paged_kv_last_page_len[b]`` keys, from 1 to ``page_size``.
        """
        counts = paged_kv_indptr.diff()
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        self.rows, self.pages = qo_indptr.tolist(), paged_kv_indices.split(counts.tolist())
        self.lengths = (((counts - 1) * page_size + paged_kv_last_page_len) * (counts > 0)).tolist()
        self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type)
        self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.causal, self.window = causal, (window_left, -1)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], return_lse: bool = False) -> Any:
        """Return out (rows, heads, head_dim), or (out, lse) with lse (rows, heads) in base 2, of the whole batch."""
        k, v = (x if self.kv_layout == "NHD" else x.transpose(1, 2) for x in paged_kv_cache)
        page_size, heads_kv, head_dim = k.shape[1:]
        assert self.sizes == (q.shape[1], heads_kv, head_dim, page_size, q.dtype)
        answers = []
        for (start, end), pages, length in zip(pairwise(self.rows), self.pages, self.lengths, strict=True):
            keys, values = (of_pages(x, pages, length) for x in (k, v))
            answers.append(attend(q[start:end], keys, values, self.scale, self.causal, self.window))
        out, lse = (torch.cat(x) for x in zip(*answers, strict=True))
        return (out, lse / math.log(2.0)) if return_lse else out
