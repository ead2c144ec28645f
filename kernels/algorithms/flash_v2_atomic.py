"""FlashAttention-2's backward pass as it was published: one kernel, dq by atomic adds.

Tri Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023), algorithm 2
and section 3.2: a program owns a tile of keys, keeps its dk and dv, and loops over the query tiles. Each step
makes five matrix products, where ``flash_v2``, which computes dq apart, makes seven:

    S = sm_scale * q k^T        P = exp(S - lse)             dv += P^T dout
    dP = dout v^T               dS = P (dP - delta)          dq += sm_scale * dS k        dk += sm_scale * dS^T q

Programs of other keys add to the same dq, so these additions are atomic, in a float32 buffer that is scaled and
cast at the end. Their order is that in which programs happen to come: dq is not the same, bit for bit, on every
run, and is held to the rounding bound instead. The forward pass is that of ``flash_v2``, and so are
conventions, launch settings and what is left open.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kernels.algorithms import flash_v2
from kernels.algorithms.flash_v2.settings import Settings
from kernels.common.deltas import row_deltas
from kernels.common.launching import is_aligned, launch, row_strides
from kernels.common.tiles import (
    LOG2E,
    advance,
    check_runnable,
    columns_inside,
    dot,
    kernel,
    load_tile,
    store_tile,
    tile_pointers,
    weights,
)
from kernels.common.validation import check_gradient_inputs, check_inputs
from kernels.contract import AttentionKernel
from reference.arithmetic import Arithmetic


@kernel
def _backward_kernel(
    dout,
    q,
    k,
    v,
    delta,
    lse_log2,
    dq_sum,
    dk,
    dv,
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
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute dk and dv of a key tile, and its part of dq, looping over query tiles of the group's heads.

    Scores are held transposed, (keys, rows), so that P and dS enter the products of dv and dk as they are.
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

    # The query tiles before ``first`` see no key of this one.
    first_row = tl.full([BLOCK_OWN], 0, tl.int32)
    first = 0
    if CAUSAL:
        offset = seqlen_k - seqlen_q
        first_row = keys - offset
        first = tl.maximum(start_n - offset, 0) // BLOCK_LOOP
    tiles_q = tl.maximum(tl.cdiv(seqlen_q, BLOCK_LOOP) - first, 0)

    head_q = head_kv * group
    q_ptrs = tile_pointers(q + batch * stride_qb + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    do_ptrs = tile_pointers(dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, ALIGNED)
    dq_ptrs = tile_pointers(dq_sum, rows, head_dim, cols, ALIGNED)
    q_step = stride_qm.to(tl.int64) * BLOCK_LOOP
    do_step = stride_dom.to(tl.int64) * BLOCK_LOOP
    # In Triton's interpreter an integer is only as wide as its value needs, whatever type is declared.
    q_head_step = stride_qh.to(tl.int64)
    do_head_step = stride_doh.to(tl.int64)

    dk_acc = tl.full([BLOCK_OWN, HEAD_DIM], 0.0, tl.float32)
    dv_acc = tl.full([BLOCK_OWN, HEAD_DIM], 0.0, tl.float32)
    # One loop runs over heads and tiles, because nested loops take more registers, which spill.
    # The divisor must not be 0, because a pipelined loop divides before it knows whether there is a first step.
    divisor = tl.maximum(tiles_q, 1)
    for index in range(group * tiles_q):
        member = index // divisor
        tile = first + index % divisor
        start_m = tile * BLOCK_LOOP
        in_tile = rows < seqlen_q - start_m
        row_base = (head * group + member) * seqlen_q + start_m
        row_lse = tl.load(lse_log2 + row_base + rows, mask=in_tile, other=0.0)
        row_delta = tl.load(delta + row_base + rows, mask=in_tile, other=0.0)
        q_tile = load_tile(
            advance(q_ptrs, member * q_head_step + tile * q_step, ALIGNED), in_tile, in_cols, True, MASK_COLS
        )
        do_tile = load_tile(
            advance(do_ptrs, member * do_head_step + tile * do_step, ALIGNED),
            in_tile,
            in_cols,
            True,
            MASK_COLS,
        )
        # Keys past seqlen_k must be masked too, because dq is a sum over keys.
        seen = ((first_row - start_m)[:, None] <= rows[None, :]) & in_tile[None, :] & in_keys[:, None]
        p = weights(dot(k_tile, tl.trans(q_tile), None, PRECISION) * scale_log2, row_lse[None, :])
        p = tl.where(seen, p, 0.0)
        dv_acc = dot(p.to(do_tile.dtype), do_tile, dv_acc, PRECISION)
        ds = p * (dot(v_tile, tl.trans(do_tile), None, PRECISION) - row_delta[None, :])
        ds = tl.where(seen, ds, 0.0).to(q_tile.dtype)
        dk_acc = dot(ds, q_tile, dk_acc, PRECISION)
        dq_part = dot(tl.trans(ds), k_tile, None, PRECISION)
        inside = in_tile[:, None]
        if MASK_COLS:
            inside = inside & in_cols[None, :]
        tl.atomic_add(advance(dq_ptrs, row_base * head_dim, ALIGNED), dq_part, mask=inside, sem="relaxed")

    dk_ptrs = tile_pointers(dk + head * seqlen_k * head_dim, keys, head_dim, cols, ALIGNED)
    dv_ptrs = tile_pointers(dv + head * seqlen_k * head_dim, keys, head_dim, cols, ALIGNED)
    store_tile(dk_ptrs, dk_acc * sm_scale, in_keys, in_cols, MASK_COLS)
    store_tile(dv_ptrs, dv_acc, in_keys, in_cols, MASK_COLS)


TILES = {32: (128, 32), 64: (128, 32), 128: (128, 32), 256: (64, 32), 512: (32, 32), 1024: (32, 16)}
"""Largest (BLOCK_OWN, BLOCK_LOOP) by bytes in a row, as in ``flash_v2``. There are always eight warps, because
the product of dq takes registers on top of those that hold dk and dv."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Call ``flash_v2.forward`` without dropout, which the ``backward`` of this kernel does not have."""
    return flash_v2.forward(q, k, v, causal=causal, sm_scale=sm_scale, **vars(Settings(**settings)))


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
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of ``sum(dout * forward(q, k, v)[0])``, like q, k and v and contiguous.

    dout, like q, is the gradient of out; out and lse are what ``forward`` returned. dk and dv are summed over
    the query heads that share a key head, in float32, and dq over the key tiles, in any order. Arguments and
    errors are those of ``forward``; block_m counts keys and block_n queries. 128 keys and two stages are the default.
    """
    chosen = Settings(**{"block_m": 128, "num_stages": 2, **settings})
    check_inputs(q, k, v, causal, sm_scale)
    check_runnable(q)
    check_gradient_inputs(dout, q, out, lse)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    group = heads_q // max(heads_kv, 1)
    dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    constants = chosen.constants(q, TILES) | {"num_warps": 8}
    launch(
        _backward_kernel,
        batch * heads_kv * math.ceil(seqlen_k / constants["BLOCK_OWN"]),
        *(dout, q, k, v, *row_deltas(dout, out, lse), dq_sum, dk, dv),
        *row_strides(dout, q, k, v),
        *(heads_kv, group, seqlen_q, seqlen_k, head_dim, float(sm_scale), sm_scale * LOG2E.value),
        CAUSAL=causal,
        ALIGNED=is_aligned(dout, q, k, v, dk, dv),
        **constants,
    )
    return dq_sum.mul_(float(sm_scale)).to(q.dtype), dk, dv


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    return replace(flash_v2.KERNEL.capabilities.arithmetic(dtype, device, launch), dq_atomic=True)


KERNEL = AttentionKernel(
    name="flash_v2_atomic",
    forward=forward,
    backward=backward,
    capabilities=replace(
        flash_v2.WITHOUT_EXTRAS,
        deterministic=("out", "lse", "dk", "dv"),
        arithmetic=_arithmetic,
    ),
)
