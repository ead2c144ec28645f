"""FlashAttention, the first version, in Triton, forward and backward.

Tri Dao, Daniel Y. Fu, Stefano Ermon, Atri Rudra and Christopher Ré, *FlashAttention: Fast and
Memory-Efficient Exact Attention with IO-Awareness* (2022, arXiv 2205.14135), algorithms 1 and 2 forward, 3
and 4 backward; comments give the lines of algorithms 2 and 4. What is computed stands in ``flash_v2``;
the float64 twin of this file is ``reference.flash_v1``.

One program takes a whole head. Its outer loop goes over blocks of keys, its inner loop over blocks of queries:
a block of k and v is read once, and what belongs to the queries (out, l and m; backward dq) stays in memory and
is read, rescaled and written again for every key block. The later version turns the loops round, so that a
program keeps its queries' results to itself, and heads are no longer the only parallelism.

The mask of line 11 is the causal one and, where it is given, a key-padding mask, True where a key may be attended
as in FlashAttention's own (torch.nn.MultiheadAttention's says the opposite). Masked keys and values are not loaded.
For dropout the state of the random numbers, line 1, is dropout_seed: ``reference.dropout``.

Three things differ from the paper. Weights are taken relative to the new maximum m_new at once, where the paper
takes them relative to the block's own and multiplies by exp(m_ij - m_new). lse = m + log l leaves the forward
pass, in place of m and l, and the backward pass takes P = exp(S - lse) for exp(S - m) / l. delta, line 19, is
computed before the loops. Grouped heads: backward, a program takes a key head and all query heads that read it.

The out and dq that lie in memory between key blocks are float32, whatever the inputs are, and cast at the end:
rounded to 16 bits at every block they would be no better than the sum of all those roundings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kernels.common.autograd import attention
from kernels.common.deltas import row_deltas
from kernels.common.launching import (
    check_settings,
    dropout_arguments,
    is_aligned,
    launch,
    padded_head_dim,
    row_strides,
)
from kernels.common.tiles import (
    INTERPRETED,
    LN2,
    LOG2E,
    NEG_INF,
    advance,
    check_runnable,
    columns_inside,
    dot,
    dropout_factors,
    kernel,
    load_tile,
    softmax_step,
    store_tile,
    tile_pointers,
    weights,
)
from kernels.common.validation import (
    check_dropout,
    check_gradient_inputs,
    check_inputs,
    check_key_padding_mask,
    default_scale,
)
from kernels.contract import AttentionKernel, Capabilities, flash_arithmetic
from reference.arithmetic import TF32_TRUNCATED, Arithmetic

# Compile keys and 64-bit offsets: as in ``flash_v2``.
#
# What one thread of a program stores to memory another may load at the next key block: the barrier that ends
# each key block makes it seen. Within a key block no row is met twice, so the loads of later query blocks may
# run ahead of the stores of earlier ones, and the compiler lets them.


@kernel
def _forward_kernel(
    q,
    k,
    v,
    key_padding_mask,
    out,
    l,
    m,
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
    dropout_seed: tl.int64,
    threshold: tl.int64,
    keep_scale,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute out, l and m (base 2) of a query head, which the caller sets to 0, 0 and -inf (algorithm 2, line 2)."""
    head = tl.program_id(0).to(tl.int64)
    batch = head // heads_q
    head_q = head % heads_q
    head_kv = head_q // group

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    q_ptrs = tile_pointers(q + batch * stride_qb + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    k_ptrs = tile_pointers(k + batch * stride_kb + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v + batch * stride_vb + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
    out_ptrs = tile_pointers(out + head * seqlen_q * head_dim, rows, head_dim, cols, ALIGNED)
    q_step = stride_qm.to(tl.int64) * BLOCK_M
    k_step = stride_kn.to(tl.int64) * BLOCK_N
    v_step = stride_vn.to(tl.int64) * BLOCK_N
    out_step = head_dim.to(tl.int64) * BLOCK_M
    dropout = (dropout_seed, threshold, keep_scale, head)

    for j in range(tl.cdiv(seqlen_k, BLOCK_N)):  # line 6
        start_n = j * BLOCK_N
        in_keys = keys < seqlen_k - start_n
        attended = in_keys
        if key_padding_mask is not None:
            of_keys = batch * seqlen_k + start_n + keys
            attended = tl.load(key_padding_mask + of_keys, mask=in_keys, other=False)
        k_tile = load_tile(advance(k_ptrs, j * k_step, ALIGNED), attended, in_cols, True, MASK_COLS)  # line 7
        v_tile = load_tile(advance(v_ptrs, j * v_step, ALIGNED), attended, in_cols, True, MASK_COLS)
        first = 0
        if CAUSAL:
            first = tl.maximum(start_n - (seqlen_k - seqlen_q), 0) // BLOCK_M
        for i in range(first, tl.cdiv(seqlen_q, BLOCK_M)):  # line 8
            start_m = i * BLOCK_M
            last_key = tl.full([BLOCK_M], seqlen_k - 1, tl.int32)
            if CAUSAL:
                last_key = start_m + rows + (seqlen_k - seqlen_q)
            in_rows = rows < seqlen_q - start_m
            # line 9
            q_tile = load_tile(advance(q_ptrs, i * q_step, ALIGNED), in_rows, in_cols, True, MASK_COLS)
            of_tile = advance(out_ptrs, i * out_step, ALIGNED)
            out_tile = load_tile(of_tile, in_rows, in_cols, True, MASK_COLS)
            l_ptrs = l + head * seqlen_q + start_m + rows
            m_ptrs = m + head * seqlen_q + start_m + rows
            l_i = tl.load(l_ptrs, mask=in_rows, other=0.0)
            m_i = tl.load(m_ptrs, mask=in_rows, other=NEG_INF)

            scores = dot(q_tile, tl.trans(k_tile), None, PRECISION) * scale_log2  # line 10
            scores = tl.where(start_n + keys[None, :] <= last_key[:, None], scores, NEG_INF)  # line 11
            if key_padding_mask is not None:
                scores = tl.where(attended[None, :], scores, NEG_INF)
            p, alpha, m_new, l_new = softmax_step(scores, m_i, l_i)  # lines 12, 13
            if DROPOUT:  # line 14
                p *= dropout_factors(dropout, 0, start_m + rows[:, None], start_n + keys[None, :])
            acc = dot(p.to(v_tile.dtype), v_tile, out_tile * (l_i * alpha)[:, None], PRECISION)  # line 15
            out_tile = acc / tl.where(l_new == 0.0, 1.0, l_new)[:, None]

            # A row that sees none of these keys stays as it is, whichever rows share its block.
            in_rows = in_rows & (last_key >= start_n)
            store_tile(of_tile, out_tile, in_rows, in_cols, MASK_COLS)  # line 15
            tl.store(l_ptrs, l_new, mask=in_rows)  # line 16
            tl.store(m_ptrs, m_new, mask=in_rows)
        tl.debug_barrier()


@kernel
def _backward_kernel(
    dout,
    q,
    k,
    v,
    key_padding_mask,
    delta,
    lse_log2,
    dq,
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
    dropout_seed: tl.int64,
    threshold: tl.int64,
    keep_scale,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute dk and dv of a key head, and dq / sm_scale of its query heads, which the caller sets to 0 (algorithm 4).

    Scores are held transposed, (keys, rows), so that P and dS enter the products of dv and dk as they are.
    """
    head = tl.program_id(0).to(tl.int64)
    batch = head // heads_kv
    head_kv = head % heads_kv
    head_q = head_kv * group

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    q_ptrs = tile_pointers(q + batch * stride_qb + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    do_ptrs = tile_pointers(dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, ALIGNED)
    k_ptrs = tile_pointers(k + batch * stride_kb + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v + batch * stride_vb + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
    dq_ptrs = tile_pointers(dq + head * group * seqlen_q * head_dim, rows, head_dim, cols, ALIGNED)
    dk_ptrs = tile_pointers(dk + head * seqlen_k * head_dim, keys, head_dim, cols, ALIGNED)
    dv_ptrs = tile_pointers(dv + head * seqlen_k * head_dim, keys, head_dim, cols, ALIGNED)
    # In Triton's interpreter an integer is only as wide as its value needs, whatever type is declared.
    q_row, q_head = stride_qm.to(tl.int64), stride_qh.to(tl.int64)
    do_row, do_head = stride_dom.to(tl.int64), stride_doh.to(tl.int64)
    k_step = stride_kn.to(tl.int64) * BLOCK_N
    v_step = stride_vn.to(tl.int64) * BLOCK_N
    out_step = head_dim.to(tl.int64) * BLOCK_N
    dropout = (dropout_seed, threshold, keep_scale, head * group)

    for j in range(tl.cdiv(seqlen_k, BLOCK_N)):  # line 6
        start_n = j * BLOCK_N
        in_keys = keys < seqlen_k - start_n
        attended = in_keys
        if key_padding_mask is not None:
            of_keys = batch * seqlen_k + start_n + keys
            attended = tl.load(key_padding_mask + of_keys, mask=in_keys, other=False)
        k_tile = load_tile(advance(k_ptrs, j * k_step, ALIGNED), attended, in_cols, True, MASK_COLS)  # line 7
        v_tile = load_tile(advance(v_ptrs, j * v_step, ALIGNED), attended, in_cols, True, MASK_COLS)
        dk_acc = tl.full([BLOCK_N, HEAD_DIM], 0.0, tl.float32)  # line 8
        dv_acc = tl.full([BLOCK_N, HEAD_DIM], 0.0, tl.float32)
        first = 0
        if CAUSAL:
            first = tl.maximum(start_n - (seqlen_k - seqlen_q), 0) // BLOCK_M
        # One loop runs over heads and blocks, because nested loops take more registers, which spill.
        blocks = tl.maximum(tl.cdiv(seqlen_q, BLOCK_M) - first, 0)
        # The divisor must not be 0, because a pipelined loop divides before it knows whether there is a first step.
        divisor = tl.maximum(blocks, 1)
        for index in range(group * blocks):  # line 9
            member = index // divisor
            start_m = (first + index % divisor) * BLOCK_M
            row = member.to(tl.int64) * seqlen_q + start_m
            last_key = tl.full([BLOCK_M], seqlen_k - 1, tl.int32)
            if CAUSAL:
                last_key = start_m + rows + (seqlen_k - seqlen_q)
            in_rows = rows < seqlen_q - start_m
            seen = (start_n + keys[:, None] <= last_key[None, :]) & in_rows[None, :]
            if key_padding_mask is not None:
                seen = seen & attended[:, None]
            of_rows = head * group * seqlen_q + row + rows
            row_lse = tl.load(lse_log2 + of_rows, mask=in_rows, other=0.0)  # line 10
            row_delta = tl.load(delta + of_rows, mask=in_rows, other=0.0)
            q_tile = load_tile(
                advance(q_ptrs, member * q_head + start_m * q_row, ALIGNED), in_rows, in_cols, True, MASK_COLS
            )
            do_tile = load_tile(
                advance(do_ptrs, member * do_head + start_m * do_row, ALIGNED),
                in_rows,
                in_cols,
                True,
                MASK_COLS,
            )

            scores = dot(k_tile, tl.trans(q_tile), None, PRECISION) * scale_log2  # line 11
            p = tl.where(seen, weights(scores, row_lse[None, :]), 0.0)  # lines 12, 13
            dropped = p
            if DROPOUT:  # lines 14, 15
                z = dropout_factors(dropout, member, start_m + rows[None, :], start_n + keys[:, None])
                dropped = p * z
            dv_acc = dot(dropped.to(do_tile.dtype), do_tile, dv_acc, PRECISION)  # line 16
            dp = dot(v_tile, tl.trans(do_tile), None, PRECISION)  # line 17
            if DROPOUT:  # line 18
                dp *= z
            ds = tl.where(seen, p * (dp - row_delta[None, :]), 0.0).to(q_tile.dtype)  # line 20
            of_tile = advance(dq_ptrs, row * head_dim, ALIGNED)
            dq_tile = load_tile(of_tile, in_rows, in_cols, True, MASK_COLS)
            dq_tile = dot(tl.trans(ds), k_tile, dq_tile, PRECISION)  # line 21
            store_tile(of_tile, dq_tile, in_rows, in_cols, MASK_COLS)
            dk_acc = dot(ds, q_tile, dk_acc, PRECISION)  # line 22
        # line 24
        store_tile(advance(dk_ptrs, j * out_step, ALIGNED), dk_acc * sm_scale, in_keys, in_cols, MASK_COLS)
        store_tile(advance(dv_ptrs, j * out_step, ALIGNED), dv_acc, in_keys, in_cols, MASK_COLS)
        tl.debug_barrier()


LAUNCH: Mapping[str, tuple[Any, ...]] = {
    "block_m": (64, 128),
    "block_n": (64, 32),
    "num_stages": (1, 2),
    "precision": ("ieee", "tf32"),
}
"""Launch settings: rows of a block of queries and of a block of keys (B_r and B_c), depth of the loads' pipeline,
and how float32 operands are multiplied."""

_LARGEST_TILE = {
    _forward_kernel: {256: (64, 32), 512: (32, 32), 1024: (16, 16)},
    _backward_kernel: {
        32: (64, 64),
        64: (64, 32),
        128: (64, 32),
        256: (64, 32),
        512: (16, 32),
        1024: (16, 16),
    },
}
"""Largest (BLOCK_M, BLOCK_N) that fits the registers of a GPU, by kernel and bytes in a row of HEAD_DIM elements.
Larger launch settings are cut down; every tile fits rows that have no entry."""

_LARGEST_FMA_TILE = {512: (16, 16), 1024: (16, 16)}
"""The largest tile for float32 without tensor cores, whose products are unrolled into a straight run of multiply-adds.
Rows without an entry take (32, 16); rows of 1024 bytes spill even so."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, with the arguments, results and errors of ``flash_v2.forward``.

    There is no window and no out_dtype. key_padding_mask (batch, seqlen_k) bool is True where a key may be attended;
    the others have weight 0 and gradients 0, whatever they and their values are. ``settings`` are launch settings,
    those of ``Settings`` by default.
    """
    chosen = Settings(**settings)
    check_inputs(q, k, v, causal, sm_scale)
    check_key_padding_mask(key_padding_mask, k)
    check_dropout(dropout_p, dropout_seed)
    check_runnable(q)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    acc = torch.empty(q.shape, dtype=torch.float32, device=q.device).zero_()
    l = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device).zero_()
    m = torch.empty_like(l).fill_(-math.inf)
    launch(
        _forward_kernel,
        batch * heads_q,
        *(q, k, v, key_padding_mask, acc, l, m),
        *row_strides(q, k, v),
        *(heads_q, heads_q // max(heads_kv, 1), seqlen_q, seqlen_k, head_dim, sm_scale * LOG2E.value),
        *dropout_arguments(dropout_p, dropout_seed),
        CAUSAL=causal,
        DROPOUT=dropout_p > 0,
        ALIGNED=is_aligned(q, k, v, out),
        **chosen.constants(_forward_kernel, q),
    )
    # A row that sees no key still has m = -inf and l = 0: its lse is -inf.
    return out.copy_(acc), (m + l.log2()) * LN2.value


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
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of ``sum(dout * forward(q, k, v)[0])``, like q, k and v and contiguous.

    dout, like q, is the gradient of out; out and lse are what ``forward`` returned. dk and dv are summed over
    the query heads that share a key head, in float32. Arguments and errors are those of ``forward``.
    """
    chosen = Settings(**settings)
    check_inputs(q, k, v, causal, sm_scale)
    check_key_padding_mask(key_padding_mask, k)
    check_dropout(dropout_p, dropout_seed)
    check_runnable(q)
    check_gradient_inputs(dout, q, out, lse)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    acc = torch.empty(q.shape, dtype=torch.float32, device=q.device).zero_()
    delta, lse_log2 = row_deltas(dout, out, lse)
    launch(
        _backward_kernel,
        batch * heads_kv,
        *(dout, q, k, v, key_padding_mask, delta, lse_log2, acc, dk, dv),
        *row_strides(dout, q, k, v),
        *(heads_kv, heads_q // max(heads_kv, 1), seqlen_q, seqlen_k, head_dim),
        *(float(sm_scale), sm_scale * LOG2E.value),
        *dropout_arguments(dropout_p, dropout_seed),
        CAUSAL=causal,
        DROPOUT=dropout_p > 0,
        ALIGNED=is_aligned(dout, q, k, v, dk, dv),
        **chosen.constants(_backward_kernel, q),
    )
    return (acc * sm_scale).to(q.dtype), dk, dv


@dataclass(frozen=True)
class Settings:
    """Launch settings, checked against ``LAUNCH``."""

    block_m: int = 64
    block_n: int = 64
    num_stages: int = 1
    precision: str = "ieee"

    def __post_init__(self) -> None:
        check_settings(vars(self), LAUNCH)

    def constants(self, fn: Any, q: Tensor) -> dict[str, Any]:
        """Return the constants that the kernel ``fn`` is compiled with for q."""
        padded = padded_head_dim(q.shape[3])
        row_bytes = padded * q.element_size()
        block_m, block_n = self.block_m, self.block_n
        fma = q.dtype == torch.float32 and self.precision == "ieee"
        if not INTERPRETED.value:
            tiles, default = (_LARGEST_FMA_TILE, (32, 16)) if fma else (_LARGEST_TILE[fn], (block_m, block_n))
            largest = tiles.get(row_bytes, default)
            block_m, block_n = min(block_m, largest[0]), min(block_n, largest[1])
        return {
            "HEAD_DIM": padded,
            "MASK_COLS": padded != q.shape[3],
            # Products of 16-bit operands ignore the precision, so one value for all saves compilations.
            "PRECISION": self.precision if q.dtype == torch.float32 else "ieee",
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "num_warps": 8,
            "num_stages": self.num_stages,
        }


def flash_v1(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, sm_scale: float | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call ``forward``, differentiable in q, k and v through ``backward``; lse has no gradient.

    sm_scale is 1 / sqrt(head_dim) unless given; ``options`` are key_padding_mask, dropout_p,
    dropout_seed and settings of ``LAUNCH``.
    """
    sm_scale = default_scale(q) if sm_scale is None else sm_scale
    out, lse = attention(KERNEL, q, k, v, causal=causal, sm_scale=sm_scale, **options)
    return out, lse


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    """Return FlashAttention-1's arithmetic, which divides out by l at each key block; products may be tf32."""
    block_n = launch.get("block_n", 64)
    arithmetic = replace(
        flash_arithmetic(dtype, device, launch),
        partial_results=True,
        # In compiled kernels, key blocks are cut down to what fits.
        tile_min=block_n if device == "cpu" else 16,
        tile_max=block_n,
    )
    if dtype == "float32" and launch.get("precision") == "tf32":
        arithmetic = replace(arithmetic, weights=TF32_TRUNCATED, operand_rounding=2.0**-10)
    return arithmetic


KERNEL = AttentionKernel(
    name="flash_v1",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(
        head_dims=tuple(range(1, 257)),
        batch_invariant=True,
        key_padding=True,
        dropout=(0.0, 0.1, 0.5),
        launch=LAUNCH,
        arithmetic=_arithmetic,
    ),
)
