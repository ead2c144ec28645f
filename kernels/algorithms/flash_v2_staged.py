"""FlashAttention-2's forward pass in the classic two stages: below the diagonal, then on it.

The form of Triton's tutorial 06, *Fused Attention* (after Dao 2023, algorithm 1): a program owns ``block_m``
queries and walks over the keys in tiles of ``block_n``. Lengths are whole numbers of these tiles, and under a
causal mask both are equal; so keys before the program's first query are seen by all of its queries, those after
its last by none, and the causal mask cuts the square on the diagonal alone. That gives two stages, the first
without any mask at all:

    keys                 0 ... start_m        start_m ... start_m + block_m
    off the diagonal     all are seen
    on the diagonal                           query i sees key j when j <= i

Other lengths are refused, as are values of head_dim that are no power of two. In everything else, and in the
backward pass, which is taken from there, this is ``flash_v2``.
"""

from dataclasses import replace
from typing import Any

import triton.language as tl
from torch import Tensor

from kernels.algorithms import flash_v2
from kernels.algorithms.flash_v2.settings import FORWARD_TILES, LAUNCH, Settings
from kernels.common.launching import is_aligned, launch, new_results, row_strides
from kernels.common.tiles import (
    LOG2E,
    NEG_INF,
    advance,
    check_runnable,
    dot,
    kernel,
    normalise,
    softmax_step,
    tile_pointers,
)
from kernels.common.validation import check_inputs
from kernels.contract import AttentionKernel

HEAD_DIMS = (16, 32, 64, 128, 256)


@kernel
def _forward_kernel(
    q,
    k,
    v,
    out,
    lse,
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
    scale_log2,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute out and lse of a query tile. BLOCK_OWN is a multiple of BLOCK_LOOP."""
    tiles = seqlen_q // BLOCK_OWN
    # Under a causal mask the last tiles see the most keys, so they start first.
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_OWN
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // heads_q
    head_q = head % heads_q
    head_kv = head_q // group

    cols = tl.arange(0, HEAD_DIM)
    rows = start_m + tl.arange(0, BLOCK_OWN)
    keys = tl.arange(0, BLOCK_LOOP)
    q_ptrs = tile_pointers(q + batch * stride_qb + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
    k_ptrs = tile_pointers(k + batch * stride_kb + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v + batch * stride_vb + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)
    k_step = stride_kn.to(tl.int64) * BLOCK_LOOP
    v_step = stride_vn.to(tl.int64) * BLOCK_LOOP

    # The first ``whole`` key tiles are seen by every row. A causal mask cuts the tiles from there to the last row.
    whole = (start_m if CAUSAL else seqlen_k) // BLOCK_LOOP
    tiles_k = whole + BLOCK_OWN // BLOCK_LOOP

    q_tile = tl.load(q_ptrs)
    m_i = tl.full([BLOCK_OWN], NEG_INF, tl.float32)
    l_i = tl.full([BLOCK_OWN], 0.0, tl.float32)
    acc = tl.full([BLOCK_OWN, HEAD_DIM], 0.0, tl.float32)
    for diagonal in tl.static_range(2 if CAUSAL else 1):
        for tile in range(whole if diagonal else 0, tiles_k if diagonal else whole):
            k_tile = tl.load(advance(k_ptrs, tile * k_step, ALIGNED))
            scores = dot(q_tile, tl.trans(k_tile), None, PRECISION) * scale_log2
            if diagonal:
                seen = (tile * BLOCK_LOOP + keys)[None, :] <= rows[:, None]
                scores = tl.where(seen, scores, NEG_INF)
            p, alpha, m_i, l_i = softmax_step(scores, m_i, l_i)
            v_tile = tl.load(advance(v_ptrs, tile * v_step, ALIGNED))
            acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], PRECISION)

    out_tile, lse_rows = normalise(acc, m_i, l_i)
    out_ptrs = tile_pointers(out + head * seqlen_q * HEAD_DIM, rows, HEAD_DIM, cols, ALIGNED)
    tl.store(out_ptrs, out_tile.to(out.dtype.element_ty))
    tl.store(lse + head * seqlen_q + rows, lse_rows)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Return attention of q (batch, heads_q, seqlen_q, head_dim) to k and v (batch, heads_kv, seqlen_k, head_dim).

    seqlen_q and seqlen_k are multiples of the rows of a tile, and under a causal mask both are equal; head_dim is one
    of ``HEAD_DIMS``. Other lengths and head dims raise NotImplementedError. There is no dropout, and no out_dtype.
    In all else it is ``flash_v2.forward``: what is returned, the launch settings, other errors.
    """
    chosen = Settings(**settings)
    check_inputs(q, k, v, causal, sm_scale)
    check_runnable(q)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"q: got head_dim {head_dim}, expected one of {HEAD_DIMS}")
    constants = chosen.constants(q, FORWARD_TILES)
    for name, seqlen, tile in (("q", seqlen_q, "BLOCK_OWN"), ("k", seqlen_k, "BLOCK_LOOP")):
        if seqlen % constants[tile]:
            raise NotImplementedError(
                f"{name}: got seqlen_{name} {seqlen}, expected a multiple of {constants[tile]}, the rows of a tile"
            )
    if causal and seqlen_k != seqlen_q:
        raise NotImplementedError(f"k: got seqlen_k {seqlen_k}, expected q's {seqlen_q} under a causal mask")
    out, lse = new_results(q, q.dtype)
    del constants["MASK_COLS"]
    launch(
        _forward_kernel,
        batch * heads_q * (seqlen_q // constants["BLOCK_OWN"]),
        *(q, k, v, out, lse),
        *row_strides(q, k, v),
        *(heads_q, heads_q // max(heads_kv, 1), seqlen_q, seqlen_k, sm_scale * LOG2E.value),
        CAUSAL=causal,
        ALIGNED=is_aligned(q, k, v, out),
        **constants,
    )
    return out, lse


KERNEL = AttentionKernel(
    name="flash_v2_staged",
    forward=forward,
    backward=flash_v2.backward,
    capabilities=replace(
        flash_v2.WITHOUT_EXTRAS,
        head_dims=HEAD_DIMS,
        seqlen_multiple=max(*LAUNCH["block_m"], *LAUNCH["block_n"]),
        causal_unequal_lengths=False,
    ),
)
