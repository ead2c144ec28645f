"""FlashAttention-3 for Hopper in Gluon: one warp group loads, the others compute, and all of them overlap.

Jay Shah et al., *FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision* (2024),
sections 3.1 and 3.2, for float16 and bfloat16. What is computed is FlashAttention-2 (see ``flash_v2``); new is
who does what when:

- *Warp specialisation* (3.1, algorithm 1). The producer, a warp group with few registers, has the TMA copy
  tiles of q, k and v into shared memory. Consumers, warp groups of 64 query rows each that share k and v, do
  the rest. They meet at mbarriers, a pair for each slot of a ring of tiles (``Ring``).
- *Ping-pong* (3.1). Consumers take turns at the tensor cores: while one has its products, the others are at
  their softmax. Only where there are three: two do better without (``_shape``).
- *Overlap within a warp group* (3.2, algorithm 2). The scores of a key tile are multiplied at the same time as
  the weights of the tile before it are multiplied with its v, and the softmax of the former takes place while
  the latter is still under way. Three consumers do better without that: each has its softmax while the
  others have their products.

Programs are persistent, one for each multiprocessor, and walk over (head, query tile) tasks. Where shared memory
allows it, the first tiles of a task are loaded while consumers still have those of the task before. Key tiles are
taken from the last to the first, so that those that an edge cuts come first. A consumer skips those that none of
its rows sees.

The backward pass is in ``gluon_backward``. The kernel needs a Hopper GPU; ``flash_v3`` is its plain twin in
``triton.language``, which runs anywhere.
"""

import math
from dataclasses import dataclass, replace
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
from triton.language.extra.cuda.libdevice import mul_ru

from kernels.algorithms.flash_v3.gluon_backward import backward
from kernels.common.hopper import (
    HEAD_DIMS,
    ROWS,
    Ring,
    Tasks,
    accumulator,
    check_call,
    descriptor,
    end_turn,
    heads_in_cache,
    heads_together,
    hide,
    new_barriers,
    new_ring,
    new_tiles,
    partial_sums,
    record,
    start_product,
    tma_store,
    unavailable,
    wait_for_turn,
)
from kernels.common.launching import multiprocessors, new_results, padded_head_dim, remembered
from kernels.common.prepared import Prepared
from kernels.common.tiles import LN2, LOG2E, NEG_INF, kernel
from kernels.common.validation import COPYABLE
from kernels.contract import AttentionKernel, Capabilities, Launch, flash_arithmetic
from reference.arithmetic import FP32_ROUNDOFF, Arithmetic


@record
class _State:
    """What the producer and the consumers share.

    ``turns`` are the barriers of the ping-pong, one for each consumer, which has its turn ``n`` at key tile ``n``.
    ``FUSED`` says that scale_log2 is above 0 and at most 2^64, so that the softmax may scale scores as it subtracts
    their maximum.
    """

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    lse: gl.tensor
    scale_log2: gl.tensor
    tasks: Tasks
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    out_tiles: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor
    FUSED: gl.constexpr
    CONSUMERS: gl.constexpr
    PING_PONG: gl.constexpr
    OVERLAP: gl.constexpr


@gluon.jit
def _produce(s):
    """Run the producer: it loads the tiles of each task in the order in which they are needed (lines 1-10)."""
    loaded_q = 0
    loaded = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head, start_m = s.tasks.get(task)
        _, tiles = s.tasks.key_tiles(start_m)
        head_kv = head // s.tasks.group
        for consumer in gl.static_range(s.CONSUMERS):
            s.q_ring.fill(loaded_q + consumer, s.q, [batch, head, start_m + consumer * ROWS, 0])
        loaded_q += s.CONSUMERS
        for i in range(tiles):
            row = (tiles - 1 - i) * s.tasks.BLOCK_KEYS
            s.k_ring.fill(loaded + i, s.k, [batch, head_kv, row, 0])
            s.v_ring.fill(loaded + i, s.v, [batch, head_kv, row, 0])
        loaded += tiles


@gluon.jit
def _power_of_two(scale):
    """Return the smallest power of two that is no less than a scale: its bits are the scale's exponent, rounded up."""
    return (scale.to(gl.int32, bitcast=True) + 0x7FFFFF & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _softmax_step(scores, scale, top_i, l_i):
    """Take one step of the online softmax in base 2 of scores * scale, where scale is above 0 and at most 2^64.

    top_i (rows,) is the running maximum of the scores, not scaled, and l_i (rows, 4) are the running sums.
    Returns the weights relative to the new maximum, the factor that brings earlier weights to it, the new top_i
    and the new l_i.

    One fused multiply-add takes a score to its exponent, scores * scale - m, where m is the scaled maximum
    rounded up. So no weight is above 1, and the largest is at least 1/2 where m errs by less than 1, which is
    below 2^24. Beyond, all weights might vanish. There the exponent is (scores - top) * 2^i, where 2^i is the
    scale or up to twice that: it is exactly 0 for the largest score, and for others at most the true one, which
    a rounding of scores * scale would leave uncertain by 1 or more. A power of two that moves from the scale to
    the scores changes no weight. Where top * 2^i might overflow, scores - top takes all others to 0 as well.
    """
    top = gl.maximum(top_i, gl.max(scores, 1))
    m_i = mul_ru(top_i, scale)
    m_new = mul_ru(top, scale)
    far = gl.abs(m_new) >= 2.0**24
    power = gl.where(gl.abs(m_new) >= 2.0**126, 1.0, _power_of_two(scale))
    factor = gl.where(far, power, scale)
    shift = gl.where(far, top * power, m_new)
    # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is nan.
    shift = gl.where(top == NEG_INF, 0.0, shift)
    p = gl.exp2(gl.fma(scores, factor[:, None], -shift[:, None]))
    alpha = gl.exp2(m_i - gl.where(top == NEG_INF, 0.0, m_new))
    of_sums = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))
    return p, alpha, top, l_i * of_sums[:, None] + partial_sums(p)


@gluon.jit
def _split_columns(tile, PARTS: gl.constexpr):
    """Return a tile in one part or in two, each with as many of its columns."""
    parts = (tile,)
    if PARTS == 2:
        parts = tile.reshape([ROWS, 2, tile.shape[1] // 2]).permute([0, 2, 1]).split()
    return parts


@gluon.jit
def _consume(s, SELF: gl.constexpr):
    """Run consumer number SELF: it computes 64 rows of each task (algorithm 2)."""
    dtype: gl.constexpr = s.out.dtype
    BLOCK_KEYS: gl.constexpr = s.tasks.BLOCK_KEYS
    COLUMNS: gl.constexpr = s.out.block_type.shape[3]
    HEAD_DIM: gl.constexpr = s.v.block_type.shape[3]
    of_scores: gl.constexpr = accumulator(BLOCK_KEYS, dtype)
    of_out: gl.constexpr = accumulator(HEAD_DIM, dtype)
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_out, 32 // dtype.primitive_bitwidth)
    scale = s.scale_log2 if s.FUSED else gl.to_tensor(1.0)
    out_tile = s.out_tiles.index(SELF)
    taken_q = SELF
    taken = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head, start_m = s.tasks.get(task)
        _, tiles = s.tasks.key_tiles(start_m)
        start_m += SELF * ROWS
        whole, own_tiles = s.tasks.key_tiles_of_consumer(start_m)
        rows = start_m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_scores))
        last_key = gl.full([ROWS], s.tasks.seqlen_k - 1, gl.int32, layout=gl.SliceLayout(1, of_scores))
        if s.tasks.CAUSAL:
            last_key = rows + (s.tasks.seqlen_k - s.tasks.seqlen_q)
        top_i = gl.full([ROWS], NEG_INF, gl.float32, layout=gl.SliceLayout(1, of_scores))
        l_i = partial_sums(gl.zeros([ROWS, BLOCK_KEYS], gl.float32, layout=of_scores))
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=of_out)

        # No row of this consumer sees a key of these tiles.
        for i in range(tiles - own_tiles):
            s.k_ring.skip(taken + i)
            s.v_ring.skip(taken + i)
            wait_for_turn(s, taken + i, SELF)
            end_turn(s, SELF)
        taken += tiles - own_tiles
        tiles = own_tiles

        q_tile = s.q_ring.take(taken_q)
        k_tile = s.k_ring.take(taken)
        wait_for_turn(s, taken, SELF)
        scores = start_product(q_tile, k_tile)
        end_turn(s, SELF)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        s.k_ring.free(taken)
        if not s.FUSED:
            scores = scores * s.scale_log2
        scores = hide(scores, last_key, (tiles - 1) * BLOCK_KEYS)
        p, alpha, top_i, l_i = _softmax_step(scores, scale, top_i, l_i)
        p = gl.convert_layout(p.to(dtype), of_weights)

        for i in range(1, tiles):
            k_tile = s.k_ring.take(taken + i)
            wait_for_turn(s, taken + i, SELF)
            scores = start_product(q_tile, k_tile)
            acc = warpgroup_mma(p, s.v_ring.take(taken + i - 1), acc, is_async=True)
            end_turn(s, SELF)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            s.k_ring.free(taken + i)
            if not s.OVERLAP:
                acc = warpgroup_mma_wait(0, deps=(acc,))
                s.v_ring.free(taken + i - 1)
            if not s.FUSED:
                scores = scores * s.scale_log2
            if tiles - 1 - i >= whole:
                scores = hide(scores, last_key, (tiles - 1 - i) * BLOCK_KEYS)
            p, alpha, top_i, l_i = _softmax_step(scores, scale, top_i, l_i)
            if s.OVERLAP:
                # ptxas would move the wait to before the softmax, but not to before a loop that waits for a tile.
                s.v_ring.take(taken + i)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                s.v_ring.free(taken + i - 1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, of_out))[:, None]
            p = gl.convert_layout(p.to(dtype), of_weights)
        s.q_ring.free(taken_q)
        taken_q += s.CONSUMERS
        taken += tiles
        acc = warpgroup_mma(p, s.v_ring.take(taken - 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        s.v_ring.free(taken - 1)

        # A row that sees no key has top_i = -inf and l_i = 0: out is 0 and lse -inf.
        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, of_scores))
        l_i = gl.where(l_i == 0.0, 1.0, l_i)
        row_lse = s.lse + (batch * s.tasks.heads_q + head).to(gl.int64) * s.tasks.seqlen_q + rows
        gl.store(row_lse, (mul_ru(top_i, scale) + gl.log2(l_i)) * LN2, mask=rows < s.tasks.seqlen_q)
        acc = acc * gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, of_out))[:, None]
        parts = _split_columns(acc.to(dtype), HEAD_DIM // COLUMNS)
        for i in gl.static_range(HEAD_DIM // COLUMNS):
            tma.store_wait(0)
            out_tile.reshape([ROWS, COLUMNS]).store(parts[i])
            fence_async_shared()
            tma_store(s.out, [batch, head, start_m, i * COLUMNS], out_tile)
    tma.store_wait(0)


@partial(kernel, jit=gluon.jit)
def _forward_kernel(
    lse,
    q,
    k,
    v,
    out,
    heads,
    heads_q,
    group,
    together,
    seqlen_q,
    seqlen_k,
    scale_log2,
    CAUSAL: gl.constexpr,
    FUSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    OVERLAP: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Compute out and lse; q, k, v and out are tensor descriptors whose blocks are tiles."""
    BLOCK_KEYS: gl.constexpr = k.block_type.shape[2]
    tasks = Tasks(heads, heads_q, group, together, seqlen_q, seqlen_k, CAUSAL, CONSUMERS * ROWS, BLOCK_KEYS)
    q_ring = new_ring(q, Q_SLOTS * CONSUMERS, 1)
    k_ring = new_ring(k, SLOTS, CONSUMERS)
    v_ring = new_ring(v, SLOTS, CONSUMERS)
    out_tiles = new_tiles(out, CONSUMERS)
    turns = new_barriers(CONSUMERS, 1)
    mbarrier.arrive(turns.index(0), count=1)
    fence_async_shared()
    shared = _State(
        q,
        k,
        v,
        out,
        lse,
        scale_log2,
        tasks,
        q_ring,
        k_ring,
        v_ring,
        out_tiles,
        turns,
        FUSED,
        CONSUMERS,
        PING_PONG,
        OVERLAP,
    )
    # The first function runs in the warps of the kernel itself, with the registers that the others leave.
    gl.warp_specialize(
        [(_produce, (shared,)), (_consume, (shared, 0)), (_consume, (shared, 1)), (_consume, (shared, 2))][
            : CONSUMERS + 1
        ],
        [4, 4, 4][:CONSUMERS],
        [REGISTERS, REGISTERS, REGISTERS][:CONSUMERS],
    )


@dataclass(frozen=True)
class _Shape:
    """The settings that are tuned.

    Attributes:
        consumers: how many warp groups compute.
        ping_pong: whether they take turns at the tensor cores.
        registers: registers of each of their threads.
        block_keys: keys in a tile.
        q_slots: tiles of q that each consumer has in shared memory; 2 if those of its next task are loaded early.
        slots: tiles of k, and as many of v, in shared memory.
        overlap: whether the softmax of a key tile takes place as the weights of the tile before are multiplied.
        out_parts: in how many parts, 1 or 2, the columns of out pass through shared memory, where that is short.
    """

    consumers: int
    ping_pong: bool
    registers: int
    block_keys: int
    q_slots: int
    slots: int
    overlap: bool = False
    out_parts: int = 1

    def query_tiles(self, seqlen_q: int) -> int:
        """Return how many query tiles, each of 64 rows for each consumer, a head has."""
        return math.ceil(seqlen_q / (self.consumers * ROWS.value))


_TWO = _Shape(consumers=2, ping_pong=False, registers=240, block_keys=128, q_slots=2, slots=3, overlap=True)
_THREE = _Shape(consumers=3, ping_pong=True, registers=160, block_keys=128, q_slots=2, slots=3)
_WIDE = {
    128: replace(_TWO, slots=2),
    256: replace(_TWO, block_keys=64, q_slots=1, slots=2, out_parts=2),
}
"""The settings of padded head dims that leave registers for two consumers alone, and memory for fewer slots.

At head_dim 256 threads spill up to 56 bytes with Triton 3.6.0, outside of the loop over tiles.
"""


def _shape(head_dim: int, seqlen_q: int) -> _Shape:
    """Return the settings for a call: the fastest that fit a Hopper's registers and its 227 KiB of shared memory.

    Up to a head_dim of 64, three consumers take a tenth less time for a row than two. But the last query tile of a head
    may reach over its rows, and with three it is larger: 512 and 1024 rows are computed as 576 and 1152. Then two are
    faster. Results have the same bits with either, since each row sees the same key tiles in the same order.

    A head_dim of 8 or 16 has three at any length. Two were not timed there, and the laws, which draw short sequences,
    should judge three often.

    Three consumers spill a few registers, up to 80 bytes with Triton 3.6.0 where a mask cuts a tile; two spill none.
    """
    columns = padded_head_dim(head_dim)
    if columns in _WIDE:
        return _WIDE[columns]
    computed_by_two, computed_by_three = (s.consumers * s.query_tiles(seqlen_q) for s in (_TWO, _THREE))
    return _THREE if columns == 16 or computed_by_three <= 1.1 * computed_by_two else _TWO


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return out and lse, with the arguments, results and errors of ``flash_v3.tma.forward``.

    There are no launch settings, and any device but a Hopper GPU raises NotImplementedError. head_dim is one of
    ``HEAD_DIMS``.
    """
    prepared = _prepared(q, k, v, causal, sm_scale)
    out, lse = new_results(q, q.dtype)
    if prepared is None:
        return out.zero_(), lse.fill_(-math.inf)
    prepared(lse, q, k, v, out)
    return out, lse


@remembered
def _prepared(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared | None:
    """Check the arguments of a call, and prepare the launch for it; None if a tensor is empty."""
    check_call(q, k, v, causal, sm_scale)
    if 0 in (q.numel(), k.numel()):  # A tensor descriptor cannot describe an empty tensor.
        return None
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    shape = _shape(head_dim, seqlen_q)
    heads, group = batch * heads_q, heads_q // heads_kv
    scale_log2 = sm_scale * LOG2E.value
    of_q, of_keys = (partial(descriptor, rows=rows) for rows in (ROWS.value, shape.block_keys))
    of_out = partial(of_q, columns=padded_head_dim(head_dim) // shape.out_parts)
    return Prepared(
        _forward_kernel,
        min(heads * shape.query_tiles(seqlen_q), multiprocessors(q.device)),
        [None, of_q, of_keys, of_keys, of_out],  # lse, q, k, v, out
        *(heads, heads_q, group, heads_together(heads, group * heads_in_cache(k)) if causal else 1),
        *(seqlen_q, seqlen_k, scale_log2),
        CAUSAL=causal,
        # A scale that float32 flushes to 0 is not above 0.
        FUSED=torch.finfo(torch.float32).tiny <= scale_log2 <= 2.0**64,
        CONSUMERS=shape.consumers,
        PING_PONG=shape.ping_pong,
        OVERLAP=shape.overlap,
        Q_SLOTS=shape.q_slots,
        SLOTS=shape.slots,
        REGISTERS=shape.registers,
        num_warps=4,
    )


def _arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    """Return FlashAttention-2's arithmetic, with two exceptions.

    out is multiplied by the reciprocal of l, which rounds once more. And weights are relative to a maximum that is
    rounded up once it is scaled, so that the largest one need not be exactly 1 (``_softmax_step``).
    """
    arithmetic = flash_arithmetic(dtype, device, launch)
    div_error = arithmetic.div_error + FP32_ROUNDOFF
    return replace(arithmetic, tile_max=128, div_error=div_error, rounded_largest_weight=True)


KERNEL = AttentionKernel(
    name="flash_v3_gluon",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(
        dtypes=("float16", "bfloat16"),
        head_dims=HEAD_DIMS,
        layouts=COPYABLE,
        batch_invariant=True,
        arithmetic=_arithmetic,
    ),
)

__getattr__ = unavailable(KERNEL.name, twin="flash_v3")
