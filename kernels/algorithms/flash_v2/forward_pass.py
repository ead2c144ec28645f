"""FlashAttention-2's forward pass: out and lse of a query tile (algorithm 1)."""

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.algorithms.flash_v2.settings import (
    DQ_TILES,
    FORWARD_TILES,
    Settings,
    forward_on_hopper,
    is_tuned_for_hopper,
)
from kernels.common.launching import (
    bias_strides,
    dropout_arguments,
    is_aligned,
    new_results,
    remembered,
    row_strides,
)
from kernels.common.prepared import Prepared
from kernels.common.tiles import (
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
    seen_range,
    soft_capped,
    softmax_step,
    store_tile,
    tile_pointers,
)
from kernels.common.validation import (
    check_bias,
    check_dropout,
    check_inputs,
    check_of_heads,
    check_sizes,
    check_softcap,
    check_stored_dtype,
)


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
    if default_tile and is_tuned_for_hopper(q, dropout_p, window, softcap, alibi_slopes, sinks, bias):
        constants |= forward_on_hopper(constants["HEAD_DIM"], causal, aligned, chosen.num_stages)
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
