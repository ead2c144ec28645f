"""Stands for FlashAttention: rows before heads, natural lse with heads first, windows without the query itself.

Signatures and conventions are those of ``flash_attn/flash_attn_interface.py`` in Dao-AILab/flash-attention, and of the
function of that name in vLLM's fork where ``seqused_k`` and ``return_softmax_lse`` are concerned. Arguments that no
adapter passes are left out.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.unit.support.conventions.one_sequence import attend


def _check(q: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_attn_probs: bool = False,
) -> Any:
    """Return out, or (out, lse, None), of tensors (batch, seqlen, heads, head_dim); lse is (batch, heads, seqlen)."""
    _check(q)
    assert dropout_p == 0.0
    scale = _scale(q, softmax_scale)
    answers = [attend(*each, scale, causal, window_size) for each in zip(q, k, v, strict=True)]
    out, lse = (torch.stack(x) for x in zip(*answers, strict=True))
    return (out, lse.transpose(1, 2), None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """Return out (total_q, heads, head_dim), or (out, lse) with lse (heads, total_q), of packed sequences.

    Keys are packed like queries if ``cu_seqlens_k`` is passed. With a ``block_table``, k and v are pools (pages,
    page_size, heads_kv, head_dim), and sequence b has its first ``seqused_k[b]`` keys. Sequences that are longer than
    ``max_seqlen_q`` or ``max_seqlen_k`` are cut off. The lse of a row that sees no key is +inf.
    """
    _check(q)
    assert (cu_seqlens_k is None) != (seqused_k is None)
    assert (block_table is None) == (seqused_k is None)
    lengths = [cu_seqlens_q] if cu_seqlens_k is None else [cu_seqlens_q, cu_seqlens_k]
    assert all(x.dtype == torch.int32 for x in lengths)
    answers = []
    for b, (start, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        if cu_seqlens_k is not None:
            keys, values = (x[cu_seqlens_k[b] : cu_seqlens_k[b + 1]][:max_seqlen_k] for x in (k, v))
        else:
            assert block_table is not None
            assert seqused_k is not None
            length = min(int(seqused_k[b]), max_seqlen_k)
            keys, values = (of_pages(x, block_table[b], length) for x in (k, v))
        rows = q[start : min(end, start + max_seqlen_q)]
        answers.append(attend(rows, keys, values, _scale(q, softmax_scale), causal, window_size))
    out, lse = (torch.cat(x) for x in zip(*answers, strict=True))
    behind = len(q) - len(out)  # these rows hold whatever was there
    out, lse = (torch.cat([x, x.new_full((behind, *x.shape[1:]), torch.nan)]) for x in (out, lse))
    return (out, lse.T.masked_fill(lse.T.isneginf(), torch.inf)) if return_softmax_lse else out


def of_pages(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    """Return the first keys of a sequence, (length, heads_kv, head_dim), from a pool with rows before heads."""
    used = -(-length // max(1, pool.shape[1]))
    return pool[pages[:used].long()].flatten(0, 1)[:length]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_softmax_lse: bool = False,
) -> Any:
    """Return out, or (out, lse), like ``flash_attn_func``, of a cache that new k and v are written into first.

    A cache is (batch, seqlen_cache, heads_kv, head_dim), or with a ``block_table`` a pool (pages, page_size, heads_kv,
    head_dim). Sequence b has its first ``cache_seqlens[b]`` keys before the call, and the new ones behind these.
    """
    _check(q)
    batch = len(q)
    if cache_seqlens is None:
        cache_seqlens = torch.full((batch,), k_cache.shape[1], dtype=torch.int32, device=q.device)
    if block_table is None:  # each sequence is a page
        block_table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    elif k_cache.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    new = 0 if k is None else k.shape[1]
    answers = []
    for b, (length, pages) in enumerate(zip(cache_seqlens.tolist(), block_table.long(), strict=True)):
        if k is not None and v is not None:
            at = torch.arange(length, length + new, device=q.device)
            page, row = pages[at // k_cache.shape[1]], at % k_cache.shape[1]
            k_cache[page, row], v_cache[page, row] = k[b], v[b]
        keys, values = (of_pages(x, pages, length + new) for x in (k_cache, v_cache))
        answers.append(attend(q[b], keys, values, _scale(q, softmax_scale), causal, window_size))
    out, lse = (torch.stack(x) for x in zip(*answers, strict=True))
    return (out, lse.transpose(1, 2)) if return_softmax_lse else out
