"""FlashAttention-3's backward pass as it was published, for Hopper in Gluon: one kernel, dq by atomic adds.

Jay Shah et al., *FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision* (2024),
algorithm 3, for float16 and bfloat16. A program owns a tile of keys and loops over the query tiles. Each step makes
five matrix products, where ``gluon_backward``, which computes dq apart, makes seven:

    S = sm_scale * q k^T        P = exp(S - lse)             dv += P^T dout
    dP = dout v^T               dS = P (dP - delta)          dq += sm_scale * dS k        dk += sm_scale * dS^T q

Two consumers compute dk and dv of 64 keys each, as they do there. They pass dS on through shared memory to a third one,
which has dq alone: it multiplies dS of all 128 keys by k, and the TMA adds the product to a float32 buffer in memory,
which is scaled and cast at the end. Programs of other keys add to the same rows in whatever order they come, so dq is
not the same, bit for bit, on every run, and is held to the rounding bound instead.

The forward pass is that of ``flash_v3_gluon``, and so are conventions and errors. head_dim goes up to 64: of larger
heads the registers do not hold dk, dv and dq at once.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.algorithms.flash_v3 import gluon as flash_v3_gluon
from kernels.algorithms.flash_v3.gluon_backward import (
    KeyTasks,
    OfKeys,
    RowRing,
    compute_dk_dv,
    for_the_tma,
    load_for_dk_dv,
    programs_for,
)
from kernels.common.deltas import row_deltas
from kernels.common.hopper import (
    ROWS,
    accumulator,
    check_call,
    descriptor,
    heads_in_cache,
    heads_together,
    new_barriers,
    new_ring,
    new_tiles,
    record,
    tma_add,
    unavailable,
)
from kernels.common.launching import is_aligned, remembered
from kernels.common.prepared import Prepared
from kernels.common.tiles import LOG2E, NEG_INF, kernel
from kernels.common.validation import check_gradient_inputs
from kernels.contract import AttentionKernel, Launch
from reference.arithmetic import Arithmetic

DQ_SLOTS = gl.constexpr(2)
"""Tiles of dq in shared memory: the TMA adds one to memory while the next is computed."""

HEAD_DIMS = tuple(range(8, 65, 8))
"""The head dims of 16-bit rows that the TMA can copy, up to the largest for which there are registers."""


@record
class _ScoreGradients:
    """A ring of slots in shared memory, in which each of two consumers puts dS of its 64 keys, as (keys, rows)."""

    tiles: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor
    SLOTS: gl.constexpr

    @gluon.jit
    def largest_exponents(self, keys, seqlen_k):
        """Return, as a column, the largest exponent that P of each key may have: -inf behind the last one.

        There k is a row of zeros, so that dS would be -P delta, which may overflow in 16 bits: infinity times 0 is nan
        in dq. With P = 0, it is 0.
        """
        return gl.where(keys < seqlen_k, 0.0, NEG_INF)[:, None]

    @gluon.jit
    def put(self, n, SELF: gl.constexpr, ds):
        """Store dS of query tile ``n`` and of consumer SELF as soon as its slot is free."""
        slot = n % self.SLOTS
        mbarrier.wait(self.freed.index(slot), n // self.SLOTS + 1 & 1)
        self.tiles.index(slot * 2 + SELF).store(ds)
        fence_async_shared()
        mbarrier.arrive(self.filled.index(slot), count=1)

    @gluon.jit
    def take(self, n):
        """Wait for dS of query tile ``n`` and return it as (rows, keys), in two parts: the keys of each consumer."""
        slot = n % self.SLOTS
        mbarrier.wait(self.filled.index(slot), n // self.SLOTS & 1)
        return self.tiles.index(slot * 2).permute((1, 0)), self.tiles.index(slot * 2 + 1).permute((1, 0))

    @gluon.jit
    def free(self, n):
        """Say that dS of query tile ``n`` has been read."""
        mbarrier.arrive(self.freed.index(n % self.SLOTS), count=1)


@gluon.jit
def _add_to_dq(s, ds_ring, dq_sum, dq_tiles):
    """Run the consumer that has dq: it adds what the 128 keys of a task give to dq of each query tile."""
    HEAD_DIM: gl.constexpr = dq_sum.block_type.shape[3]
    of_gradient: gl.constexpr = accumulator(HEAD_DIM, s.q.dtype)
    taken_k = 0
    taken = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head_kv, start_n = s.tasks.get(task)
        first, tiles = s.tasks.query_tiles(start_n)
        s.k_ring.take(taken_k)
        s.k_ring.take(taken_k + 1)
        for head in range(head_kv * s.tasks.group, (head_kv + 1) * s.tasks.group):
            for tile in range(first, tiles):
                ds_of_first, ds_of_second = ds_ring.take(taken)
                dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=of_gradient)
                dq = warpgroup_mma(
                    ds_of_first, s.k_ring.again(taken_k, tile), dq, use_acc=False, is_async=True
                )
                dq = warpgroup_mma(ds_of_second, s.k_ring.again(taken_k + 1, tile), dq, is_async=True)
                dq = warpgroup_mma_wait(0, deps=(dq,))
                ds_ring.free(taken)
                # All but the last adds have read their tiles, so the one that is next in turn is free.
                tma.store_wait(DQ_SLOTS - 1)
                dq_tile = dq_tiles.index(taken % DQ_SLOTS)
                dq_tile.reshape([ROWS, HEAD_DIM]).store(dq)
                fence_async_shared()
                tma_add(dq_sum, [batch, head, tile * ROWS, 0], dq_tile)
                taken += 1
        s.k_ring.free(taken_k)
        s.k_ring.free(taken_k + 1)
        taken_k += 2
    tma.store_wait(0)


@partial(kernel, jit=gluon.jit)
def _backward_kernel(
    lse_log2,
    delta,
    q,
    k,
    v,
    dout,
    dq_sum,
    dk,
    dv,
    sm_scale,
    scale_log2,
    heads,
    heads_kv,
    group,
    together,
    seqlen_q,
    seqlen_k,
    CAUSAL: gl.constexpr,
):
    """Compute dk and dv, and add to dq_sum, which is 0 at first: dq before it is scaled, in float32.

    All tensors are descriptors whose blocks are tiles of 64 rows, or the numbers of 64 rows.
    """
    tasks = KeyTasks(heads, heads_kv, group, together, seqlen_q, seqlen_k, CAUSAL, 2 * ROWS, ROWS)
    q_ring = RowRing(new_ring(q, 3, 2), new_tiles(lse_log2, 3))
    do_ring = RowRing(new_ring(dout, 3, 2), new_tiles(delta, 3))
    k_ring = new_ring(k, 2, 2)  # The consumer of its keys and that of dq read a tile of k.
    v_ring = new_ring(v, 2, 1)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], q.dtype)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [3 * 2, ROWS, ROWS], layout)
    ds_ring = _ScoreGradients(ds_tiles, new_barriers(3, 2), new_barriers(3, 1), 3)
    dq_tiles = new_tiles(dq_sum, DQ_SLOTS)
    dk_tiles = new_tiles(dk, 2)
    dv_tiles = new_tiles(dv, 2)
    fence_async_shared()
    shared = OfKeys(
        q,
        k,
        v,
        dout,
        dk,
        dv,
        lse_log2,
        delta,
        sm_scale,
        scale_log2,
        tasks,
        q_ring,
        do_ring,
        k_ring,
        v_ring,
        dk_tiles,
        dv_tiles,
    )
    gl.warp_specialize(
        [
            (load_for_dk_dv, (shared,)),
            (compute_dk_dv, (shared, ds_ring, 0)),
            (compute_dk_dv, (shared, ds_ring, 1)),
            (_add_to_dq, (shared, ds_ring, dq_sum, dq_tiles)),
        ],
        [4, 4, 4],
        [208, 208, 64],
    )


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Call ``flash_v3_gluon.forward`` with a head_dim of ``HEAD_DIMS``, for which there is a backward pass here."""
    _check(q, k, v, causal, sm_scale)
    return flash_v3_gluon.forward(q, k, v, causal=causal, sm_scale=sm_scale)


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
) -> tuple[Tensor, ...]:
    """Return the gradients (dq, dk, dv), with the arguments, results and errors of ``flash_v3_gluon.backward``.

    head_dim is one of ``HEAD_DIMS``. dq is summed over the tiles of 128 keys in any order.
    """
    _check(q, k, v, causal, sm_scale)
    prepared = _prepared(dout, q, k, v, out, lse, causal, sm_scale)
    dq, dk, dv = (torch.empty(*t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if prepared is None:
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout, out = (t if is_aligned(t) else t.contiguous() for t in (dout, out))
    delta, lse_log2 = row_deltas(dout, out, lse, aligned=True)
    dq_sum = torch.zeros(*q.shape, dtype=torch.float32, device=q.device)
    prepared(for_the_tma(lse_log2), for_the_tma(delta), q, k, v, dout, dq_sum, dk, dv)
    return torch.mul(dq_sum, float(sm_scale), out=dq), dk, dv


@remembered
def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> None:
    """Check what ``flash_v3_gluon`` does, and that head_dim is one of ``HEAD_DIMS``."""
    check_call(q, k, v, causal, sm_scale, HEAD_DIMS)


@remembered
def _prepared(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    sm_scale: float,
) -> Prepared | None:
    """Check what ``_check`` has not of the arguments of a call, and prepare the launch; None if a tensor is empty."""
    check_gradient_inputs(dout, q, out, lse)
    if 0 in (q.numel(), k.numel()):  # A tensor descriptor cannot describe an empty tensor.
        return None
    batch, heads_q, seqlen_q, _ = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    heads, group = batch * heads_kv, heads_q // heads_kv
    # In float32, dq of a query head takes as much of the cache as q and dout do together.
    together = heads_together(heads, max(1, heads_in_cache(q) // (2 * group)))
    numbers = partial(descriptor, rows=1, columns=ROWS.value)
    tiles = partial(descriptor, rows=ROWS.value)
    return Prepared(
        _backward_kernel,
        programs_for(heads * math.ceil(seqlen_k / (2 * ROWS.value)), causal, q.device),
        [numbers, numbers, *[tiles] * 7],  # lse, delta, q, k, v, dout, dq, dk, dv
        *(float(sm_scale), sm_scale * LOG2E.value),
        *(heads, heads_kv, group, together if causal else 1),
        *(seqlen_q, seqlen_k),
        CAUSAL=causal,
        num_warps=4,
    )


def _arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    return replace(flash_v3_gluon.KERNEL.capabilities.arithmetic(dtype, device, launch), dq_atomic=True)


KERNEL = AttentionKernel(
    name="flash_v3_gluon_atomic",
    forward=forward,
    backward=backward,
    capabilities=replace(
        flash_v3_gluon.KERNEL.capabilities,
        head_dims=HEAD_DIMS,
        deterministic=("out", "lse", "dk", "dv"),
        arithmetic=_arithmetic,
    ),
)

__getattr__ = unavailable(KERNEL.name, twin="flash_v2_atomic")
