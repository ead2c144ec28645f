"""FlashAttention in 8-bit floating point, forward.

Jay Shah, Ganesh Bikshandi, Ying Zhang, Vijay Thakkar, Pradeep Ramani, Tri Dao, *FlashAttention-3: Fast and
Accurate Attention with Asynchrony and Low-precision* (2024), section 3.3. Inputs are quantised to e4m3 or e5m2,
both products of attention are products of 8-bit operands, softmax and sums are float32:

    s_ij = sm_scale * (a_I b_J) (q8_i . k8_j)            q_i ~ a_I q8_i,  k_j ~ b_J k8_j,  v_j ~ c_J v8_j
    P_ij = exp(s_ij - m_i)                               out_i = sum_J c_J / 2^8 (fp8(2^8 P_iJ) v8_J) / l_i

Three ways to choose the scales a, b and c:

    tensor      one scale for all rows of a head: its outliers decide what precision the rest keeps;
    block       one for each tile of q, and of k and v, which costs little as the loop walks over tiles anyway;
    hadamard    one for each tile, after incoherent processing: q and k are multiplied by the same random-sign
                Hadamard matrix M. M M^T = I, so scores stay as they are, while an outlier is spread over all
                columns of its row (Chee et al. 2023, QuIP).

Scales are powers of two, as in the OCP microscaling formats: a division by them is exact, and the cast is all
that is lost. With them a floating-point format keeps the relative precision of every entry down to 2^-13 (e4m3)
or 2^-21 (e5m2) of its block's largest, whatever the scale. Blocks help the entries below that, rotation those above.

An entry that is not finite becomes nan (e4m3 has no infinity), and takes no part in its block's scale.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.fp8_products import check_fp8, fp8_product
from kernels.common.launching import (
    check_settings,
    is_aligned,
    launch,
    new_results,
    padded_head_dim,
    remembered,
    row_strides,
)
from kernels.common.prepared import Prepared
from kernels.common.tiles import (
    LN2,
    LOG2E,
    NEG_INF,
    advance,
    check_runnable,
    columns_inside,
    kernel,
    key_range,
    load_tile,
    softmax_step,
    store_tile,
    tile_pointers,
)
from kernels.common.validation import check_inputs
from kernels.contract import AttentionKernel, Capabilities, flash_arithmetic
from reference.arithmetic import (
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    HOPPER_FP8_ROUNDOFF,
    HOPPER_FP8_TERMS,
    Arithmetic,
    Quantisation,
)

LAUNCH: Mapping[str, tuple[Any, ...]] = {
    "format": ("e4m3", "e5m2"),
    "scaling": ("tensor", "block", "hadamard"),
    "block_m": (64, 128),
    "block_n": (32, 64),
}
"""Launch settings: the 8-bit format, how scales are chosen, and rows of a block of q, and of k and v: those that
share a scale and, where it fits, a tile."""

SIGNS = tl.constexpr(int.from_bytes(hashlib.sha256(b"random signs").digest()))
"""Random signs of the Hadamard rotation: where bit j is set, column j of q and k is negated."""

TOP_EXPONENT = tl.constexpr(8)
"""The largest entry of a block is scaled to just below 2^8: neither format overflows at 2^8."""

SMALLEST_EXPONENT = tl.constexpr(-100)
"""Smallest exponent of a scale: products and reciprocals of smaller scales would leave float32."""

INFINITY_BITS = tl.constexpr(0x7F800000)
"""The bits of infinity in float32. Those of nan are larger, and those of other numbers without their sign smaller."""

P_SCALE = tl.constexpr(2.0**8)
"""P is at most 1 and multiplied by this before its cast, so that weights down to 2^-14 keep their precision in e4m3."""

FORMATS = {
    "e4m3": (torch.float8_e4m3fn, tl.float8e4nv, FLOAT8_E4M3),
    "e5m2": (torch.float8_e5m2, tl.float8e5, FLOAT8_E5M2),
}


@triton.jit
def rotated(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return a float32 tile times a random-sign Hadamard matrix, over its number of columns (incoherent processing).

    Each of the log2(COLS) steps of the fast transform takes the sum and the difference of pairs. x is divided by COLS
    first, so that no sum overflows.
    """
    cols = tl.arange(0, COLS)
    signs = tl.full([COLS], 0, tl.uint32)
    for word in tl.static_range(COLS // 32):
        signs = tl.where(cols // 32 == word, (SIGNS >> 32 * word) & 0xFFFFFFFF, signs)
    negated = (signs >> (cols % 32).to(tl.uint32)) & 1
    x = x * tl.where(negated == 1, -1.0 / COLS, 1.0 / COLS)[None, :]
    for step in tl.static_range(8):
        if 1 << step < COLS:
            pairs = tl.reshape(x, (ROWS, COLS >> step + 1, 2, 1 << step))
            # Xor of both entries of a pair gives each of them the other one, in a single exchange between threads.
            bits = pairs.to(tl.int32, bitcast=True)
            other = (tl.xor_sum(bits, 2, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
            sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, None, :, None]
            x = tl.reshape(tl.fma(pairs, sign, other), (ROWS, COLS))
    return x


@triton.jit
def largest_bits(x):
    """Return the bits of the largest entry of x by size, without its sign, as an integer.

    Integers are in the order of the positive numbers that they are the bits of, with infinity and then nan at the end.
    """
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent in float32, for an integer from -126 to 127: its bits are the biased exponent, shifted up."""
    return (exponent + 127 << 23).to(tl.float32, bitcast=True)


@triton.jit
def interleaved(n):
    """Return which row is at place n of a transposed matrix for ``fp8_gluon``, which says why.

    Of every 16 rows, place 4 t + 2 h + b has row 8 h + 2 t + b, for t up to 3, h and b 0 or 1.
    """
    return n & ~15 | (n >> 1 & 1) << 3 | (n >> 2 & 3) << 1 | n & 1


@kernel
def _quantise_kernel(
    x,
    entries,
    scales,
    largest,
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_n: tl.int64,
    heads,
    seqlen,
    head_dim,
    ROTATE: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    COLS: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise a block of rows of one head: divide it by its scale and round it, as ``quantise`` says.

    ``largest`` has the largest finite entry of each head, where all its blocks share a scale, and is None otherwise.
    """
    tiles = tl.cdiv(seqlen, BLOCK)
    tile = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)
    cols = tl.arange(0, COLS)
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    head_ptr = x + head // heads * stride_b + head % heads * stride_h
    loaded = interleaved(rows) if INTERLEAVE else rows
    x_ptrs = tile_pointers(head_ptr, loaded, stride_n, cols, ALIGNED)
    in_cols = columns_inside(cols, head_dim, x, ALIGNED)
    values = load_tile(x_ptrs, loaded < seqlen, in_cols, True, MASK_COLS).to(tl.float32)

    if ROTATE:
        values = rotated(values, BLOCK, COLS)
    top = largest_bits(values)
    if top >= INFINITY_BITS:  # Few blocks have such an entry, so the others are spared the search for it.
        values = load_tile(x_ptrs, loaded < seqlen, in_cols, True, MASK_COLS).to(tl.float32)
        kept = tl.abs(values) < float("inf")  # not so for nan either
        values = tl.where(kept, values, 0.0)
        if ROTATE:
            values = rotated(values, BLOCK, COLS)
            kept = tl.min(kept.to(tl.int32), 1, keep_dims=True) == 1
        top = largest_bits(values)
        values = tl.where(kept, values, float("nan"))
    if largest is not None:
        top = tl.load(largest + head).to(tl.int32, bitcast=True)
    # The upper bits of a normal number are its biased exponent; those of 0 and of subnormal numbers are 0.
    exponent = tl.maximum((top >> 23) - 126 - TOP_EXPONENT, SMALLEST_EXPONENT)
    values = values * power_of_two(-exponent)

    block = values.to(entries.dtype.element_ty)
    first = entries + head * tiles * BLOCK * COLS
    if TRANSPOSE:
        tl.store(tile_pointers(first, cols, tiles * BLOCK, rows, True), tl.trans(block))
    else:
        tl.store(tile_pointers(first, rows, COLS, cols, True), block)
    tl.store(scales + head * tiles + tile, power_of_two(exponent))


@dataclass(frozen=True)
class Quantiser:
    """``quantise`` for tensors that are like one another but for the numbers in them, with its launch prepared."""

    launch: Prepared
    entries: tuple[int, ...]
    scales: tuple[int, ...]
    dtype: torch.dtype
    one_scale: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries and the scales of x."""
        entries = torch.empty(self.entries, dtype=self.dtype, device=x.device)
        scales = torch.empty(self.scales, dtype=torch.float32, device=x.device)
        largest = None
        if self.one_scale:
            largest = x.nan_to_num(0.0, 0.0, 0.0).abs().amax((2, 3)).float()
        self.launch(x, entries, scales, largest)
        return entries, scales


def quantiser(
    x: Tensor,
    block: int,
    scaling: str,
    dtype: torch.dtype,
    *,
    rotate: bool = False,
    transpose: bool = False,
    interleave: bool = False,
) -> Quantiser:
    """Return what quantises tensors like x, with the arguments of ``quantise``."""
    batch, heads, seqlen, head_dim = x.shape
    columns = columns_of(head_dim)
    tiles = math.ceil(seqlen / block)
    launch = Prepared(
        _quantise_kernel,
        batch * heads * tiles,
        [None] * 4,  # x, entries, scales, largest
        *(*row_strides(x), heads, seqlen, head_dim),
        ROTATE=rotate,
        TRANSPOSE=transpose,
        INTERLEAVE=interleave,
        COLS=columns,
        MASK_COLS=columns != head_dim,
        ALIGNED=is_aligned(x),
        BLOCK=block,
        num_warps=max(1, block * columns // 2048),  # 64 entries for a thread
    )
    shape = (columns, tiles * block) if transpose else (tiles * block, columns)
    one_scale = scaling == "tensor" and seqlen > 0
    return Quantiser(launch, (batch, heads, *shape), (batch, heads, tiles), dtype, one_scale)


def quantise(x: Tensor, block: int, scaling: str, dtype: torch.dtype, **how: bool) -> tuple[Tensor, Tensor]:
    """Round x (batch, heads, seqlen, head_dim) to the 8-bit ``dtype``, ``block`` rows at a time.

    Returns the entries, (batch, heads, tiles * block, columns) with zeros past the edges of x, or with its last two
    dimensions swapped if ``transpose``, and the scales, (batch, heads, tiles) float32, by which they are to be
    multiplied. With ``interleave``, rows are in the order of ``interleaved``.
    """
    return _remembered_quantiser(x, block, scaling, dtype, **how)(x)


_remembered_quantiser = remembered(quantiser)


def columns_of(head_dim: int) -> int:
    """Return the columns of a tile: products of 8-bit operands sum over at least 32."""
    return max(32, padded_head_dim(head_dim))


@kernel
def _forward_kernel(
    q,
    k,
    v,
    q_scale,
    k_scale,
    v_scale,
    out,
    lse,
    group,
    seqlen_q,
    seqlen_k,
    head_dim,
    scale_log2,
    FORMAT: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_M: tl.constexpr,
    SCALE_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute out and lse of a query tile, looping over key tiles.

    q, k and v are what ``quantise`` returned, in blocks of SCALE_M rows of q and SCALE_N of k and v, so tiles
    are whole. v is transposed, since fp8 tensor cores need the dimension that is summed over to be contiguous.
    """
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    # Under a causal mask the last tiles see the most keys, so they start first.
    start_m = (tiles_m - 1 - tl.program_id(0) % tiles_m) * BLOCK_M
    head = (tl.program_id(0) // tiles_m).to(tl.int64)
    head_kv = head // group
    scales_m = tl.cdiv(seqlen_q, SCALE_M)
    scales_n = tl.cdiv(seqlen_k, SCALE_N)
    padded_k = scales_n * SCALE_N

    cols = tl.arange(0, HEAD_DIM)
    rows = start_m + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    q_ptrs = tile_pointers(q + head * (scales_m * SCALE_M) * HEAD_DIM, rows, HEAD_DIM, cols, True)
    k_ptrs = tile_pointers(k + head_kv * padded_k * HEAD_DIM, keys, HEAD_DIM, cols, True)
    v_ptrs = tile_pointers(v + head_kv * padded_k * HEAD_DIM, cols, padded_k, keys, True)
    k_step = tl.full([], BLOCK_N * HEAD_DIM, tl.int64)

    last_key, whole, tiles_k = key_range(start_m, rows, seqlen_q, seqlen_k, CAUSAL, BLOCK_M, BLOCK_N)

    q_tile = tl.load(q_ptrs)
    q_unit = tl.load(q_scale + head * scales_m + start_m // SCALE_M)
    m_i = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, HEAD_DIM], 0.0, tl.float32)
    for cut in tl.static_range(2):
        for tile in range(whole if cut else 0, tiles_k if cut else whole):
            k_tile = tl.load(advance(k_ptrs, tile * k_step, True))
            k_unit = tl.load(k_scale + head_kv * scales_n + tile * BLOCK_N // SCALE_N)
            # Multiply by the smaller scale first: the product of two large ones may overflow where the score does not.
            scores = fp8_product(q_tile, tl.trans(k_tile)) * tl.minimum(q_unit, k_unit)
            scores = scores * (tl.maximum(q_unit, k_unit) * scale_log2)
            if cut:
                seen = keys[None, :] <= (last_key - tile * BLOCK_N)[:, None]
                scores = tl.where(seen, scores, NEG_INF)
            p, alpha, m_i, l_i = softmax_step(scores, m_i, l_i)
            v_tile = tl.load(advance(v_ptrs, tile * BLOCK_N, True))
            v_unit = tl.load(v_scale + head_kv * scales_n + tile * BLOCK_N // SCALE_N) / P_SCALE
            p8 = (p * P_SCALE).to(FORMAT)
            acc = acc * alpha[:, None] + fp8_product(p8, tl.trans(v_tile)) * v_unit

    # A row that sees no key has m_i = -inf and l_i = 0: out is 0 and lse -inf.
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    out_ptrs = tile_pointers(out + head * seqlen_q * head_dim, rows, head_dim, cols, ALIGNED)
    in_rows = rows < seqlen_q
    store_tile(out_ptrs, acc / l_i[:, None], in_rows, cols < head_dim, MASK_COLS)
    tl.store(lse + head * seqlen_q + rows, (m_i + tl.log2(l_i)) * LN2, mask=in_rows)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    format: str = "e4m3",  # noqa: A002  # the contract's launch settings are keywords
    scaling: str = "hadamard",
    block_m: int = 128,
    block_n: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, with the arguments, results and errors of ``flash_v2.forward``.

    q, k and v are quantised here. There is no dropout, no window and no out_dtype. ``LAUNCH`` has the launch settings.
    A GPU without fp8 tensor cores raises NotImplementedError.
    """
    check_settings({"format": format, "scaling": scaling, "block_m": block_m, "block_n": block_n}, LAUNCH)
    check_inputs(q, k, v, causal, sm_scale)
    check_runnable(q)
    check_fp8(q)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    padded = columns_of(head_dim)
    dtype, triton_format, _ = FORMATS[format]
    rotate = scaling == "hadamard"
    q8, q_scale = quantise(q, block_m, scaling, dtype, rotate=rotate)
    k8, k_scale = quantise(k, block_n, scaling, dtype, rotate=rotate)
    v8, v_scale = quantise(v, block_n, scaling, dtype, transpose=True)
    # q and k were multiplied by M / columns instead of M / sqrt(columns).
    unit = sm_scale * padded if rotate else sm_scale
    # Registers hold the sum over tiles, that of one tile, and that of one instruction.
    rows = block_m if padded <= 64 else 64
    keys = block_n if padded <= 128 else 32
    out, lse = new_results(q, q.dtype)
    launch(
        _forward_kernel,
        batch * heads_q * math.ceil(seqlen_q / rows),
        *(q8, k8, v8, q_scale, k_scale, v_scale, out, lse),
        *(heads_q // max(heads_kv, 1), seqlen_q, seqlen_k, head_dim, unit * LOG2E.value),
        FORMAT=triton_format,
        CAUSAL=causal,
        HEAD_DIM=padded,
        MASK_COLS=padded != head_dim,
        ALIGNED=is_aligned(out),
        SCALE_M=block_m,
        SCALE_N=block_n,
        BLOCK_M=rows,
        BLOCK_N=keys,
        num_warps=4 if rows == 64 and padded <= 64 else 8,
        num_stages=2,
    )
    return out, lse


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    """Return the arithmetic of 8-bit operands and P, on a GPU with the sums of Hopper, whose error is the largest."""
    _, _, to = FORMATS[launch.get("format", "e4m3")]
    scaling, block_n = launch.get("scaling", "hadamard"), launch.get("block_n", 64)
    arithmetic = replace(
        flash_arithmetic(dtype, device, launch),
        weights=to.scaled(P_SCALE.value),
        operand_rounding=0.0,
        tile_max=block_n,
        quantisation=Quantisation(
            format=to,
            block_q=None if scaling == "tensor" else launch.get("block_m", 128),
            block_k=None if scaling == "tensor" else block_n,
            rotation=SIGNS.value if scaling == "hadamard" else None,
        ),
    )
    if device == "cpu":
        return arithmetic
    smallest_normal = to.underflow / to.roundoff
    return replace(
        arithmetic,
        accumulate=HOPPER_FP8_ROUNDOFF,
        accumulate_terms=HOPPER_FP8_TERMS,
        smallest_operand=smallest_normal,
    )


KERNEL = AttentionKernel(
    name="fp8",
    forward=forward,
    capabilities=Capabilities(
        head_dims=tuple(range(1, 257)),
        backward=False,
        deterministic=("out", "lse"),
        launch=LAUNCH,
        arithmetic=_arithmetic,
    ),
)
