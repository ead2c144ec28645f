"""FlashAttention-2's backward pass: dk and dv of a key tile, dq of a query tile (algorithm 2)."""

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.algorithms.flash_v2.bias_gradient import prepared_bias_gradient
from kernels.algorithms.flash_v2.forward_pass import load_bias
from kernels.algorithms.flash_v2.settings import (
    DBIAS_TILES,
    DK_DV_TILES,
    DQ_TILES,
    Settings,
    is_tuned_for_hopper,
)
from kernels.common.deltas import row_deltas
from kernels.common.launching import bias_strides, dropout_arguments, is_aligned, remembered, row_strides
from kernels.common.prepared import Prepared
from kernels.common.tiles import (
    LOG2E,
    advance,
    check_runnable,
    columns_inside,
    dot,
    dropout_factors,
    kernel,
    load_described,
    load_tile,
    reach,
    seen_range,
    slope_of_cap,
    soft_capped,
    store_tile,
    tile_pointers,
    weights,
)
from kernels.common.validation import (
    check_bias,
    check_dropout,
    check_gradient_inputs,
    check_inputs,
    check_of_heads,
    check_sizes,
    check_softcap,
    check_stored_dtype,
)


@triton.jit
def gradients_of_keys(
    k_tile,
    v_tile,
    q_ptrs,
    do_ptrs,
    delta,
    lse_log2,
    stride_doh,
    stride_dom,
    stride_qh,
    stride_qm,
    stride_row_head,
    start_n,
    keys,
    rows,
    in_cols,
    group,
    seqlen_q,
    seqlen_k,
    scale_log2,
    CAUSAL: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    dropout=None,
    window=None,
    window_right=None,
    chunk=None,
    PATTERN: tl.constexpr = False,
    softcap=None,
    slopes=None,
    bias=None,
    described=None,
):
    """Compute the gradients of the key tile ``keys``, which starts at key start_n (FlashAttention-2, algorithm 2).

    Returns dk, still to be multiplied by sm_scale, and dv. The loop takes the query tiles of all heads of the group:
    q_ptrs and do_ptrs point to tile 0 of the first head, whose rows are ``rows``; delta and lse_log2 point to row 0
    of the first head, and the next head is stride_row_head elements further on. ``dropout``, if it is not None, is as
    in ``tiles.dropout_factors``. ``window``, ``window_right``, ``chunk`` and PATTERN are as in ``tiles.seen_range``.
    ``softcap``, if it is not None, is the size of a soft-cap in base 2; and ``slopes``, if it is not None, points to
    that of the first head. ``bias``, if it is not None, is a pointer to what is added to the score of row 0 and key 0
    of the first head, and its strides of a head and of a row. ``described``, if it is not None, is descriptors of q and
    dout, through which their tiles are loaded in place of q_ptrs and do_ptrs, and the batch and the first head there.

    Scores are held transposed, (keys, rows), so that P and dS enter their products as they are. Keys past
    seqlen_k need no mask, as results of different keys never meet.
    """
    # Of tiles_q query tiles, those before ``first`` see none of these keys; those from ``diagonal`` on see them all.
    # Tiles before ``full`` have all their rows. Whole tiles, from ``diagonal`` up to ``full``, need no mask.
    offset = seqlen_k - seqlen_q
    first_row = tl.full([BLOCK_KEYS], 0, tl.int32)
    first = 0
    diagonal = 0
    full = seqlen_q // BLOCK_ROWS
    tiles_q = tl.cdiv(seqlen_q, BLOCK_ROWS)
    if CAUSAL:
        first_row = keys - offset
        first = tl.maximum(start_n - offset, 0) // BLOCK_ROWS
        diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0), BLOCK_ROWS)
        diagonal = tl.minimum(diagonal, tiles_q)
    if PATTERN:
        # The loop begins at the query tile of the first row that sees any of these keys, ends at the query tile of the
        # last such row, and masks every tile.
        begin, end = reach(keys, window_right, window, chunk, seqlen_q, seqlen_k)
        first_row = tl.maximum(first_row, begin - offset)
        last_row = end - offset
        begin, _ = reach(start_n, window_right, window, chunk, seqlen_q, seqlen_k)
        _, end = reach(start_n + BLOCK_KEYS - 1, window_right, window, chunk, seqlen_q, seqlen_k)
        first = tl.maximum(tl.maximum(begin - offset, 0) // BLOCK_ROWS, first)
        tiles_q = tl.maximum(tl.minimum(tl.cdiv(end - offset + 1, BLOCK_ROWS), tiles_q), first)
        diagonal = tiles_q
        full = 0
    cut_tiles = diagonal - first + tiles_q - tl.maximum(diagonal, full)
    whole_tiles = tl.maximum(full - diagonal, 0)

    q_step = stride_qm.to(tl.int64) * BLOCK_ROWS
    do_step = stride_dom.to(tl.int64) * BLOCK_ROWS
    # In Triton's interpreter an integer is only as wide as its value needs, whatever type is declared.
    q_head_step = stride_qh.to(tl.int64)
    do_head_step = stride_doh.to(tl.int64)
    row_head_step = stride_row_head.to(tl.int64)

    dk = tl.full([BLOCK_KEYS, HEAD_DIM], 0.0, tl.float32)
    dv = tl.full([BLOCK_KEYS, HEAD_DIM], 0.0, tl.float32)
    for cut in tl.static_range(2):
        # One loop runs over heads and tiles, because nested loops take more registers, which spill. A pipelined loop
        # divides for its first steps before it knows whether there are any, so the divisor must not be 0.
        tiles_per_head = cut_tiles if cut else whole_tiles
        divisor = tl.maximum(tiles_per_head, 1)
        for index in range(group * tiles_per_head):
            member = index // divisor
            if cut:
                tile = first + index % divisor
                tile = tl.where(tile < diagonal, tile, tiles_q - 1)
            else:
                tile = diagonal + index % divisor
            start_m = tile * BLOCK_ROWS
            in_tile = rows < seqlen_q - start_m
            row_base = member * row_head_step + start_m
            row_lse = tl.load(lse_log2 + row_base + rows, mask=in_tile, other=0.0)
            if described is None:
                q_tile = load_tile(
                    advance(q_ptrs, member * q_head_step + tile * q_step, ALIGNED),
                    in_tile,
                    in_cols,
                    cut,
                    MASK_COLS,
                )
            else:
                q_tiles, do_tiles, batch, first_head = described
                q_tile = load_described(q_tiles, batch, first_head + member, start_m)
            scores = dot(k_tile, tl.trans(q_tile), None, PRECISION) * scale_log2
            if softcap is not None:
                scores = soft_capped(scores, softcap)
                to_products = slope_of_cap(scores, softcap)
            if slopes is not None:
                distance = tl.abs(rows[None, :] - (keys - offset - start_m)[:, None])
                scores -= tl.load(slopes + member) * LOG2E * distance
            if bias is not None:
                bias_base, bias_head_step, bias_row_step = bias
                bias_base += member * bias_head_step.to(tl.int64)
                bias_rows = bias_base + (start_m + rows) * bias_row_step.to(tl.int64)
                scores += load_bias(bias_rows[None, :] + keys[:, None], keys < seqlen_k, in_tile)
            p = weights(scores, row_lse[None, :])
            if cut:
                seen = ((first_row - start_m)[:, None] <= rows[None, :]) & in_tile[None, :]
                if PATTERN:
                    seen = seen & ((last_row - start_m)[:, None] >= rows[None, :])
                p = tl.where(seen, p, 0.0)
            if described is None:
                do_tile = load_tile(
                    advance(do_ptrs, member * do_head_step + tile * do_step, ALIGNED),
                    in_tile,
                    in_cols,
                    cut,
                    MASK_COLS,
                )
            else:
                do_tile = load_described(do_tiles, batch, first_head + member, start_m)
            dropped = p
            if dropout is not None:
                z = dropout_factors(dropout, member, start_m + rows[None, :], keys[:, None])
                dropped = p * z
            dv = dot(dropped.to(do_tile.dtype), do_tile, dv, PRECISION)
            row_delta = tl.load(delta + row_base + rows, mask=in_tile, other=0.0)
            dp = dot(v_tile, tl.trans(do_tile), None, PRECISION)
            if dropout is not None:
                dp *= z
            ds = p * (dp - row_delta[None, :])
            if softcap is not None:
                ds *= to_products
            if cut:
                ds = tl.where(seen, ds, 0.0)
            dk = dot(ds.to(q_tile.dtype), q_tile, dk, PRECISION)
    return dk, dv


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
    q_tiles,
    do_tiles,
    alibi_slopes,
    bias,
    dropout_seed: tl.int64,
    threshold: tl.int64,
    keep_scale,
    stride_dob: tl.int64,
    stride_doh: tl.int64,
    stride_dom: tl.int64,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qm: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_kn: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vn: tl.int64,
    heads_kv,
    group,
    seqlen_q,
    seqlen_k,
    head_dim,
    sm_scale,
    scale_log2,
    window,
    softcap,
    stride_bb: tl.int64,
    stride_bh: tl.int64,
    stride_bm: tl.int64,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute dk and dv of a key tile, looping over query tiles of the group's heads (algorithm 2).

    q_tiles and do_tiles are descriptors of q and dout, or None.
    """
    tiles = tl.cdiv(seqlen_k, BLOCK_OWN)
    # Under a causal mask the first tiles are seen by the most rows, and programs start in this order anyhow.
    start_n = tl.program_id(0) % tiles * BLOCK_OWN
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // heads_kv
    head_kv = head % heads_kv

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    keys = start_n + tl.arange(0, BLOCK_OWN)
    in_keys = keys < seqlen_k
    rows = tl.arange(0, BLOCK_LOOP)
    k_ptrs = tile_pointers(k + batch * stride_kb + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v + batch * stride_vb + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
    k_tile = load_tile(k_ptrs, in_keys, in_cols, True, MASK_COLS)
    v_tile = load_tile(v_ptrs, in_keys, in_cols, True, MASK_COLS)

    head_q = head_kv * group
    q_ptrs = tile_pointers(q + batch * stride_qb + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    do_ptrs = tile_pointers(dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, ALIGNED)
    first_row = head * group * seqlen_q
    dk_tile, dv_tile = gradients_of_keys(
        k_tile=k_tile,
        v_tile=v_tile,
        q_ptrs=q_ptrs,
        do_ptrs=do_ptrs,
        delta=delta + first_row,
        lse_log2=lse_log2 + first_row,
        stride_doh=stride_doh,
        stride_dom=stride_dom,
        stride_qh=stride_qh,
        stride_qm=stride_qm,
        stride_row_head=seqlen_q,
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
        dropout=(dropout_seed, threshold, keep_scale, head * group) if DROPOUT else None,
        window=window,
        PATTERN=WINDOW,
        softcap=softcap if SOFTCAP else None,
        slopes=None if alibi_slopes is None else alibi_slopes + head_q,
        bias=None if bias is None else (bias + batch * stride_bb + head_q * stride_bh, stride_bh, stride_bm),
        described=None if q_tiles is None else (q_tiles, do_tiles, batch, head_q),
    )
    dk_ptrs = tile_pointers(dk + head * seqlen_k * head_dim, keys, head_dim, cols, ALIGNED)
    dv_ptrs = tile_pointers(dv + head * seqlen_k * head_dim, keys, head_dim, cols, ALIGNED)
    store_tile(dk_ptrs, dk_tile * sm_scale, in_keys, in_cols, MASK_COLS)
    store_tile(dv_ptrs, dv_tile, in_keys, in_cols, MASK_COLS)


@triton.jit
def gradient_of_queries(
    q_tile,
    do_tile,
    k_ptrs,
    v_ptrs,
    row_delta,
    row_lse,
    stride_kn,
    stride_vn,
    keys,
    in_cols,
    last_key,
    seqlen_k,
    whole,
    end,
    scale_log2,
    BLOCK_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    dropout=None,
    rows=None,
    first=0,
    first_key=None,
    softcap=None,
    slope=None,
    diagonal=None,
    bias_rows=None,
    in_rows=None,
):
    """Compute the gradient of a query tile over the key tiles from ``first`` up to ``end`` (algorithm 2).

    Returns dq, still to be multiplied by sm_scale. Arguments are as those of ``attend``.
    """
    k_step = stride_kn.to(tl.int64) * BLOCK_KEYS
    v_step = stride_vn.to(tl.int64) * BLOCK_KEYS
    dq = tl.full([BLOCK_ROWS, HEAD_DIM], 0.0, tl.float32)
    for cut in tl.static_range(2):
        for tile in range(whole if cut else first, end if cut else whole):
            start_n = tile * BLOCK_KEYS
            in_tile = keys < seqlen_k - start_n
            k_tile = load_tile(advance(k_ptrs, tile * k_step, ALIGNED), in_tile, in_cols, cut, MASK_COLS)
            v_tile = load_tile(advance(v_ptrs, tile * v_step, ALIGNED), in_tile, in_cols, cut, MASK_COLS)
            scores = dot(q_tile, tl.trans(k_tile), None, PRECISION) * scale_log2
            if softcap is not None:
                scores = soft_capped(scores, softcap)
                to_products = slope_of_cap(scores, softcap)
            if slope is not None:
                scores -= slope * tl.abs((diagonal - start_n)[:, None] - keys[None, :])
            if bias_rows is not None:
                scores += load_bias(bias_rows[:, None] + (start_n + keys)[None, :], in_rows, in_tile)
            p = weights(scores, row_lse[:, None])
            dp = dot(do_tile, tl.trans(v_tile), None, PRECISION)
            if dropout is not None:
                dp *= dropout_factors(dropout, 0, rows[:, None], start_n + keys[None, :])
            ds = p * (dp - row_delta[:, None])
            if softcap is not None:
                ds *= to_products
            if cut:
                ds = tl.where(keys[None, :] <= (last_key - start_n)[:, None], ds, 0.0)
                if first_key is not None:
                    ds = tl.where(keys[None, :] >= (first_key - start_n)[:, None], ds, 0.0)
            dq = dot(ds.to(k_tile.dtype), k_tile, dq, PRECISION)
    return dq


@kernel
def _dq_kernel(
    dout,
    q,
    k,
    v,
    delta,
    lse_log2,
    dq,
    alibi_slopes,
    bias,
    dropout_seed: tl.int64,
    threshold: tl.int64,
    keep_scale,
    stride_dob: tl.int64,
    stride_doh: tl.int64,
    stride_dom: tl.int64,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qm: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_kn: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vn: tl.int64,
    heads_kv,
    group,
    seqlen_q,
    seqlen_k,
    head_dim,
    sm_scale,
    scale_log2,
    window,
    softcap,
    stride_bb: tl.int64,
    stride_bh: tl.int64,
    stride_bm: tl.int64,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute dq of a query tile, looping over key tiles as the forward pass does (algorithm 2)."""
    tiles = tl.cdiv(seqlen_q, BLOCK_OWN)
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_OWN
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // (heads_kv * group)
    head_q = head % (heads_kv * group)
    head_kv = head_q // group

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    rows = start_m + tl.arange(0, BLOCK_OWN)
    in_rows = rows < seqlen_q
    keys = tl.arange(0, BLOCK_LOOP)
    q_ptrs = tile_pointers(q + batch * stride_qb + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    do_ptrs = tile_pointers(dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, ALIGNED)
    k_ptrs = tile_pointers(k + batch * stride_kb + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v + batch * stride_vb + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
    q_tile = load_tile(q_ptrs, in_rows, in_cols, True, MASK_COLS)
    do_tile = load_tile(do_ptrs, in_rows, in_cols, True, MASK_COLS)
    row_lse = tl.load(lse_log2 + head * seqlen_q + rows, mask=in_rows, other=0.0)
    row_delta = tl.load(delta + head * seqlen_q + rows, mask=in_rows, other=0.0)
    first_key, last_key, first, whole, tiles_k = seen_range(
        start_m, rows, seqlen_q, seqlen_k, window, None, None, WINDOW, CAUSAL, BLOCK_OWN, BLOCK_LOOP
    )

    dq_tile = gradient_of_queries(
        q_tile=q_tile,
        do_tile=do_tile,
        k_ptrs=k_ptrs,
        v_ptrs=v_ptrs,
        row_delta=row_delta,
        row_lse=row_lse,
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
        dropout=(dropout_seed, threshold, keep_scale, head) if DROPOUT else None,
        rows=rows,
        first=first,
        first_key=first_key if WINDOW else None,
        softcap=softcap if SOFTCAP else None,
        slope=None if alibi_slopes is None else tl.load(alibi_slopes + head_q) * LOG2E,
        diagonal=rows + (seqlen_k - seqlen_q),
        bias_rows=None
        if bias is None
        else bias + batch * stride_bb + head_q * stride_bh + rows.to(tl.int64) * stride_bm,
        in_rows=in_rows,
    )
    dq_ptrs = tile_pointers(dq + head * seqlen_q * head_dim, rows, head_dim, cols, ALIGNED)
    store_tile(dq_ptrs, dq_tile * sm_scale, in_rows, in_cols, MASK_COLS)


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
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    grad_dtype: torch.dtype | None = None,
    **settings: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients (dq, dk, dv) of ``sum(dout * forward(q, k, v)[0])``, like q, k and v and contiguous.

    dout, like q, is the gradient of out; out and lse are what ``forward`` returned. dk and dv are summed over
    the query heads that share a key head, in float32. With a ``bias``, dbias, like it and summed in float32 as well, is
    the fourth. Gradients have ``grad_dtype`` if that is given. Arguments and errors are those of ``forward``.
    """
    check_dropout(dropout_p, dropout_seed)
    extras = (alibi_slopes, sinks, bias)
    options = (causal, sm_scale, dropout_p, window, softcap, grad_dtype)
    prepared = _prepared_gradients(dout, q, k, v, out, lse, *extras, *options, **settings)
    check_runnable(q)
    compute_dk_dv, compute_dq, compute_dbias, described = prepared
    dq, dk, dv = (torch.empty(*t.shape, dtype=grad_dtype or t.dtype, device=t.device) for t in (q, k, v))
    inputs = (dout, q, k, v, *row_deltas(dout, out, lse))
    tiles = (q, dout) if described else (None, None)
    others = (alibi_slopes, bias, *dropout_arguments(dropout_p, dropout_seed))
    compute_dk_dv(*inputs, dk, dv, *tiles, *others)
    compute_dq(*inputs, dq, *others)
    if bias is None or compute_dbias is None:
        return dq, dk, dv
    dbias = torch.empty(bias.shape, dtype=grad_dtype or bias.dtype, device=bias.device)
    compute_dbias(*inputs, dbias, *others)
    return dq, dk, dv, dbias


@remembered
def _prepared_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    sm_scale: float,
    dropout_p: float,
    window: int,
    softcap: float,
    grad_dtype: torch.dtype | None,
    **settings: Any,
) -> tuple[Prepared, Prepared, Prepared | None, bool]:
    """Check the arguments of a call, and prepare its launches: dk and dv, dq, and dbias if there is a bias.

    And tell whether q and dout are loaded through descriptors for dk and dv.
    """
    chosen = Settings(**settings)
    check_inputs(q, k, v, causal, sm_scale)
    check_sizes(window=window)
    check_softcap(softcap)
    check_of_heads(q, alibi_slopes=alibi_slopes, sinks=sinks)
    check_bias(bias, q, k)
    check_stored_dtype("grad_dtype", grad_dtype)
    check_gradient_inputs(dout, q, out, lse)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    # Gradients are contiguous, and their memory starts at a multiple of 16 bytes.
    aligned = is_aligned(dout, q, k, v) and head_dim * (grad_dtype or q.dtype).itemsize % 16 == 0
    numbers = (
        *row_strides(dout, q, k, v),
        *(heads_kv, heads_q // max(heads_kv, 1), seqlen_q, seqlen_k, head_dim),
        *(float(sm_scale), sm_scale * LOG2E.value),
        *(min(window, seqlen_q + seqlen_k), softcap * LOG2E.value, *bias_strides(bias, q, k)),
    )
    switches = {
        "CAUSAL": causal,
        "DROPOUT": dropout_p > 0,
        "WINDOW": window > 0,
        "SOFTCAP": softcap > 0,
        "ALIGNED": aligned,
    }
    of_keys, of_queries = chosen.constants(q, DK_DV_TILES), chosen.constants(q, DQ_TILES)
    tuned = is_tuned_for_hopper(q, dropout_p, window, softcap, alibi_slopes, bias)
    described = bool(tuned and aligned and q.numel() and k.numel())
    if described:
        of_keys, of_queries = chosen.on_hopper(q)
    block = [1, 1, of_keys["BLOCK_LOOP"], of_keys["HEAD_DIM"]]
    describe = partial(TensorDescriptor.from_tensor, block_shape=block) if described else None
    dk_dv = Prepared(
        _dk_dv_kernel,
        batch * heads_kv * math.ceil(seqlen_k / of_keys["BLOCK_OWN"]),
        [*[None] * 8, describe, describe, *[None] * 5],  # of the 15 first arguments, q_tiles and do_tiles
        *numbers,
        **switches,
        **of_keys,
    )
    dq = Prepared(
        _dq_kernel,
        batch * heads_q * math.ceil(seqlen_q / of_queries["BLOCK_OWN"]),
        [None] * 12,
        *numbers,
        **switches,
        **of_queries,
    )
    if bias is None:
        return dk_dv, dq, None, described
    of_bias = {**switches, **chosen.constants(q, DBIAS_TILES)}
    return dk_dv, dq, prepared_bias_gradient(q, k, bias, numbers, of_bias), described
