"""FlashAttention-3's plain form in Triton: tensor descriptors, and warps specialised by the compiler.

Jay Shah et al., *FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision* (2024),
section 3.1 and algorithm 1, for float16 and bfloat16. What is computed is FlashAttention-2 (see ``flash_v2``).
New is that tiles are copied by a unit of its own, the TMA, from tensors that descriptors describe, and that
``warp_specialize`` has the compiler give the copies and the products to warps of their own. It only does so for
a single loop without branches, so all tiles go through the mask, even those that no edge cuts.

Elsewhere than on Hopper and Blackwell descriptors become plain loads, and at head_dim 128 the tiles that are the
default, which are meant for Hopper, spill registers: block_n 64 does not. ``flash_v3_gluon`` says by itself which
warps do what, and overlaps more. The backward pass is that of FlashAttention-2.

Specialisation is off by default, and no property draws it. On an H200 with Triton 3.6.0 the first form of this
kernel gave wrong and irreproducible results with it, for the reason that ``_forward_kernel`` gives at ``copied_m``. The
present form answered nine shapes right there, five times with the same bits, at all tiles but 64 x 64; at the default
ones it took 13 to 24 % less time than without. A pipeline of three stages would make it wrong again.
"""

import contextvars
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.algorithms.flash_v2 import backward as flash_v2_backward
from kernels.common.autograd import attention
from kernels.common.launching import check_settings, launch, new_results, padded_head_dim, row_strides
from kernels.common.tiles import LN2, LOG2E, NEG_INF, check_runnable, dot, kernel, key_range, softmax_step
from kernels.common.validation import COPYABLE, check_copyable, check_inputs, default_scale
from kernels.contract import AttentionKernel, Capabilities, Launch, flash_arithmetic
from reference.arithmetic import Arithmetic


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
    WARP_SPECIALIZE: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
):
    """Compute out and lse of a query tile, looping over key tiles (algorithm 1)."""
    tiles = tl.cdiv(seqlen_q, BLOCK_OWN)
    # Under a causal mask the last tiles see the most keys, so they start first.
    end_m = (tiles - tl.program_id(0) % tiles) * BLOCK_OWN
    start_m = end_m - BLOCK_OWN
    # The copies use the same number, computed a second time. With specialised warps, two parts take half of the tile
    # each; for the second half, Triton 3.6 to 3.9 adds its first row to the row that is copied wherever that value is
    # used elsewhere too. ``rows`` of the second half start there already, so it would be added twice.
    copied_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_OWN
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // heads_q
    head_q = head % heads_q
    head_kv = head_q // group

    # One descriptor for each head: beyond its last row loads give 0, not the next head's rows.
    q_tiles = tl.make_tensor_descriptor(
        q + batch * stride_qb + head_q * stride_qh,
        [seqlen_q, head_dim],
        [stride_qm.to(tl.int64), 1],
        [BLOCK_OWN, HEAD_DIM],
    )
    k_tiles = tl.make_tensor_descriptor(
        k + batch * stride_kb + head_kv * stride_kh,
        [seqlen_k, head_dim],
        [stride_kn.to(tl.int64), 1],
        [BLOCK_LOOP, HEAD_DIM],
    )
    v_tiles = tl.make_tensor_descriptor(
        v + batch * stride_vb + head_kv * stride_vh,
        [seqlen_k, head_dim],
        [stride_vn.to(tl.int64), 1],
        [BLOCK_LOOP, HEAD_DIM],
    )
    out_tiles = tl.make_tensor_descriptor(
        out + head * seqlen_q * head_dim,
        [seqlen_q, head_dim],
        [tl.full([], 1, tl.int64) * head_dim, 1],
        [BLOCK_OWN, HEAD_DIM],
    )
    rows = start_m + tl.arange(0, BLOCK_OWN)
    keys = tl.arange(0, BLOCK_LOOP)
    last_key, _, tiles_k = key_range(start_m, rows, seqlen_q, seqlen_k, CAUSAL, BLOCK_OWN, BLOCK_LOOP)

    q_tile = q_tiles.load([copied_m, 0])
    m_i = tl.full([BLOCK_OWN], NEG_INF, tl.float32)
    l_i = tl.full([BLOCK_OWN], 0.0, tl.float32)
    acc = tl.full([BLOCK_OWN, HEAD_DIM], 0.0, tl.float32)
    for tile in tl.range(0, tiles_k, warp_specialize=WARP_SPECIALIZE):
        start_n = tile * BLOCK_LOOP
        k_tile = k_tiles.load([start_n, 0])
        scores = dot(q_tile, tl.trans(k_tile), None, "ieee") * scale_log2
        scores = tl.where(keys[None, :] <= (last_key - start_n)[:, None], scores, NEG_INF)
        p, alpha, m_i, l_i = softmax_step(scores, m_i, l_i)
        v_tile = v_tiles.load([start_n, 0])
        acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], "ieee")

    # A row that sees no key has m_i = -inf and l_i = 0: out is 0 and lse -inf.
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    out_tiles.store([copied_m, 0], (acc / l_i[:, None]).to(out.dtype.element_ty))
    tl.store(lse + head * seqlen_q + rows, (m_i + tl.log2(l_i)) * LN2, mask=rows < seqlen_q)


LAUNCH: Mapping[str, tuple[Any, ...]] = {
    "block_m": (64, 128),
    "block_n": (64, 128),
    "warp_specialize": (False,),
}
"""Launch settings that are verified: rows of a query tile and of a key tile, and whether warps are specialised."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    block_m: int = 128,
    block_n: int = 128,
    warp_specialize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, with the arguments, results and errors of ``flash_v2.forward``.

    There is no dropout, no window and no out_dtype. Inputs are float16 or bfloat16, head_dim is a multiple of 8 up to
    128, and storage starts and strides are multiples of 16 bytes, which is what the TMA can copy; anything else raises
    NotImplementedError. ``LAUNCH`` has the launch settings; warp_specialize may be True as well.
    """
    _check_settings(block_m, block_n, warp_specialize)
    check_inputs(q, k, v, causal, sm_scale)
    check_copyable(HEAD_DIMS, q=q, k=k, v=v)
    check_runnable(q)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    out, lse = new_results(q, q.dtype)
    contextvars.copy_context().run(
        _launch_with_memory,
        batch * heads_q * math.ceil(seqlen_q / block_m),
        *(q, k, v, out, lse),
        *row_strides(q, k, v),
        *(heads_q, heads_q // max(heads_kv, 1), seqlen_q, seqlen_k, head_dim, sm_scale * LOG2E.value),
        CAUSAL=causal,
        HEAD_DIM=padded_head_dim(head_dim),
        WARP_SPECIALIZE=warp_specialize,
        BLOCK_OWN=block_m,
        BLOCK_LOOP=block_n,
        # With specialised warps, these are the warps of one part; the compiler adds those of the others.
        num_warps=4 if warp_specialize or block_m == 64 else 8,
        num_stages=2,
    )
    return out, lse


def _launch_with_memory(programs: int, *arguments: Any, **constants: Any) -> None:
    """Call ``launch`` in a context of its own, in which Triton is given memory for the descriptors."""
    device = arguments[0].device
    triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device=device))
    launch(_forward_kernel, programs, *arguments, **constants)


def _check_settings(block_m: int, block_n: int, warp_specialize: bool) -> None:
    check_settings(
        {"block_m": block_m, "block_n": block_n, "warp_specialize": warp_specialize},
        {**LAUNCH, "warp_specialize": (False, True)},
    )


HEAD_DIMS = tuple(range(8, 129, 8))


def flash_v3(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, sm_scale: float | None = None, **launch: Any
) -> tuple[Tensor, Tensor]:
    """Call ``forward``, differentiable in q, k and v through ``flash_v2.backward``; lse has no gradient.

    sm_scale is 1 / sqrt(head_dim) unless given; ``launch`` takes settings of ``LAUNCH``.
    """
    sm_scale = default_scale(q) if sm_scale is None else sm_scale
    out, lse = attention(KERNEL, q, k, v, causal=causal, sm_scale=sm_scale, **launch)
    return out, lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    block_m: int = 128,
    block_n: int = 128,
    warp_specialize: bool = False,
) -> tuple[Tensor, ...]:
    """Call ``flash_v2.backward`` without the forward's launch settings, as it has its own."""
    _check_settings(block_m, block_n, warp_specialize)
    check_inputs(q, k, v, causal, sm_scale)
    check_copyable(HEAD_DIMS, q=q, k=k, v=v)
    return flash_v2_backward(dout, q, k, v, out, lse, causal=causal, sm_scale=sm_scale)


def _arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    return replace(flash_arithmetic(dtype, device, launch), tile_max=launch.get("block_n", 128))


KERNEL = AttentionKernel(
    name="flash_v3",
    forward=forward,
    backward=_backward,
    capabilities=Capabilities(
        dtypes=("float16", "bfloat16"),
        head_dims=HEAD_DIMS,
        layouts=COPYABLE,
        batch_invariant=True,
        launch=LAUNCH,
        arithmetic=_arithmetic,
    ),
)
