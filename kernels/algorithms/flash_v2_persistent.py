"""FlashAttention-2's forward pass by a fixed number of programs, with its accumulator in column slices.

This is Dao 2023, algorithm 1, as in ``flash_v2``, with three changes that kernels for recent GPUs make:

*Persistent programs* (FlashAttention-3, Shah et al. 2024, section 3.1; Triton's tutorial 09). A launch has as
many programs as the GPU has multiprocessors, whatever the shape. Task t, a query tile of one head, is done by
program t modulo their number. Under a causal mask the tasks that see the most keys come first, of all heads, so
that what is left for the end is short.

*Column slices.* The product of P and v, and the accumulator with it, is made in slices of ``block_d`` columns:
no more than one slice of v is held at a time, which at a head_dim of 256 is what keeps a kernel small.

*v in fp8.* With ``v_dtype="float8_e5m2"``, v and P are rounded to e5m2 for their product, on tensor cores that
are faster at it; scores are computed as ever. Nothing is scaled: values of v beyond 57344 become 57344. Values of v
below 2^-14, and weights that small beside their row's largest, lose most of their precision.

Forward only. out and lse are what ``flash_v2.backward`` takes, but with v in fp8 the gradients that it gives are those
for the unrounded v, which differ a little.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.algorithms import flash_v2
from kernels.algorithms.flash_v2.settings import Settings
from kernels.common.fp8_products import check_fp8, fp8_product
from kernels.common.launching import (
    check_settings,
    is_aligned,
    launch,
    multiprocessors,
    new_results,
    row_strides,
)
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
    softmax_step,
    store_tile,
    tile_pointers,
)
from kernels.common.validation import check_inputs
from kernels.contract import AttentionKernel, Capabilities
from reference.arithmetic import (
    FLOAT8_E5M2,
    FP32_ROUNDOFF,
    HOPPER_FP8_ROUNDOFF,
    HOPPER_FP8_TERMS,
    Arithmetic,
    Quantisation,
)


def to_e5m2(v: Tensor) -> Tensor:
    """Round to the nearest e5m2 number, ties to even; finite values beyond the largest e5m2 number become that."""
    limited = v.clamp(-FLOAT8_E5M2.maximum, FLOAT8_E5M2.maximum)
    return torch.where(v.isinf(), v, limited).to(torch.float8_e5m2)


@triton.jit
def append(tiles, tile):
    """Return the tuple ``tiles`` with ``tile`` appended."""
    return tiles + (tile,)  # noqa: RUF005 Triton's compiler does not unpack


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
    heads,
    heads_q,
    group,
    seqlen_q,
    seqlen_k,
    head_dim,
    scale_log2,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLICE: tl.constexpr,
    E5M2: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute out and lse of the query tiles that are this program's tasks; ``heads`` counts all of the batch."""
    SLICES: tl.constexpr = HEAD_DIM // SLICE
    tiles = tl.cdiv(seqlen_q, BLOCK_OWN)
    cols = tl.arange(0, HEAD_DIM)
    slice_cols = tl.arange(0, SLICE)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    keys = tl.arange(0, BLOCK_LOOP)
    k_step = stride_kn.to(tl.int64) * BLOCK_LOOP
    v_step = stride_vn.to(tl.int64) * BLOCK_LOOP

    # If what the tasks have in common were hoisted out of this loop, it would take registers that spill.
    for task in tl.range(tl.program_id(0), heads * tiles, tl.num_programs(0), disable_licm=True):
        start_m = (tiles - 1 - task // heads) * BLOCK_OWN
        head = (task % heads).to(tl.int64)
        batch = head // heads_q
        head_q = head % heads_q
        head_kv = head_q // group
        rows = start_m + tl.arange(0, BLOCK_OWN)
        in_rows = rows < seqlen_q
        q_ptrs = tile_pointers(q + batch * stride_qb + head_q * stride_qh, rows, stride_qm, cols, ALIGNED)
        k_ptrs = tile_pointers(k + batch * stride_kb + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)
        v_base = v + batch * stride_vb + head_kv * stride_vh
        v_ptrs = tile_pointers(v_base, keys, stride_vn, slice_cols, ALIGNED)
        last_key, whole, tiles_k = key_range(start_m, rows, seqlen_q, seqlen_k, CAUSAL, BLOCK_OWN, BLOCK_LOOP)

        q_tile = load_tile(q_ptrs, in_rows, in_cols, True, MASK_COLS)
        m_i = tl.full([BLOCK_OWN], NEG_INF, tl.float32)
        l_i = tl.full([BLOCK_OWN], 0.0, tl.float32)
        acc = ()
        for _ in tl.static_range(SLICES):
            acc = append(acc, tl.full([BLOCK_OWN, SLICE], 0.0, tl.float32))
        for cut in tl.static_range(2):
            for tile in range(whole if cut else 0, tiles_k if cut else whole):
                start_n = tile * BLOCK_LOOP
                in_tile = keys < seqlen_k - start_n
                k_tile = load_tile(advance(k_ptrs, tile * k_step, ALIGNED), in_tile, in_cols, cut, MASK_COLS)
                scores = dot(q_tile, tl.trans(k_tile), None, PRECISION) * scale_log2
                if cut:
                    seen = keys[None, :] <= (last_key - start_n)[:, None]
                    scores = tl.where(seen, scores, NEG_INF)
                p, alpha, m_i, l_i = softmax_step(scores, m_i, l_i)
                p = p.to(tl.float8e5 if E5M2 else v.dtype.element_ty)
                updated = ()
                for index in tl.static_range(SLICES):
                    in_slice = columns_inside(index * SLICE + slice_cols, head_dim, v, ALIGNED)
                    slice_ptrs = advance(v_ptrs, tile * v_step + index * SLICE, ALIGNED)
                    v_slice = load_tile(slice_ptrs, in_tile, in_slice, cut, MASK_COLS)
                    scaled = acc[index] * alpha[:, None]
                    if E5M2:
                        updated = append(updated, scaled + fp8_product(p, v_slice))
                    else:
                        updated = append(updated, dot(p, v_slice, scaled, PRECISION))
                acc = updated

        out_ptrs = tile_pointers(out + head * seqlen_q * head_dim, rows, head_dim, slice_cols, ALIGNED)
        for index in tl.static_range(SLICES):
            in_slice = columns_inside(index * SLICE + slice_cols, head_dim, out, ALIGNED)
            slice_ptrs = advance(out_ptrs, index * SLICE, ALIGNED)
            out_slice, lse_rows = normalise(acc[index], m_i, l_i)
            store_tile(slice_ptrs, out_slice, in_rows, in_slice, MASK_COLS)
        tl.store(lse + head * seqlen_q + rows, lse_rows, mask=in_rows)


LAUNCH: Mapping[str, tuple[Any, ...]] = {
    "block_m": (128, 64),
    "block_n": (64, 32),
    "block_d": (128, 64),
    "num_stages": (2, 1),
    "precision": ("ieee", "tf32"),
    "programs": (None, 1, 5),
    "v_dtype": ("input", "float8_e5m2"),
}
"""Launch settings that are verified. ``forward`` says which others it takes."""

TILES = {256: (128, 32), 512: (64, 32), 1024: (32, 32)}
"""Largest (BLOCK_OWN, BLOCK_LOOP) by bytes in a row, as in ``flash_v2``."""

BLOCKS = (16, 32, 64, 128, 256)
PROGRAMS_INTERPRETED = 2


@dataclass(frozen=True)
class _Settings(Settings):
    """Launch settings, checked: those of ``flash_v2`` with any block size, and those of this kernel."""

    block_m: int = 128
    num_stages: int = 2
    block_d: int = 128
    programs: int | None = None
    v_dtype: str = "input"

    def __post_init__(self) -> None:
        blocks = dict.fromkeys(("block_m", "block_n", "block_d"), BLOCKS)
        check_settings(vars(self), {**LAUNCH, **blocks, "programs": (self.programs,)})
        if self.programs is not None and (not isinstance(self.programs, int) or self.programs < 1):
            raise ValueError(f"programs: got {self.programs!r}, expected a positive integer or None")

    @property
    def e5m2(self) -> bool:
        """Whether v and P are rounded to e5m2 for their product."""
        return self.v_dtype == "float8_e5m2"

    def constants(self, q: Tensor, tiles: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
        """Return the constants of ``flash_v2``, the columns of a slice, and whether v is in e5m2."""
        constants = super().constants(q, tiles)
        if self.e5m2:  # products of 8-bit operands sum over 32 keys at least
            constants["BLOCK_LOOP"] = max(constants["BLOCK_LOOP"], 32)
        return {**constants, "SLICE": min(self.block_d, constants["HEAD_DIM"]), "E5M2": self.e5m2}


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

    Arguments, results and errors are those of ``flash_v2.forward``, except that there is no dropout and no
    out_dtype, and for the launch settings. block_m queries, block_n keys and slices of block_d columns are any of
    ``BLOCKS``, cut down where they would not fit. programs is any positive number, None being one for each
    multiprocessor (in the interpreter, PROGRAMS_INTERPRETED). v_dtype is what v and P are rounded to for their
    product: ``float8_e5m2`` or, as in ``flash_v2``, ``input``. Raises NotImplementedError for ``float8_e5m2`` on a
    GPU that has no products of it.
    """
    chosen = _Settings(**settings)
    check_inputs(q, k, v, causal, sm_scale)
    check_runnable(q)
    if chosen.e5m2:
        check_fp8(q)
        v = to_e5m2(v)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    out, lse = new_results(q, q.dtype)
    constants = chosen.constants(q, TILES)
    tasks = batch * heads_q * math.ceil(seqlen_q / constants["BLOCK_OWN"])
    launch(
        _forward_kernel,
        min(tasks, chosen.programs or _multiprocessors(q)),
        *(q, k, v, out, lse),
        *row_strides(q, k, v),
        *(batch * heads_q, heads_q, heads_q // max(heads_kv, 1), seqlen_q, seqlen_k, head_dim),
        sm_scale * LOG2E.value,
        CAUSAL=causal,
        ALIGNED=is_aligned(q, k, v, out),
        **constants,
    )
    return out, lse


def _multiprocessors(q: Tensor) -> int:
    if q.device.type == "cpu":
        return PROGRAMS_INTERPRETED
    return multiprocessors(q.device)


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    """Return FlashAttention-2's arithmetic, with P in e5m2 and Hopper's sums of 8-bit products where v is in e5m2."""
    arithmetic = flash_v2.KERNEL.capabilities.arithmetic(dtype, device, launch)
    if launch.get("v_dtype", "input") == "input":
        return arithmetic
    arithmetic = replace(
        arithmetic, weights=FLOAT8_E5M2, quantisation=Quantisation(format=FLOAT8_E5M2, only_v=True)
    )
    if device == "cpu":
        return arithmetic
    return replace(
        arithmetic,
        accumulate=HOPPER_FP8_ROUNDOFF,
        # Tiles of less than 64 rows have no instruction whose sums of 32 could be told to end there.
        accumulate_terms=max(HOPPER_FP8_TERMS, launch.get("block_n", 64)),
        score_accumulate=FP32_ROUNDOFF,
    )


KERNEL = AttentionKernel(
    name="flash_v2_persistent",
    forward=forward,
    capabilities=Capabilities(
        head_dims=tuple(range(1, 257)),
        backward=False,
        deterministic=("out", "lse"),
        batch_invariant=True,
        launch=LAUNCH,
        arithmetic=_arithmetic,
    ),
)
