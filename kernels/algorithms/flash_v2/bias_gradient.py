"""The gradient of a bias: a tile of dS, summed over all that share it."""

import math
from collections.abc import Mapping
from typing import Any

import triton.language as tl
from torch import Tensor

from kernels.algorithms.flash_v2.forward_pass import load_bias
from kernels.common.prepared import Prepared
from kernels.common.tiles import (
    LOG2E,
    columns_inside,
    dot,
    dropout_factors,
    kernel,
    load_tile,
    soft_capped,
    tile_pointers,
    weights,
)


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


def prepared_bias_gradient(
    q: Tensor, k: Tensor, bias: Tensor, numbers: tuple[float, ...], constants: Mapping[str, Any]
) -> Prepared:
    """Prepare the launch that computes dbias, with the numbers and constants that dq has too."""
    batch, heads_q, seqlen_q, _ = q.shape
    own_batch, own_heads, own_rows, _ = bias.shape
    sum_rows = own_rows == 1
    own_tiles = 1 if sum_rows else math.ceil(seqlen_q / constants["BLOCK_OWN"])
    return Prepared(
        _dbias_kernel,
        own_batch * own_heads * own_tiles * math.ceil(k.shape[2] / constants["BLOCK_LOOP"]),
        [None] * 12,
        *numbers,
        *(own_heads, batch // max(own_batch, 1), heads_q // max(own_heads, 1)),
        SUM_ROWS=sum_rows,
        **constants,
    )
