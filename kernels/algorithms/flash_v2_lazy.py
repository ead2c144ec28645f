"""FlashAttention-4's softmax in plain Triton: the accumulator is rescaled only where it has to be.

Ted Zadouri et al., *FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for Asymmetric Hardware Scaling*
(2026, arXiv 2603.05451), conditional rescaling, in the forward pass of ``flash_v2``. There the weights of a
row are relative to the running maximum, and whenever a tile of keys raises it, what has been summed is brought to the
new one. Any other reference m would do, because it cancels in acc / l and in m + log l. Here m stays while no score
lies above it by more than LAG, in base 2. A tile in which the row has the scores S_j takes

    m' = m if max S_j - m <= LAG, else max S_j        P_j = 2^(S_j - m')
    l' = 2^(m - m') l + sum_j P_j                     acc' = 2^(m - m') acc + sum_j P_j v_j

If m stays, the factor is exactly 1. Scores rarely grow by more than LAG after the first tile, so nearly all products of
the factor with acc, BLOCK_OWN x HEAD_DIM in each tile, can be left out.

*Each row decides for itself whether its m moves, and all rows of a tile together whether acc is multiplied.* If one row
moved the m of the others, their bits would depend on what else is in the tile, which ``batch_invariant`` denies. The
branch around the product changes no bit, because the factor of a row that stays is 1. Triton's branches are taken by
all threads of a program together; FlashAttention-4 asks the rows of one warp only.

*Numbers.* P is at most 2^LAG = 256, where it is at most 1 in ``flash_v2``:

- Its cast to float16 cannot overflow, as 65504 is far. Its relative error is the same, and it loses no more to
  subnormals: m is no larger than the running maximum, so P is no smaller than it is there.
- l is at least 1, since the score that m was taken from counts 1, and at most 256 seqlen_k. Its logarithm is larger by
  up to 8, and so is the error of that, which is relative.
- acc is at most 256 seqlen_k max |v|. With bfloat16 or float32 it overflows for a v that is 256 times smaller.
- Where S_j exceeds m, the rounding of S_j - m grows with P_j, rather than shrink as P_j does below m.

``Arithmetic.largest_weight`` declares this; ``reference.bounds.forward`` derives what it adds to the bounds.

The backward pass is that of ``flash_v2``: it takes out and lse, in which m has cancelled. Dropout, windows and
out_dtype are left to that kernel.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.algorithms import flash_v2
from kernels.algorithms.flash_v2.settings import FORWARD_TILES, Settings
from kernels.common.launching import is_aligned, launch, new_results, row_strides
from kernels.common.tiles import (
    LOG2E,
    NEG_INF,
    advance,
    check_runnable,
    columns_inside,
    dot,
    kernel,
    key_range,
    load_tile,
    normalise,
    store_tile,
    tile_pointers,
)
from kernels.common.validation import check_inputs
from kernels.contract import AttentionKernel
from reference.arithmetic import Arithmetic

LAG = tl.constexpr(8)
"""How far a score may lie above its row's reference, in base 2: FlashAttention-4's log2(256)."""


@triton.jit
def lazy_softmax_step(scores, m_i, l_i):
    """Take one step of the online softmax in base 2, in which a row's reference m_i moves only if it has to.

    scores (rows, keys) is -inf where a key is not seen. m_i (rows,) is -inf until a row sees a key; l_i (rows,) is the
    sum of the weights relative to m_i. Returns the weights relative to the new m_i; which rows moved; the factor that
    brings earlier weights to the new m_i, which is exactly 1 in all other rows; the new m_i and the new l_i.
    """
    top = tl.maximum(m_i, tl.max(scores, 1))
    # The distance is inf from a reference of -inf. It is nan where both are -inf, or both inf; such a row moves too, as
    # no comparison with nan is true.
    stays = top - m_i <= LAG
    m_new = tl.where(stays, m_i, top)
    # A row that has seen no key yet stays at -inf, and -inf - -inf is nan.
    shift = tl.where(m_new == NEG_INF, 0.0, m_new)
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    return p, ~stays, alpha, m_new, l_i * alpha + tl.sum(p, 1)


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
    head_dim,
    scale_log2,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute out and lse of a query tile, looping over key tiles as ``flash_v2`` does."""
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
    k_step = stride_kn.to(tl.int64) * BLOCK_LOOP
    v_step = stride_vn.to(tl.int64) * BLOCK_LOOP
    last_key, whole, tiles_k = key_range(start_m, rows, seqlen_q, seqlen_k, CAUSAL, BLOCK_OWN, BLOCK_LOOP)

    q_tile = load_tile(q_ptrs, in_rows, in_cols, True, MASK_COLS)
    m_i = tl.full([BLOCK_OWN], NEG_INF, tl.float32)
    l_i = tl.full([BLOCK_OWN], 0.0, tl.float32)
    acc = tl.full([BLOCK_OWN, HEAD_DIM], 0.0, tl.float32)
    for cut in tl.static_range(2):
        for tile in range(whole if cut else 0, tiles_k if cut else whole):
            start_n = tile * BLOCK_LOOP
            in_tile = keys < seqlen_k - start_n
            k_tile = load_tile(advance(k_ptrs, tile * k_step, ALIGNED), in_tile, in_cols, cut, MASK_COLS)
            scores = dot(q_tile, tl.trans(k_tile), None, PRECISION) * scale_log2
            if cut:
                scores = tl.where(keys[None, :] <= (last_key - start_n)[:, None], scores, NEG_INF)
            p, moved, alpha, m_i, l_i = lazy_softmax_step(scores, m_i, l_i)
            if tl.max(moved.to(tl.int32), 0) > 0:
                acc *= alpha[:, None]
            v_tile = load_tile(advance(v_ptrs, tile * v_step, ALIGNED), in_tile, in_cols, cut, MASK_COLS)
            acc = dot(p.to(v_tile.dtype), v_tile, acc, PRECISION)

    out_tile, lse_rows = normalise(acc, m_i, l_i)
    out_ptrs = tile_pointers(out + head * seqlen_q * head_dim, rows, head_dim, cols, ALIGNED)
    store_tile(out_ptrs, out_tile, in_rows, in_cols, MASK_COLS)
    tl.store(lse + head * seqlen_q + rows, lse_rows, mask=in_rows)


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

    Arguments, results, launch settings and errors are those of ``flash_v2.forward``, except that there is no
    dropout, no window and no out_dtype.
    """
    chosen = Settings(**settings)
    check_inputs(q, k, v, causal, sm_scale)
    check_runnable(q)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    out, lse = new_results(q, q.dtype)
    constants = chosen.constants(q, FORWARD_TILES)
    launch(
        _forward_kernel,
        batch * heads_q * math.ceil(seqlen_q / constants["BLOCK_OWN"]),
        *(q, k, v, out, lse),
        *row_strides(q, k, v),
        *(heads_q, heads_q // max(heads_kv, 1), seqlen_q, seqlen_k, head_dim, sm_scale * LOG2E.value),
        CAUSAL=causal,
        ALIGNED=is_aligned(q, k, v, out),
        **constants,
    )
    return out, lse


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    return replace(
        flash_v2.KERNEL.capabilities.arithmetic(dtype, device, launch), largest_weight=2**LAG.value
    )


KERNEL = AttentionKernel(
    name="flash_v2_lazy",
    forward=forward,
    backward=flash_v2.backward,
    capabilities=replace(flash_v2.WITHOUT_EXTRAS, arithmetic=_arithmetic),
)
