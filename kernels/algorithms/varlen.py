"""FlashAttention-2 in Triton for sequences of different lengths, packed end to end; forward and backward.

The algorithm is that of ``flash_v2`` (Dao 2023, sections 2.2 and 3.1); the calling convention that of
FlashAttention's ``flash_attn_varlen_func``. Instead of being padded to a common length, the sequences of a batch
lie end to end in tensors (total, heads, head_dim): sequence b has the queries from ``cu_seqlens_q[b]`` up to
``cu_seqlens_q[b + 1]`` and sees the keys from ``cu_seqlens_k[b]`` up to ``cu_seqlens_k[b + 1]``, as many as there
are, 0 too. A causal mask has its corner at the last query and the last key of each sequence, and the same diagonal is
that of windows and chunks. These, soft-caps and sinks are as in ``flash_v2``. Documents in a batch are such
sequences: the launcher looks up where they begin.

A program owns a tile of one sequence. Every sequence has as many programs as the longest one needs; those past the end
of a shorter sequence return at once.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from kernels.algorithms import flash_v2
from kernels.algorithms.flash_v2.backward_pass import gradient_of_queries, gradients_of_keys
from kernels.algorithms.flash_v2.forward_pass import attend
from kernels.algorithms.flash_v2.settings import DK_DV_TILES, DQ_TILES, FORWARD_TILES, Settings
from kernels.common.deltas import row_deltas
from kernels.common.launching import is_aligned, launch
from kernels.common.tiles import (
    LOG2E,
    check_runnable,
    columns_inside,
    kernel,
    load_tile,
    normalise,
    seen_range,
    store_tile,
    tile_pointers,
)
from kernels.common.validation import (
    check_document_ids,
    check_gradient_inputs,
    check_inputs,
    check_lengths,
    check_like,
    check_of_heads,
    check_sizes,
    check_softcap,
)
from kernels.contract import AttentionKernel


@triton.jit
def sequence(cu_seqlens, index, total):
    """Return where a sequence begins, as int64, and its length. Wrong cu_seqlens are clipped to 0 up to ``total``."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + index), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + index + 1), begin), total)
    return begin.to(tl.int64), end - begin


@kernel
def _forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    stride_qm: tl.int64,
    stride_qh: tl.int64,
    stride_kn: tl.int64,
    stride_kh: tl.int64,
    stride_vn: tl.int64,
    stride_vh: tl.int64,
    heads_q,
    group,
    total_q,
    total_k,
    max_seqlen_q,
    head_dim,
    scale_log2,
    window,
    window_right,
    chunk,
    softcap,
    sinks,
    CAUSAL: tl.constexpr,
    PATTERN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute out (total_q, heads_q, head_dim) and lse (heads_q, total_q) of a query tile."""
    tiles = tl.cdiv(max_seqlen_q, BLOCK_OWN)
    # Under a causal mask the last tiles see the most keys, so they start first.
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_OWN
    head = tl.program_id(0) // tiles
    head_q = (head % heads_q).to(tl.int64)
    head_kv = head_q // group
    first_q, seqlen_q = sequence(cu_seqlens_q, head // heads_q, total_q)
    first_k, seqlen_k = sequence(cu_seqlens_k, head // heads_q, total_k)
    if start_m >= seqlen_q:
        return

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    rows = start_m + tl.arange(0, BLOCK_OWN)
    in_rows = rows < seqlen_q
    keys = tl.arange(0, BLOCK_LOOP)
    q_ptrs = tile_pointers(q + first_q * stride_qm + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    k_ptrs = tile_pointers(k + first_k * stride_kn + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v + first_k * stride_vn + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
    first_key, last_key, first, whole, tiles_k = seen_range(
        start_m, rows, seqlen_q, seqlen_k, window, window_right, chunk, PATTERN, CAUSAL, BLOCK_OWN, BLOCK_LOOP
    )

    q_tile = load_tile(q_ptrs, in_rows, in_cols, True, MASK_COLS)
    acc, m_i, l_i = attend(
        q_tile=q_tile,
        k_ptrs=k_ptrs,
        v_ptrs=v_ptrs,
        stride_kn=stride_kn,
        stride_vn=stride_vn,
        keys=keys,
        in_cols=in_cols,
        last_key=last_key,
        seqlen_k=seqlen_k,
        first=first,
        whole=whole,
        end=tiles_k,
        scale_log2=scale_log2,
        BLOCK_ROWS=BLOCK_OWN,
        HEAD_DIM=HEAD_DIM,
        MASK_COLS=MASK_COLS,
        ALIGNED=ALIGNED,
        PRECISION=PRECISION,
        BLOCK_KEYS=BLOCK_LOOP,
        first_key=first_key if PATTERN else None,
        softcap=softcap,
        sink=None if sinks is None else tl.load(sinks + head_q) * LOG2E,
    )
    out_tile, lse_rows = normalise(acc, m_i, l_i)
    out_ptrs = tile_pointers(
        out + (first_q * heads_q + head_q) * head_dim, rows, heads_q * head_dim, cols, ALIGNED
    )
    store_tile(out_ptrs, out_tile, in_rows, in_cols, MASK_COLS)
    tl.store(lse + head_q * total_q + first_q + rows, lse_rows, mask=in_rows)


@kernel
def _dk_dv_kernel(
    dout,
    q,
    k,
    v,
    delta,
    lse_log2,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    stride_dom: tl.int64,
    stride_doh: tl.int64,
    stride_qm: tl.int64,
    stride_qh: tl.int64,
    stride_kn: tl.int64,
    stride_kh: tl.int64,
    stride_vn: tl.int64,
    stride_vh: tl.int64,
    heads_kv,
    group,
    total_q,
    total_k,
    max_seqlen_k,
    head_dim,
    sm_scale,
    scale_log2,
    window,
    window_right,
    chunk,
    softcap,
    CAUSAL: tl.constexpr,
    PATTERN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute dk and dv (total_k, heads_kv, head_dim) of a key tile."""
    tiles = tl.cdiv(max_seqlen_k, BLOCK_OWN)
    start_n = tl.program_id(0) % tiles * BLOCK_OWN
    head = tl.program_id(0) // tiles
    head_kv = (head % heads_kv).to(tl.int64)
    head_q = head_kv * group
    first_q, seqlen_q = sequence(cu_seqlens_q, head // heads_kv, total_q)
    first_k, seqlen_k = sequence(cu_seqlens_k, head // heads_kv, total_k)
    if start_n >= seqlen_k:
        return

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    keys = start_n + tl.arange(0, BLOCK_OWN)
    in_keys = keys < seqlen_k
    rows = tl.arange(0, BLOCK_LOOP)
    k_ptrs = tile_pointers(k + first_k * stride_kn + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v + first_k * stride_vn + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
    q_ptrs = tile_pointers(q + first_q * stride_qm + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    do_ptrs = tile_pointers(
        dout + first_q * stride_dom + head_q * stride_doh, rows, stride_dom, cols, ALIGNED
    )

    dk_tile, dv_tile = gradients_of_keys(
        k_tile=load_tile(k_ptrs, in_keys, in_cols, True, MASK_COLS),
        v_tile=load_tile(v_ptrs, in_keys, in_cols, True, MASK_COLS),
        q_ptrs=q_ptrs,
        do_ptrs=do_ptrs,
        delta=delta + head_q * total_q + first_q,
        lse_log2=lse_log2 + head_q * total_q + first_q,
        stride_doh=stride_doh,
        stride_dom=stride_dom,
        stride_qh=stride_qh,
        stride_qm=stride_qm,
        stride_row_head=total_q,
        start_n=start_n,
        keys=keys,
        rows=rows,
        in_cols=in_cols,
        group=group,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        scale_log2=scale_log2,
        CAUSAL=CAUSAL,
        BLOCK_KEYS=BLOCK_OWN,
        HEAD_DIM=HEAD_DIM,
        MASK_COLS=MASK_COLS,
        ALIGNED=ALIGNED,
        PRECISION=PRECISION,
        BLOCK_ROWS=BLOCK_LOOP,
        window=window,
        window_right=window_right,
        chunk=chunk,
        PATTERN=PATTERN,
        softcap=softcap,
    )
    base = (first_k * heads_kv + head_kv) * head_dim
    dk_ptrs = tile_pointers(dk + base, keys, heads_kv * head_dim, cols, ALIGNED)
    dv_ptrs = tile_pointers(dv + base, keys, heads_kv * head_dim, cols, ALIGNED)
    store_tile(dk_ptrs, dk_tile * sm_scale, in_keys, in_cols, MASK_COLS)
    store_tile(dv_ptrs, dv_tile, in_keys, in_cols, MASK_COLS)


@kernel
def _dq_kernel(
    dout,
    q,
    k,
    v,
    delta,
    lse_log2,
    dq,
    cu_seqlens_q,
    cu_seqlens_k,
    stride_dom: tl.int64,
    stride_doh: tl.int64,
    stride_qm: tl.int64,
    stride_qh: tl.int64,
    stride_kn: tl.int64,
    stride_kh: tl.int64,
    stride_vn: tl.int64,
    stride_vh: tl.int64,
    heads_kv,
    group,
    total_q,
    total_k,
    max_seqlen_q,
    head_dim,
    sm_scale,
    scale_log2,
    window,
    window_right,
    chunk,
    softcap,
    CAUSAL: tl.constexpr,
    PATTERN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute dq (total_q, heads_q, head_dim) of a query tile."""
    tiles = tl.cdiv(max_seqlen_q, BLOCK_OWN)
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_OWN
    heads_q = heads_kv * group
    head = tl.program_id(0) // tiles
    head_q = (head % heads_q).to(tl.int64)
    head_kv = head_q // group
    first_q, seqlen_q = sequence(cu_seqlens_q, head // heads_q, total_q)
    first_k, seqlen_k = sequence(cu_seqlens_k, head // heads_q, total_k)
    if start_m >= seqlen_q:
        return

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    rows = start_m + tl.arange(0, BLOCK_OWN)
    in_rows = rows < seqlen_q
    keys = tl.arange(0, BLOCK_LOOP)
    q_ptrs = tile_pointers(q + first_q * stride_qm + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    do_ptrs = tile_pointers(
        dout + first_q * stride_dom + head_q * stride_doh, rows, stride_dom, cols, ALIGNED
    )
    k_ptrs = tile_pointers(k + first_k * stride_kn + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v + first_k * stride_vn + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
    row_base = head_q * total_q + first_q
    first_key, last_key, first, whole, tiles_k = seen_range(
        start_m, rows, seqlen_q, seqlen_k, window, window_right, chunk, PATTERN, CAUSAL, BLOCK_OWN, BLOCK_LOOP
    )

    dq_tile = gradient_of_queries(
        q_tile=load_tile(q_ptrs, in_rows, in_cols, True, MASK_COLS),
        do_tile=load_tile(do_ptrs, in_rows, in_cols, True, MASK_COLS),
        k_ptrs=k_ptrs,
        v_ptrs=v_ptrs,
        row_delta=tl.load(delta + row_base + rows, mask=in_rows, other=0.0),
        row_lse=tl.load(lse_log2 + row_base + rows, mask=in_rows, other=0.0),
        stride_kn=stride_kn,
        stride_vn=stride_vn,
        keys=keys,
        in_cols=in_cols,
        last_key=last_key,
        seqlen_k=seqlen_k,
        whole=whole,
        end=tiles_k,
        scale_log2=scale_log2,
        BLOCK_ROWS=BLOCK_OWN,
        HEAD_DIM=HEAD_DIM,
        MASK_COLS=MASK_COLS,
        ALIGNED=ALIGNED,
        PRECISION=PRECISION,
        BLOCK_KEYS=BLOCK_LOOP,
        first=first,
        first_key=first_key if PATTERN else None,
        softcap=softcap,
    )
    dq_ptrs = tile_pointers(
        dq + (first_q * heads_q + head_q) * head_dim, rows, heads_q * head_dim, cols, ALIGNED
    )
    store_tile(dq_ptrs, dq_tile * sm_scale, in_rows, in_cols, MASK_COLS)


LAUNCH: Mapping[str, tuple[Any, ...]] = flash_v2.LAUNCH
"""Launch settings, as in ``flash_v2``."""


def packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    sm_scale: float,
    window: int = 0,
    window_right: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Return attention of each sequence in q (total_q, heads_q, head_dim) to its own keys and values.

    k and v are (total_k, heads_kv, head_dim); query head h reads key head ``h // (heads_q // heads_kv)``. Any strides,
    but the last is 1. Inputs are float16, bfloat16 or float32, head_dim is 1 to 256; sm_scale is any finite number.

    cu_seqlens_q and cu_seqlens_k (sequences + 1,) int32 say where sequences begin: the first number is 0, none is less
    than the one before, and the last is the total. max_seqlen_q and max_seqlen_k are the longest lengths, or more.
    With the diagonal ``d = i + seqlen_k - seqlen_q`` of query i by the lengths of its sequence, a ``window`` above 0
    hides key j unless ``d - j < window``, a ``window_right`` above 0 unless ``j - d < window_right``, and a ``chunk``
    above 0 unless ``d // chunk == j // chunk``. softcap and sinks are as in ``flash_v2.forward``.
    ``settings`` are launch settings, those of ``flash_v2.Settings`` by default.

    Returns out, like q, and lse (heads_q, total_q) float32, the natural logarithm of the softmax sum. Both are
    contiguous. Errors are those of ``flash_v2.forward``. The numbers in cu_seqlens are checked on the CPU
    alone, as the launcher does not wait for a GPU: wrong ones give wrong answers there, but nothing outside of the
    tensors is read or written.
    """
    chosen = Settings(**settings)
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, sm_scale)
    check_sizes(window=window, window_right=window_right, chunk=chunk)
    check_softcap(softcap)
    check_of_heads(_batch_of_one(q), sinks=sinks)
    (total_q, heads_q, head_dim), (total_k, heads_kv, _) = q.shape, k.shape
    max_seqlen_q = min(max_seqlen_q, total_q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((heads_q, total_q), dtype=torch.float32, device=q.device)
    sizes = _sizes(q, k, window, window_right, chunk)
    constants = chosen.constants(_batch_of_one(q), FORWARD_TILES)
    launch(
        _forward_kernel,
        (len(cu_seqlens_q) - 1) * heads_q * math.ceil(max_seqlen_q / constants["BLOCK_OWN"]),
        *(q, k, v, out, lse, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()),
        *_strides(q, k, v),
        *(heads_q, heads_q // max(heads_kv, 1), total_q, total_k, max_seqlen_q, head_dim),
        sm_scale * LOG2E.value,
        *(*sizes, softcap * LOG2E.value or None, sinks),
        CAUSAL=causal,
        PATTERN=any(sizes),
        ALIGNED=is_aligned(*map(_batch_of_one, (q, k, v, out))),
        **constants,
    )
    return out, lse


def packed_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    sm_scale: float,
    window: int = 0,
    window_right: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of ``sum(dout * packed_forward(q, ...)[0])``, like q, k and v, contiguous.

    dout, like q, is the gradient of out; out and lse are what ``packed_forward`` returned. dk and dv are summed
    over the query heads that share a key head, in float32. Arguments and errors are those of
    ``packed_forward``.
    """
    chosen = Settings(**settings)
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, sm_scale)
    check_sizes(window=window, window_right=window_right, chunk=chunk)
    check_softcap(softcap)
    check_of_heads(_batch_of_one(q), sinks=sinks)
    (total_q, heads_q, head_dim), (total_k, heads_kv, _) = q.shape, k.shape
    max_seqlen_q, max_seqlen_k = min(max_seqlen_q, total_q), min(max_seqlen_k, total_k)
    check_like("dout", _batch_of_one(dout), "q", q, (1, heads_q, total_q, head_dim), q.dtype)
    check_like("out", _batch_of_one(out), "q", q, (1, heads_q, total_q, head_dim), q.dtype)
    check_like("lse", lse, "q", q, (heads_q, total_q), torch.float32)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    delta, lse_log2 = row_deltas(_batch_of_one(dout), _batch_of_one(out), lse[None])
    lengths = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
    counts = (heads_kv, heads_q // max(heads_kv, 1), total_q, total_k)
    scales = (head_dim, float(sm_scale), sm_scale * LOG2E.value)
    sizes = _sizes(q, k, window, window_right, chunk)
    options = (*sizes, softcap * LOG2E.value or None)
    aligned = is_aligned(*map(_batch_of_one, (dout, q, k, v, dq, dk, dv)))
    constants = chosen.constants(_batch_of_one(q), DK_DV_TILES)
    launch(
        _dk_dv_kernel,
        (len(cu_seqlens_k) - 1) * heads_kv * math.ceil(max_seqlen_k / constants["BLOCK_OWN"]),
        *(dout, q, k, v, delta, lse_log2, dk, dv, *lengths),
        *_strides(dout, q, k, v),
        *(*counts, max_seqlen_k, *scales, *options),
        CAUSAL=causal,
        PATTERN=any(sizes),
        ALIGNED=aligned,
        **constants,
    )
    constants = chosen.constants(_batch_of_one(q), DQ_TILES)
    launch(
        _dq_kernel,
        (len(cu_seqlens_q) - 1) * heads_q * math.ceil(max_seqlen_q / constants["BLOCK_OWN"]),
        *(dout, q, k, v, delta, lse_log2, dq, *lengths),
        *_strides(dout, q, k, v),
        *(*counts, max_seqlen_q, *scales, *options),
        CAUSAL=causal,
        PATTERN=any(sizes),
        ALIGNED=aligned,
        **constants,
    )
    return dq, dk, dv


def _batch_of_one(packed: Tensor) -> Tensor:
    """View (total, heads, head_dim) as (1, heads, total, head_dim); anything else is returned as it is."""
    return packed.transpose(0, 1)[None] if isinstance(packed, Tensor) and packed.ndim == 3 else packed


def _strides(*packed: Tensor) -> tuple[int, ...]:
    """Return the strides of row and head of each tensor, in elements."""
    return tuple(stride for tensor in packed for stride in tensor.stride()[:2])


def _sizes(q: Tensor, k: Tensor, *sizes: int) -> tuple[int | None, ...]:
    """Return the parts of a pattern as the kernels take them: None for 0, and none larger than both totals.

    One that is as large hides what a larger one does, which may not fit 32 bits.
    """
    return tuple(min(size, len(q) + len(k)) or None for size in sizes)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    sm_scale: float,
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, Tensor) and tensor.ndim != 3:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected packed (total, heads, head_dim)"
            )
    check_inputs(_batch_of_one(q), _batch_of_one(k), _batch_of_one(v), causal, sm_scale)
    if isinstance(cu_seqlens_q, Tensor) and cu_seqlens_q.numel() == 0:
        raise ValueError("cu_seqlens_q: got no entries, expected one more than there are sequences")
    sequences = cu_seqlens_q.numel() - 1 if isinstance(cu_seqlens_q, Tensor) else 0
    for name, cu_seqlens, longest, total in (
        ("q", cu_seqlens_q, max_seqlen_q, len(q)),
        ("k", cu_seqlens_k, max_seqlen_k, len(k)),
    ):
        check_lengths(f"cu_seqlens_{name}", cu_seqlens, sequences + 1, q)
        if type(longest) is not int or longest < 0:
            raise ValueError(f"max_seqlen_{name}: got {longest!r}, expected an integer, 0 or more")
        if not cu_seqlens.is_cpu:
            continue
        places = cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(places)]
        if places[0] != 0 or places[-1] != total or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens_{name}: got {places}, expected 0 first, then rising to {total}")
        if max(lengths, default=0) > longest:
            raise ValueError(f"max_seqlen_{name}: got {longest}, expected {max(lengths)} or more")
    check_runnable(q)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    document_ids: Tensor | None = None,
    **launch: Any,
) -> tuple[Tensor, Tensor]:
    """Call ``packed_forward`` on q, k and v that are laid out as (batch, heads, seqlen, head_dim).

    Without cu_seqlens and document_ids, each sequence of the batch has seqlen_q queries and seqlen_k keys. With
    cu_seqlens, batch is 1, and seqlen_q and seqlen_k are the totals. With document_ids (batch, seqlen) int32, where
    seqlen_q equals seqlen_k, a sequence is a document: adjacent rows of a batch element that have one number, and the
    keys at the same places. To learn how many documents there are, and how long the longest is, the launcher waits for
    a GPU, which a CUDA graph does not allow.

    Tensors are packed by a view where strides allow it: a batch of one, or (batch, seqlen, heads, head_dim) in memory;
    else they are copied.

    Returns out, like q, and lse (batch, heads_q, seqlen_q) float32: views of packed tensors. Errors are those of
    ``packed_forward`` and, for document_ids, of ``validation.check_document_ids``; ValueError if these are given beside
    cu_seqlens.
    """
    check_inputs(q, k, v, causal, sm_scale)
    lengths = _lengths(q, k, document_ids, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    out, lse = packed_forward(
        _packed(q), _packed(k), _packed(v), *lengths, causal=causal, sm_scale=sm_scale, **launch
    )
    return _unpacked(out, q), lse.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    document_ids: Tensor | None = None,
    **launch: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call ``packed_backward`` with the arguments of ``forward``; dq, dk and dv are like q, k and v."""
    check_inputs(q, k, v, causal, sm_scale)
    check_gradient_inputs(dout, q, out, lse)
    lengths = _lengths(q, k, document_ids, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    gradients = packed_backward(
        _packed(dout),
        _packed(q),
        _packed(k),
        _packed(v),
        _packed(out),
        lse.transpose(0, 1).flatten(1),
        *lengths,
        causal=causal,
        sm_scale=sm_scale,
        **launch,
    )
    dq, dk, dv = (_unpacked(packed, x) for packed, x in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


def _lengths(
    q: Tensor, k: Tensor, document_ids: Tensor | None, given: tuple[Any, Any, Any, Any]
) -> tuple[Any, Any, Any, Any]:
    """Return the four arguments as ``given``, those of the documents or, if there is neither, of equal lengths."""
    batch = q.shape[0]
    if any(x is not None for x in given):
        if document_ids is not None:
            raise ValueError("document_ids: got a tensor beside cu_seqlens, expected one or the other")
        if batch != 1:
            raise ValueError(f"q: got batch {batch} with cu_seqlens, expected 1: sequences lie end to end")
        return given
    if document_ids is not None:
        check_document_ids(document_ids, q, k)
        places, longest = _documents(document_ids)
        return places, places, longest, longest
    places = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    return places * q.shape[2], places * k.shape[2], q.shape[2], k.shape[2]


def _documents(document_ids: Tensor) -> tuple[Tensor, int]:
    """Return the cu_seqlens of the documents of a batch, packed end to end, and the length of the longest."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    places = pad(begins.flatten(), (0, 1), value=True).nonzero()[:, 0].int()
    return places, max(places.diff().tolist(), default=0)


def _packed(x: Tensor) -> Tensor:
    """Return (batch, heads, seqlen, head_dim) as (batch * seqlen, heads, head_dim): a view, or a copy."""
    return x.transpose(1, 2).flatten(0, 1)


def _unpacked(packed: Tensor, like: Tensor) -> Tensor:
    """Return a view (batch, heads, seqlen, head_dim) of a packed tensor, with the lengths of ``like``."""
    return packed.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


KERNEL = AttentionKernel(
    name="varlen",
    forward=forward,
    backward=backward,
    capabilities=replace(
        flash_v2.WITHOUT_EXTRAS,
        ragged=("packed", "document"),
        window=(0, 1, 2, 33, 100),
        window_right=(0, 1, 2, 33, 100),
        chunk=(0, 16, 48),
        softcap=(0.0, 2.0, 30.0),
        sinks=True,
    ),
)
