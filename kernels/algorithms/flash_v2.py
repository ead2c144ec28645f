"""FlashAttention-2 in Triton, forward and backward.

Tri Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023),
sections 2.2 and 3.1. For each query i, over the keys j that it sees (all of them, or under a causal mask
those with ``j <= i + seqlen_k - seqlen_q``):

    s_ij = sm_scale * q_i . k_j                  P_ij = exp(s_ij - lse_i)
    lse_i = log sum_j exp(s_ij)                  out_i = sum_j P_ij v_j

and, given dout = dL/d out, with delta_i = sum_j P_ij (dout_i . v_j) = dout_i . out_i:

    dv_j = sum_i P_ij dout_i                     dS_ij = P_ij (dout_i . v_j - delta_i)
    dq_i = sm_scale * sum_j dS_ij k_j            dk_j = sm_scale * sum_i dS_ij q_i

Softmax and all sums are float32; P and dS are cast to the inputs' dtype before they enter a matrix product.
A query that sees no key, or only scores of -inf, has out 0, lse -inf and gradients 0. Exponentials are taken
in base 2, with sm_scale * log2 e in place of sm_scale.

With dropout (the first version's Algorithm 2; ``reference.dropout``) out is the sum of P_ij z_ij v_j, z being 0 or
1 / (1 - dropout_p), and z_ij multiplies dout_i . v_j and the P of dv as well; lse and delta do not change.

With a soft-cap, softcap * tanh(s_ij / softcap) takes the place of s_ij, and dS_ij is multiplied by the derivative
1 - tanh^2. With ALiBi, slope * |i + seqlen_k - seqlen_q - j| is subtracted after that, and a bias is added, whose
gradient is dS_ij before that derivative, summed over all that share an entry of the bias. With sinks, exp(sink) is one
further term of the sum in lse_i: the running maximum begins with the sink, and the running sum with 1.

With a sliding window, query i sees no key j with ``j <= i + seqlen_k - seqlen_q - window``. Tiles without a key that
is seen are skipped, and all others are masked (``tiles.seen_range``).

It is left open whether nan or inf behind the causal mask reaches a row that does not see it: 0 * nan is nan, so
it depends on the tiles. Memory outside of the tensors never reaches a row.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.common.autograd import attention
from kernels.common.deltas import row_deltas
from kernels.common.launching import (
    bias_strides,
    check_settings,
    dropout_arguments,
    is_aligned,
    is_hopper,
    new_results,
    padded_head_dim,
    remembered,
    row_strides,
)
from kernels.common.prepared import Prepared
from kernels.common.tiles import (
    INTERPRETED,
    LOG2E,
    NEG_INF,
    advance,
    check_runnable,
    columns_inside,
    dot,
    dropout_factors,
    kernel,
    load_described,
    load_tile,
    normalise,
    reach,
    seen_range,
    slope_of_cap,
    soft_capped,
    softmax_step,
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
    default_scale,
)
from kernels.contract import BIASES, AttentionKernel, Capabilities, flash_arithmetic
from reference.arithmetic import TF32_TRUNCATED, Arithmetic

# Compile keys: dtype, PRECISION, HEAD_DIM (padded), MASK_COLS (head_dim is not HEAD_DIM), CAUSAL, DROPOUT, WINDOW,
# SOFTCAP, SUM_ROWS, whether alibi_slopes, bias and sinks are given, ALIGNED (every row starts at a multiple of 16
# bytes), whether tiles are loaded through descriptors, the BLOCK_* sizes, num_warps, num_stages and maxnreg. Nothing
# else compiles anew: see ``tiles.kernel``. Strides are declared 64-bit, and so is what they are multiplied with, as
# offsets may exceed 2^31 elements.
#
# A program owns a tile of BLOCK_OWN rows and accumulates its results over tiles of BLOCK_LOOP rows of the
# other side. It loops twice: without a mask over the tiles that are seen as a whole, and with one over those that an
# edge cuts.


@triton.jit
def attend(
    q_tile,
    k_ptrs,
    v_ptrs,
    stride_kn,
    stride_vn,
    keys,
    in_cols,
    last_key,
    seqlen_k,
    first,
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
    first_key=None,
    softcap=None,
    slope=None,
    diagonal=None,
    sink=None,
    bias_rows=None,
    in_rows=None,
    described=None,
):
    """Compute attention of a query tile to the key tiles from ``first`` up to ``end`` (FlashAttention-2, algorithm 1).

    Key tiles before ``whole`` are seen as a whole and taken unmasked; in the others, row i sees the keys up to
    last_key[i]. k_ptrs and v_ptrs point to key tile 0, whose rows are ``keys``. ``dropout``, if it is not None, is as
    in ``tiles.dropout_factors``, which also takes the numbers of the query tile's ``rows``. With a ``first_key``, row i
    sees no key before first_key[i]; no tile is then seen as a whole. ``softcap``, ``slope`` and ``sink``, as far as
    they are not None, change the scores of the head and their sum, in base 2; diagonal[i] is the key at distance 0 of
    row i. ``bias_rows``, if they are not None, point to what is added to the score of each row and key 0, and
    ``in_rows`` says which rows there are. ``described``, if it is not None, is descriptors of k and v, through which
    their tiles are loaded in place of k_ptrs and v_ptrs, and the batch and the head there. Keys and values are cast to
    the dtype of the query tile, which has to hold all their numbers.

    Returns the accumulator (BLOCK_ROWS, HEAD_DIM), still to be divided by the sum, the maximum of the scores
    and the sum; for a row that sees no key they are 0, -inf and 0, or 0, the sink and 1.
    """
    k_step = stride_kn.to(tl.int64) * BLOCK_KEYS
    v_step = stride_vn.to(tl.int64) * BLOCK_KEYS
    m_i = tl.full([BLOCK_ROWS], NEG_INF, tl.float32)
    l_i = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    if sink is not None:
        m_i = tl.full([BLOCK_ROWS], 0.0, tl.float32) + sink
        l_i = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    acc = tl.full([BLOCK_ROWS, HEAD_DIM], 0.0, tl.float32)
    for cut in tl.static_range(2):
        for tile in range(whole if cut else first, end if cut else whole):
            start_n = tile * BLOCK_KEYS
            in_tile = keys < seqlen_k - start_n
            k_offset = tile * k_step
            v_offset = tile * v_step
            if described is None:
                k_tile = load_tile(advance(k_ptrs, k_offset, ALIGNED), in_tile, in_cols, cut, MASK_COLS)
            else:
                k_tiles, v_tiles, batch, head = described
                k_tile = load_described(k_tiles, batch, head, start_n)
            k_tile = k_tile.to(q_tile.dtype)
            scores = dot(q_tile, tl.trans(k_tile), None, PRECISION) * scale_log2
            if softcap is not None:
                scores = soft_capped(scores, softcap)
            if slope is not None:
                scores -= slope * tl.abs((diagonal - start_n)[:, None] - keys[None, :])
            if bias_rows is not None:
                scores += load_bias(bias_rows[:, None] + (start_n + keys)[None, :], in_rows, in_tile)
            if cut:
                seen = keys[None, :] <= (last_key - start_n)[:, None]
                if first_key is not None:
                    seen = seen & (keys[None, :] >= (first_key - start_n)[:, None])
                scores = tl.where(seen, scores, NEG_INF)
            p, alpha, m_i, l_i = softmax_step(scores, m_i, l_i)
            if dropout is not None:
                p *= dropout_factors(dropout, 0, rows[:, None], start_n + keys[None, :])
            if described is None:
                v_tile = load_tile(advance(v_ptrs, v_offset, ALIGNED), in_tile, in_cols, cut, MASK_COLS)
            else:
                v_tile = load_described(v_tiles, batch, head, start_n)
            v_tile = v_tile.to(q_tile.dtype)
            acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], PRECISION)
    return acc, m_i, l_i


@triton.jit
def load_bias(pointers, in_first, in_last):
    """Load what is added to a tile of scores, in base 2: 0 outside of ``in_first`` and ``in_last``, its dimensions."""
    return tl.load(pointers, mask=in_first[:, None] & in_last[None, :], other=0.0).to(tl.float32) * LOG2E


@kernel
def _forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    k_tiles,
    v_tiles,
    alibi_slopes,
    sinks,
    bias,
    dropout_seed: tl.int64,
    threshold: tl.int64,
    keep_scale,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qm: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_kn: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vn: tl.int64,
    heads_q,
    group,
    seqlen_q,
    seqlen_k,
    head_dim,
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
    """Compute out and lse of a query tile, looping over key tiles (algorithm 1).

    k_tiles and v_tiles are descriptors of k and v, or None.
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_OWN)
    # Under a causal mask the last tiles see the most keys, so they start first.
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_OWN
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // heads_q
    head_q = head % heads_q
    head_kv = head_q // group

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    rows = start_m + tl.arange(0, BLOCK_OWN)
    in_rows = rows < seqlen_q
    keys = tl.arange(0, BLOCK_LOOP)
    q_ptrs = tile_pointers(q + batch * stride_qb + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    k_ptrs = tile_pointers(k + batch * stride_kb + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v + batch * stride_vb + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
    q_tile = load_tile(q_ptrs, in_rows, in_cols, True, MASK_COLS)
    first_key, last_key, first, whole, tiles_k = seen_range(
        start_m, rows, seqlen_q, seqlen_k, window, None, None, WINDOW, CAUSAL, BLOCK_OWN, BLOCK_LOOP
    )

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
        dropout=(dropout_seed, threshold, keep_scale, head) if DROPOUT else None,
        rows=rows,
        first_key=first_key if WINDOW else None,
        softcap=softcap if SOFTCAP else None,
        slope=None if alibi_slopes is None else tl.load(alibi_slopes + head_q) * LOG2E,
        diagonal=rows + (seqlen_k - seqlen_q),
        sink=None if sinks is None else tl.load(sinks + head_q) * LOG2E,
        bias_rows=None
        if bias is None
        else bias + batch * stride_bb + head_q * stride_bh + rows.to(tl.int64) * stride_bm,
        in_rows=in_rows,
        described=None if k_tiles is None else (k_tiles, v_tiles, batch, head_kv),
    )
    out_tile, lse_rows = normalise(acc, m_i, l_i)
    out_ptrs = tile_pointers(out + head * seqlen_q * head_dim, rows, head_dim, cols, ALIGNED)
    store_tile(out_ptrs, out_tile, in_rows, in_cols, MASK_COLS)
    tl.store(lse + head * seqlen_q + rows, lse_rows, mask=in_rows)


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


@kernel
def _dbias_kernel(
    dout,
    q,
    k,
    v,
    delta,
    lse_log2,
    dbias,
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
    own_heads,
    sequences,
    heads,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute a tile of dbias: dS, made anew, summed in a fixed order over the sequences, heads and rows that share it.

    dbias has own_heads heads, and each entry belongs to so many ``sequences`` and ``heads``; with ``SUM_ROWS`` it
    belongs to all rows, and a tile is one row. Tiles have BLOCK_LOOP keys, and BLOCK_OWN rows of each head.
    """
    tiles_q = tl.cdiv(seqlen_q, BLOCK_OWN)
    tiles_k = tl.cdiv(seqlen_k, BLOCK_LOOP)
    own_tiles = 1 if SUM_ROWS else tiles_q
    own_rows = 1 if SUM_ROWS else seqlen_q
    start_n = tl.program_id(0) % tiles_k * BLOCK_LOOP
    own_tile = tl.program_id(0) // tiles_k % own_tiles
    own = (tl.program_id(0) // tiles_k // own_tiles).to(tl.int64)
    first_batch = own // own_heads
    first_head = own % own_heads

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    keys = start_n + tl.arange(0, BLOCK_LOOP)
    in_keys = keys < seqlen_k
    offset = seqlen_k - seqlen_q
    tiles = tl.maximum(tiles_q, 1) if SUM_ROWS else 1  # a tile past the last row adds nothing
    total = tl.full([BLOCK_OWN, BLOCK_LOOP], 0.0, tl.float32)
    for index in range(sequences * heads * tiles):
        batch = first_batch + index // (heads * tiles)
        head_q = first_head + index // tiles % heads
        head_kv = head_q // group
        head = batch * heads_kv * group + head_q
        rows = (own_tile + index % tiles) * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
        in_rows = rows < seqlen_q
        q_ptrs = tile_pointers(q + batch * stride_qb + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
        do_ptrs = tile_pointers(
            dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, ALIGNED
        )
        k_ptrs = tile_pointers(k + batch * stride_kb + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
        v_ptrs = tile_pointers(v + batch * stride_vb + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
        q_tile = load_tile(q_ptrs, in_rows, in_cols, True, MASK_COLS)
        do_tile = load_tile(do_ptrs, in_rows, in_cols, True, MASK_COLS)
        k_tile = load_tile(k_ptrs, in_keys, in_cols, True, MASK_COLS)
        v_tile = load_tile(v_ptrs, in_keys, in_cols, True, MASK_COLS)
        row_lse = tl.load(lse_log2 + head * seqlen_q + rows, mask=in_rows, other=0.0)
        row_delta = tl.load(delta + head * seqlen_q + rows, mask=in_rows, other=0.0)

        scores = dot(q_tile, tl.trans(k_tile), None, PRECISION) * scale_log2
        if SOFTCAP:
            scores = soft_capped(scores, softcap)
        if alibi_slopes is not None:
            distance = tl.abs((rows + offset)[:, None] - keys[None, :])
            scores -= tl.load(alibi_slopes + head_q) * LOG2E * distance
        bias_ptrs = tile_pointers(bias + batch * stride_bb + head_q * stride_bh, rows, stride_bm, keys, False)
        scores += load_bias(bias_ptrs, in_rows, in_keys)
        p = weights(scores, row_lse[:, None])
        dp = dot(do_tile, tl.trans(v_tile), None, PRECISION)
        if DROPOUT:
            dropout = (dropout_seed, threshold, keep_scale, head)
            dp *= dropout_factors(dropout, 0, rows[:, None], keys[None, :])
        seen = in_rows[:, None] & in_keys[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= (rows + offset)[:, None])
        if WINDOW:
            seen = seen & (keys[None, :] > (rows + (offset - window))[:, None])
        total += tl.where(seen, p * (dp - row_delta[:, None]), 0.0)
    own_ptrs = dbias + own * own_rows * seqlen_k + keys
    if SUM_ROWS:
        tl.store(own_ptrs, tl.sum(total, 0).to(dbias.dtype.element_ty), mask=in_keys)
    else:
        rows = own_tile * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
        tile_ptrs = own_ptrs[None, :] + (rows.to(tl.int64) * seqlen_k)[:, None]
        tl.store(
            tile_ptrs,
            total.to(dbias.dtype.element_ty),
            mask=(rows < seqlen_q)[:, None] & in_keys[None, :],
        )


LAUNCH: Mapping[str, tuple[Any, ...]] = {
    "block_m": (64, 128),
    "block_n": (32, 64),
    "num_stages": (1, 2, 3),
    "precision": ("ieee", "tf32"),
}
"""Launch settings: block_m rows (of dk and dv: keys) of the tile that a program owns, 128 where rows have more than 256
bytes; block_n rows of each tile that it loops over; the depth of the loads' pipeline; how float32 operands are
multiplied. On a Hopper, a forward whose scores only a causal mask changes has the fastest tiles in place of 64 by 64:
see ``_on_hopper``."""

FORWARD_TILES = {1024: (32, 32)}
DK_DV_TILES = {256: (128, 32), 512: (32, 32), 1024: (32, 32)}
DQ_TILES = {256: (128, 32), 512: (128, 32), 1024: (32, 32)}
DBIAS_TILES = {**DK_DV_TILES, 256: (64, 32)}
"""The largest (BLOCK_OWN, BLOCK_LOOP) of each kernel that fits a Hopper's registers and shared memory, by bytes in a
row of HEAD_DIM elements. Larger launch settings are cut down; every tile fits rows that have no entry. With a bias, out
has the tiles of dq, since each element of a bias has an address of its own. The loop of dbias loads tiles of all four
operands."""

_LARGEST_FMA_TILE = (32, 16)
"""The largest (BLOCK_OWN, BLOCK_LOOP) for float32 without tensor cores: products are unrolled into multiply-adds."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    out_dtype: torch.dtype | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Return attention of q (batch, heads_q, seqlen_q, head_dim) to k and v (batch, heads_kv, seqlen_k, head_dim).

    Query head h reads key head ``h // (heads_q // heads_kv)``. Any strides, but the last is 1. Inputs are
    float16, bfloat16 or float32, head_dim is 1 to 256, lengths may be 0; sm_scale is any finite number.
    A share dropout_p of the weights is dropped, the same for the same dropout_seed (``reference.dropout``). With a
    ``window`` above 0, query i sees key j only if also ``i + seqlen_k - seqlen_q - j < window``. A ``softcap`` above 0
    limits scores, and alibi_slopes and sinks (heads_q,) float32 change them and their sum (``reference.score_rule``). A
    ``bias`` that is like q in dtype is added to scores: (batch, heads_q, seqlen_q, seqlen_k), contiguous, of which each
    of the first three may be 1.
    ``settings`` are launch settings, those of ``Settings`` by default.

    Returns out, like q but of ``out_dtype`` if that is given, and lse (batch, heads_q, seqlen_q) float32, the natural
    logarithm of the softmax sum. Both are contiguous.

    Raises TypeError or ValueError for arguments that do not fit together, NotImplementedError for a dtype or
    head_dim that is not supported, RuntimeError for tensors on the CPU outside of Triton's interpreter.
    """
    check_dropout(dropout_p, dropout_seed)
    extras = (alibi_slopes, sinks, bias)
    options = (causal, sm_scale, dropout_p, window, softcap, out_dtype)
    prepared, described = _prepared(q, k, v, *extras, *options, **settings)
    check_runnable(q)
    out, lse = new_results(q, out_dtype or q.dtype)
    tiles = (k, v) if described else (None, None)
    prepared(q, k, v, out, lse, *tiles, *extras, *dropout_arguments(dropout_p, dropout_seed))
    return out, lse


@remembered
def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    sm_scale: float,
    dropout_p: float,
    window: int,
    softcap: float,
    out_dtype: torch.dtype | None,
    **settings: Any,
) -> tuple[Prepared, bool]:
    """Check the arguments of a call, prepare its launch, and tell whether k and v are loaded through descriptors."""
    chosen = Settings(**settings)
    check_inputs(q, k, v, causal, sm_scale)
    check_sizes(window=window)
    check_softcap(softcap)
    check_of_heads(q, alibi_slopes=alibi_slopes, sinks=sinks)
    check_bias(bias, q, k)
    check_stored_dtype("out_dtype", out_dtype)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    constants = chosen.constants(q, FORWARD_TILES if bias is None else DQ_TILES)
    # out is contiguous, and its memory starts at a multiple of 16 bytes.
    aligned = is_aligned(q, k, v) and head_dim * (out_dtype or q.dtype).itemsize % 16 == 0
    described = False
    default_tile = (chosen.block_m, chosen.block_n) == (Settings.block_m, Settings.block_n)
    if default_tile and _is_tuned_for_hopper(q, dropout_p, window, softcap, alibi_slopes, sinks, bias):
        constants |= _on_hopper(constants["HEAD_DIM"], causal, aligned, chosen.num_stages)
        described = aligned and k.numel() > 0  # a tensor descriptor cannot describe an empty tensor
    block = [1, 1, constants["BLOCK_LOOP"], constants["HEAD_DIM"]]
    describe = partial(TensorDescriptor.from_tensor, block_shape=block) if described else None
    prepared = Prepared(
        _forward_kernel,
        batch * heads_q * math.ceil(seqlen_q / constants["BLOCK_OWN"]),
        [*[None] * 5, describe, describe, *[None] * 6],  # q, k, v, out, lse, k and v in tiles, and extras
        *row_strides(q, k, v),
        *(heads_q, heads_q // max(heads_kv, 1), seqlen_q, seqlen_k, head_dim, sm_scale * LOG2E.value),
        min(
            window, seqlen_q + seqlen_k
        ),  # hides no key if it is that wide; a larger number may not fit 32 bits
        *(softcap * LOG2E.value, *bias_strides(bias, q, k)),
        CAUSAL=causal,
        DROPOUT=dropout_p > 0,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0,
        ALIGNED=aligned,
        **constants,
    )
    return prepared, described


def _is_tuned_for_hopper(
    q: Tensor, dropout_p: float, window: int, softcap: float, *extras: Tensor | None
) -> bool:
    """Whether q is on a Hopper, and the call is one of those for which there are constants of its own.

    These are calls in 16 bits with a padded head_dim of 64 or 128 whose scores nothing but a causal mask changes.
    """
    plain = not (dropout_p or window or softcap) and all(extra is None for extra in extras)
    sizes = (q.element_size(), padded_head_dim(q.shape[3]))
    return plain and sizes in ((2, 64), (2, 128)) and is_hopper(q.device)


def _on_hopper(padded: int, causal: bool, aligned: bool, num_stages: int) -> dict[str, Any]:
    """Return the fastest constants of a forward of 16 bits on a Hopper, by the padded head_dim, which is 64 or 128.

    There are at most ``num_stages`` stages. Keys and values whose rows are aligned are loaded through descriptors,
    which take fewer registers than pointers. If a thread has at most ``maxnreg`` registers, three programs of four
    warps or two of eight fit a multiprocessor, and the softmax of one hides behind the products of the others. Other
    rows are loaded through pointers, in tiles of as many keys, since the bits of a result depend on that.
    """
    if padded == 64:
        own, loop, num_warps, stages, maxnreg = (64, 128, 4, 2, 168) if aligned else (128, 128, 8, 2, None)
    elif aligned and not causal:
        own, loop, num_warps, stages, maxnreg = 128, 64, 8, 2, 128
    else:
        own, loop, num_warps, stages, maxnreg = 64, 64, 4, 3, None
    return {
        "BLOCK_OWN": own,
        "BLOCK_LOOP": loop,
        "num_warps": num_warps,
        "num_stages": min(num_stages, stages),
        "maxnreg": maxnreg,
    }


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
    tuned = _is_tuned_for_hopper(q, dropout_p, window, softcap, alibi_slopes, bias)
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
    of_bias = chosen.constants(q, DBIAS_TILES)
    own_batch, own_heads, own_rows, _ = bias.shape
    sum_rows = own_rows == 1
    own_tiles = 1 if sum_rows else math.ceil(seqlen_q / of_bias["BLOCK_OWN"])
    dbias = Prepared(
        _dbias_kernel,
        own_batch * own_heads * own_tiles * math.ceil(seqlen_k / of_bias["BLOCK_LOOP"]),
        [None] * 12,
        *numbers,
        *(own_heads, batch // max(own_batch, 1), heads_q // max(own_heads, 1)),
        SUM_ROWS=sum_rows,
        **switches,
        **of_bias,
    )
    return dk_dv, dq, dbias, described


@dataclass(frozen=True)
class Settings:
    """Launch settings, checked against ``LAUNCH``.

    The defaults are the fastest for head_dim 64 and 128 in 16 bits on an H200, or nearly: two programs fit a
    multiprocessor, and the softmax of one hides behind the products of the other. Rows of more than 256 bytes leave
    shared memory for two stages alone, and so does any row on an AMD GPU.
    """

    block_m: int = 64
    block_n: int = 64
    num_stages: int = 3
    precision: str = "ieee"

    def __post_init__(self) -> None:
        check_settings(vars(self), LAUNCH)

    def constants(self, q: Tensor, tiles: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
        """Return the constants that a kernel is compiled with for q; ``tiles`` is like ``FORWARD_TILES``."""
        padded = padded_head_dim(q.shape[3])
        row_bytes = padded * q.element_size()
        # Rows of more than 256 bytes take the registers of eight warps, which have 128 rows of a tile.
        own, loop = self.block_m if row_bytes <= 256 else 128, self.block_n
        fma = q.dtype == torch.float32 and self.precision == "ieee"
        largest = _LARGEST_FMA_TILE if fma else tiles.get(row_bytes, (own, loop))
        if not INTERPRETED.value:
            own, loop = min(own, largest[0]), min(loop, largest[1])
        return {
            "HEAD_DIM": padded,
            "MASK_COLS": padded != q.shape[3],
            # Products of 16-bit operands ignore the precision, so one value for all saves compilations.
            "PRECISION": self.precision if q.dtype == torch.float32 else "ieee",
            "BLOCK_OWN": own,
            "BLOCK_LOOP": loop,
            "num_warps": 4 if own == 64 and row_bytes <= 256 else 8,
            "num_stages": min(self.num_stages, 2 if row_bytes > 256 or torch.version.hip else 3),
        }

    def on_hopper(self, q: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the constants of dk and dv, and of dq, for 16 bits and a padded head_dim of 64 or 128 on a Hopper.

        dk and dv load through descriptors, as pointers take more registers, and there is no dropout nor anything
        else that changes scores. At head_dim 64, three of their programs of four warps then fit a multiprocessor.
        At 128, tiles are larger than ``DK_DV_TILES`` and ``DQ_TILES`` have them, and more than two stages of those
        of dk and dv would leave room for one program on a multiprocessor.
        """
        of_keys = replace(self, num_stages=min(self.num_stages, 2)).constants(q, {})
        if of_keys["HEAD_DIM"] == 64:
            fewer = {"maxnreg": 168} if of_keys["num_warps"] == 4 else {}
            return of_keys | fewer, self.constants(q, DQ_TILES)
        return of_keys, replace(self, block_m=128).constants(q, {})


def flash_v2(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, sm_scale: float | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call ``forward``, differentiable in q, k, v and bias through ``backward``; lse has no gradient.

    sm_scale is 1 / sqrt(head_dim) unless given; ``options`` are dropout_p, dropout_seed, window, softcap, alibi_slopes,
    bias, sinks and settings of ``LAUNCH``.
    """
    sm_scale = default_scale(q) if sm_scale is None else sm_scale
    out, lse = attention(KERNEL, q, k, v, causal=causal, sm_scale=sm_scale, **options)
    return out, lse


def most_keys_in_a_tile(dtype: str, device: str, launch: Mapping[str, Any]) -> int:
    """Return how many keys a tile of the forward has at most; with the default block_n, a Hopper may have more."""
    keys: int = launch.get("block_n", Settings.block_n)
    return keys if dtype == "float32" or device == "cpu" or keys != Settings.block_n else 128


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    """Return FlashAttention-2's arithmetic, with tf32 products of float32 if ``precision`` says so."""
    keys = most_keys_in_a_tile(dtype, device, launch)
    arithmetic = replace(flash_arithmetic(dtype, device, launch), tile_max=keys)
    if dtype == "float32" and launch.get("precision") == "tf32":
        arithmetic = replace(arithmetic, weights=TF32_TRUNCATED, operand_rounding=2.0**-10)
    return arithmetic


KERNEL = AttentionKernel(
    name="flash_v2",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(
        head_dims=tuple(range(1, 257)),
        batch_invariant=True,
        dropout=(0.0, 0.1, 0.5),
        window=(0, 1, 2, 33, 100),
        softcap=(0.0, 2.0, 30.0),
        alibi_slopes=True,
        bias=BIASES,
        bias_gradient=True,
        sinks=True,
        launch=LAUNCH,
        arithmetic=_arithmetic,
    ),
)

WITHOUT_EXTRAS = replace(
    KERNEL.capabilities,
    dropout=(0.0,),
    window=(0,),
    softcap=(0.0,),
    alibi_slopes=False,
    bias=(),
    bias_gradient=False,
    sinks=False,
)
"""What is claimed by designs like this one that have nothing beyond q, k, v, a causal mask and sm_scale."""
