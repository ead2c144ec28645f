"""FlashAttention-3 in 8-bit floating point for Hopper, in Gluon: forward.

Jay Shah et al., *FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision* (2024), section 3.3.
``fp8`` has its law and its quantisation, which this kernel shares, and is its plain twin in ``triton.language``. Who
does what when is as in ``flash_v3_gluon``: a producer copies tiles, and warp groups of 64 query rows each, the
consumers, compute. What the 8-bit products of a Hopper ask for is this:

- *Both operands of a product lie with the dimension that is summed over contiguous.* So V is stored transposed.
- *P stays where it is.* A thread has columns 8 h + 2 t and 8 h + 2 t + 1 of every 16 columns of P as the product of q
  and k leaves it, t being its place among four and h 0 or 1; as an operand of 8 bits, it would need columns 4 t to
  4 t + 3. A sum over keys may have them in any order, so it takes them as the threads have them, and V is stored with
  its keys in that order (``fp8.interleaved``): no thread gives another one its part of P.
- *Sums have 14 bits.* The product of q and k sums over head_dim, and that of P and V over the keys of a tile alone.
  What a tile adds to the output is added in float32, in units of the tile's scale of v (``_to_unit``).
- *Registers are few.* Besides the output of its rows, a thread holds what a tile adds to it, which at head_dim 256 is
  made for some columns at a time (``_Shape.parts``).

P is made as 2^8 P by a maximum that is 8 less, so l is 2^8 times as large, and the factor is gone when out is divided
by it.

A consumer waits for each of its products, while the others are at their softmax. Those that start together would be at
their products, and then at their softmax, at the same time; so up to head_dim 128 they take turns, which last from a
product of P and V to the next one of q and k.
``flash_v3_gluon`` overlaps the two within a consumer as well. Here registers do not suffice for that, as the output of
a tile has its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from triton.language.extra.cuda import gdc_wait

from kernels.algorithms import fp8
from kernels.common.hopper import (
    HEAD_DIMS,
    ROWS,
    Ring,
    Tasks,
    accumulator,
    check_device,
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
    tma_load,
    tma_store,
    unavailable,
    wait_for_turn,
)
from kernels.common.launching import check_settings, multiprocessors, new_results, remembered
from kernels.common.prepared import Prepared
from kernels.common.tiles import LN2, LOG2E, NEG_INF, kernel
from kernels.common.validation import check_copyable, check_inputs
from kernels.contract import AttentionKernel, Capabilities
from reference.arithmetic import FP32_ROUNDOFF, HOPPER_FP8_ROUNDOFF, Arithmetic

LAUNCH: Mapping[str, tuple[Any, ...]] = {name: fp8.LAUNCH[name] for name in ("format", "scaling")}
"""Launch settings: the 8-bit format, and how scales are chosen."""

KEYS = gl.constexpr(128)
"""Keys of a tile. They share a scale of k and one of v, and the ROWS of a tile of q one of q."""

P_EXPONENT = gl.constexpr(math.log2(fp8.P_SCALE.value))


@record
class _KeyRing:
    """A ring of tiles of k, as ``Ring``, each of which comes with the tile of v of the same keys."""

    ring: Ring
    v_tiles: gl.shared_memory_descriptor

    @gluon.jit
    def fill(self, n, k, v, batch, head, key):
        """Copy tile ``n`` of k and of v, with the keys of a head from ``key`` on."""
        slot = n % self.ring.SLOTS
        filled = self.ring.filled.index(slot)
        mbarrier.wait(self.ring.freed.index(slot), n // self.ring.SLOTS + 1 & 1)
        mbarrier.expect(filled, k.block_type.nbytes + v.block_type.nbytes)
        tma_load(k, [batch, head, key, 0], filled, self.ring.tiles.index(slot))
        tma_load(v, [batch, head, 0, key], filled, self.v_tiles.index(slot))

    @gluon.jit
    def v_tile(self, n):
        """Return tile ``n`` of v as (columns, keys), which is there once that of k has been taken."""
        tile = self.v_tiles.index(n % self.ring.SLOTS)
        return tile.reshape([tile.shape[2], tile.shape[3]])


@record
class _State:
    """What the producer and the consumers share.

    q and k are 8-bit numbers as (rows, columns), and v as (columns, keys).
    """

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    q_scale: gl.tensor
    k_scale: gl.tensor
    v_scale: gl.tensor
    lse: gl.tensor
    scale_log2: gl.tensor
    tasks: Tasks
    q_ring: Ring
    keys: _KeyRing
    out_tiles: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor
    CONSUMERS: gl.constexpr
    PARTS: gl.constexpr
    PING_PONG: gl.constexpr


@record
class _Rows:
    """What a consumer knows of its rows of a task: q, its scale, those of the key head, and a row's last key."""

    q_tile: gl.shared_memory_descriptor
    q_unit: gl.tensor
    k_scale: gl.tensor
    v_scale: gl.tensor
    last_key: gl.tensor


@gluon.jit
def _produce(s):
    """Run the producer: it loads the tiles of each task in the order in which they are needed."""
    loaded_q = 0
    loaded = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head, start_m = s.tasks.get(task)
        _, tiles = s.tasks.key_tiles(start_m)
        for consumer in gl.static_range(s.CONSUMERS):
            s.q_ring.fill(loaded_q + consumer, s.q, [batch, head, start_m + consumer * ROWS, 0])
        loaded_q += s.CONSUMERS
        for i in range(tiles):
            s.keys.fill(loaded + i, s.k, s.v, batch, head // s.tasks.group, (tiles - 1 - i) * KEYS)
        loaded += tiles


@gluon.jit
def _have_usual_scales(s, q_unit, k_scale, v_scale, tiles):
    """Return whether all these tiles have usual scales, for which ``_softmax_step`` and ``_to_unit`` are simpler.

    Then scores have a factor from 2^-100 to 2^-6, and v one of at least 2^-24 and below 1. Each warp looks at all
    scales, 128 at a time.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    unusual = 0
    for first in range(0, tiles, 128):
        tile = gl.minimum(first + gl.arange(0, 128, layout=layout), tiles - 1)
        unit = q_unit * gl.load(k_scale + tile) * s.scale_log2
        v_unit = gl.load(v_scale + tile)
        usual = (unit >= 2.0**-100) & (unit <= 2.0**-6) & (v_unit >= 2.0**-24) & (v_unit < 1.0)
        unusual += gl.max(gl.where(usual, 0, 1), 0)
    return unusual == 0


@gluon.jit
def _scaled(s, products, q_unit, k_unit):
    """Return scores, and the factor that is left to multiply them by, which is positive.

    Products are below 2^24, so that with this factor below 2^-6 scores are below 2^18, which ``_softmax_step`` needs
    unless the factor is 1. Few calls have larger ones, or negative ones, or ones that float32 does not hold. There the
    smaller scale comes first: the product of two large ones may overflow where the score does not. Elsewhere the factor
    is exact, since scales are powers of two.
    """
    unit = q_unit * k_unit * s.scale_log2
    if (unit < 2.0**-100) | (unit > 2.0**-6):
        products = products * gl.minimum(q_unit, k_unit) * (gl.maximum(q_unit, k_unit) * s.scale_log2)
        unit = 1.0
    return products, unit


@gluon.jit
def _softmax_step(scores, unit, r_i, l_i, USUAL: gl.constexpr):
    """Take one step of the online softmax of scores * unit, whose weights are 2^8 P, relative to r_i = m_i - 8.

    r_i is (rows,), and l_i are the running sums as ``partial_sums`` makes them. USUAL says that the tile has usual
    scales and that all rows see all of its keys.

    A fused multiply-add takes the largest score of a tile to 8, but for the rounding of r_i, which below 2^18 is less
    than 2^-6: too little to be seen by a cast to 8 bits. Where unit is 1 it is a difference alone. 8 is lost in numbers
    from 2^24 on. There weights are P.
    """
    top = gl.max(scores, 1) * unit
    if USUAL:
        r_new = gl.maximum(r_i, top - P_EXPONENT)
        shift = r_new
    else:
        r_new = gl.maximum(r_i, gl.where(gl.abs(top) < 2.0**24, top - P_EXPONENT, top))
        # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is nan.
        shift = gl.where(r_new == NEG_INF, 0.0, r_new)
    p = gl.exp2(gl.fma(scores, unit, -shift[:, None]))
    alpha = gl.exp2(r_i - shift)
    return p, alpha, r_new, l_i * _rows_of(alpha, l_i) + partial_sums(p)


@gluon.jit
def _packed(p, FORMAT: gl.constexpr):
    """Return P in 8 bits, four numbers in one of 32, in the order of ``fp8.interleaved``.

    Numbers of 8 bits that cross a wait would each take a register, and instructions to put them together again.
    """
    first, second = p.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).split()
    a, c = first.split()
    b, d = second.split()
    CAST: gl.constexpr = "cvt.rn.satfinite." + ("e4m3x2" if FORMAT.is_fp8e4nv() else "e5m2x2") + ".f32"
    return gl.inline_asm_elementwise(
        "{ .reg .b16 x, y; " + CAST + " x, $2, $1; " + CAST + " y, $4, $3; mov.b32 $0, {x, y}; }",
        "=r,r,r,r,r",
        [a, b, c, d],
        gl.uint32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _as_operand(packed, FORMAT: gl.constexpr, of_product: gl.constexpr):
    """Return P in 8 bits as the first operand of a product. This takes no instruction."""
    pairs = gl.join(gl.join(packed, packed >> 16), gl.join(packed >> 8, packed >> 24))
    keys = pairs.reshape([ROWS, KEYS]).to(gl.uint8).to(FORMAT, bitcast=True)
    return gl.convert_layout(keys, gl.DotOperandLayout(0, of_product, 4))


@gluon.jit
def _start_part(p, v_tile, PART: gl.constexpr, PARTS: gl.constexpr):
    """Start the product of P and one of several parts of the columns of v."""
    COLUMNS: gl.constexpr = v_tile.shape[0] // PARTS
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout=accumulator(COLUMNS, v_tile.dtype))
    columns = v_tile.slice(PART * COLUMNS, COLUMNS, 0)
    return warpgroup_mma(p, columns.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _rows_of(x, of):
    """Return x (rows,) as a column, to be multiplied with ``of`` (rows, columns)."""
    return gl.convert_layout(x, gl.SliceLayout(1, of.type.layout))[:, None]


@gluon.jit
def _to_unit(alpha, unit, v_unit, USUAL: gl.constexpr):
    """Return alpha, and the unit of the output's sum, as they are when a tile with the scale v_unit is added.

    The unit is v_unit, so that what the tile adds needs no factor, and alpha also takes the sum there from the unit
    before. Units are powers of two, so this is exact unless the sum overflows. As long as scales are from 2^-24 to 1,
    it is below 2^71 of its unit: entries of P and v are at most 2^8 in 8 bits, and keys fewer than 2^31. From the
    first other scale on, the unit is 1.
    """
    new_unit = v_unit
    if not USUAL:
        kept = (unit < 1.0) & (v_unit < 1.0) & (v_unit >= 2.0**-24)
        new_unit = gl.where(kept, v_unit, 1.0)
    exponent = (unit.to(gl.int32, bitcast=True) - new_unit.to(gl.int32, bitcast=True)) >> 23
    return alpha * fp8.power_of_two(exponent), new_unit


@gluon.jit
def _add_product(s, acc, alpha, p, v_tile, factor):
    """Return acc * alpha + (P v) * factor, where None stands for a factor of 1; acc is a tuple of parts of columns."""
    added = _start_part(p, v_tile, 0, s.PARTS)
    for part in gl.static_range(s.PARTS):
        if part + 1 < s.PARTS:
            following = _start_part(p, v_tile, part + 1, s.PARTS)
            added = warpgroup_mma_wait(1, deps=(added,))
        else:
            following = added
            added = warpgroup_mma_wait(0, deps=(added,))
        if factor is not None:
            added = added * factor
        total = gl.fma(acc[part], _rows_of(alpha, acc[part]), added)
        if part + 2 < s.PARTS:
            # This waits for no more than before. It keeps the next product from being started ahead of the sum, so that
            # the product gets the registers of the one that has been added.
            total = warpgroup_mma_wait(1, deps=(total,))
        acc = acc[:part] + (total,) + acc[part + 1 :]  # noqa: RUF005  # Triton has no starred items
        added = following
    return acc


@gluon.jit
def _take_tile(
    s, rows, n, tile, turn, r_i, l_i, acc, out_unit, k_unit, v_unit, USUAL: gl.constexpr, SELF: gl.constexpr
):
    """Add key tile number ``tile`` of a head, the n-th that is taken, to the running maxima and sums.

    k_unit and v_unit are its scales. Returns those of the tile before it in their place. A turn lasts from a product of
    P and v to the start of the next one of q and k.
    """
    scores = start_product(rows.q_tile, s.keys.ring.take(n))
    end_turn(s, SELF)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    if USUAL:
        unit = rows.q_unit * k_unit * s.scale_log2
    else:
        scores, unit = _scaled(s, scores, rows.q_unit, k_unit)
        scores = hide(scores, rows.last_key, tile * KEYS)
    p, alpha, r_i, l_i = _softmax_step(scores, unit, r_i, l_i, USUAL)
    packed = _packed(p, s.k.dtype)
    # The next tile's scales are loaded ahead: a wait for them would hold up its first product.
    next_k_unit = gl.load(rows.k_scale + gl.maximum(tile - 1, 0))
    next_v_unit = gl.load(rows.v_scale + gl.maximum(tile - 1, 0))
    alpha, out_unit = _to_unit(alpha, out_unit, v_unit, USUAL)
    factor = None
    if not USUAL:
        factor = gl.where(out_unit < 1.0, 1.0, v_unit)
    wait_for_turn(s, turn, SELF)
    of_product: gl.constexpr = acc[0].type.layout
    p = _as_operand(packed, s.k.dtype, of_product)
    acc = _add_product(s, acc, alpha, p, s.keys.v_tile(n), factor)
    s.keys.ring.free(n)
    return r_i, l_i, acc, out_unit, next_k_unit, next_v_unit


@gluon.jit
def _consume(s, SELF: gl.constexpr):
    """Run consumer number SELF: it computes 64 rows of each task."""
    HEAD_DIM: gl.constexpr = s.out.block_type.shape[3]
    COLUMNS: gl.constexpr = HEAD_DIM // s.PARTS
    of_scores: gl.constexpr = accumulator(KEYS, s.k.dtype)
    of_out: gl.constexpr = accumulator(COLUMNS, s.k.dtype)
    q_scales = gl.cdiv(s.tasks.seqlen_q, ROWS)
    k_scales = gl.cdiv(s.tasks.seqlen_k, KEYS)
    out_tile = s.out_tiles.index(SELF)
    taken_q = SELF
    taken = 0
    turn = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head, start_m = s.tasks.get(task)
        _, tiles = s.tasks.key_tiles(start_m)
        start_m += SELF * ROWS
        whole, own_tiles = s.tasks.key_tiles_of_consumer(start_m)
        head = batch * s.tasks.heads_q + head
        # A tile of rows past the last one has any scale.
        q_unit = gl.load(s.q_scale + head * q_scales + gl.minimum(start_m // ROWS, q_scales - 1))
        k_scale = s.k_scale + head // s.tasks.group * k_scales
        v_scale = s.v_scale + head // s.tasks.group * k_scales
        usual = _have_usual_scales(s, q_unit, k_scale, v_scale, own_tiles)
        row = start_m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_scores))
        last_key = gl.full([ROWS], s.tasks.seqlen_k - 1, gl.int32, layout=gl.SliceLayout(1, of_scores))
        if s.tasks.CAUSAL:
            last_key = row + (s.tasks.seqlen_k - s.tasks.seqlen_q)
        r_i = gl.full([ROWS], NEG_INF, gl.float32, layout=gl.SliceLayout(1, of_scores))
        l_i = partial_sums(gl.zeros([ROWS, KEYS], gl.float32, layout=of_scores))
        acc = (gl.zeros([ROWS, COLUMNS], gl.float32, layout=of_out),) * s.PARTS
        out_unit = gl.to_tensor(0.5)

        s.q_ring.take(taken_q)
        # This consumer's slot is named as such. If it were computed, ptxas would make its address ahead of the first of
        # the two loops below and use it in both, also where that loop has no step and is jumped over.
        q_tile = s.q_ring.tiles.index(SELF).reshape([ROWS, HEAD_DIM])
        # No row of this consumer sees a key of these tiles.
        for i in range(tiles - own_tiles):
            s.keys.ring.skip(taken + i)
            wait_for_turn(s, turn + i, SELF)
            end_turn(s, SELF)
        taken += tiles - own_tiles
        turn += tiles - own_tiles
        wait_for_turn(s, turn, SELF)
        rows = _Rows(q_tile, q_unit, k_scale, v_scale, last_key)
        last = own_tiles - 1
        k_unit = gl.load(k_scale + last)
        v_unit = gl.load(v_scale + last)
        # Few tiles need what is in the first loop but not in the second, which is faster for being short.
        others = own_tiles
        if usual:
            others = gl.maximum(own_tiles - whole, 0)
        for i in range(others):
            r_i, l_i, acc, out_unit, k_unit, v_unit = _take_tile(
                *(s, rows, taken + i, last - i, turn + i + 1),
                *(r_i, l_i, acc, out_unit, k_unit, v_unit, False, SELF),
            )
        for i in range(others, own_tiles):
            r_i, l_i, acc, out_unit, k_unit, v_unit = _take_tile(
                *(s, rows, taken + i, last - i, turn + i + 1),
                *(r_i, l_i, acc, out_unit, k_unit, v_unit, True, SELF),
            )
        taken += own_tiles
        turn += own_tiles + 1
        end_turn(s, SELF)
        s.q_ring.free(taken_q)
        taken_q += s.CONSUMERS

        # A row that sees no key has r_i = -inf and l_i = 0: out is 0 and lse -inf.
        l_i = gl.convert_layout(gl.sum(l_i, 1), r_i.type.layout)
        l_i = gl.where(l_i == 0.0, 1.0, l_i)
        lse = ((r_i + P_EXPONENT) + gl.log2(l_i / fp8.P_SCALE)) * LN2
        gl.store(s.lse + head.to(gl.int64) * s.tasks.seqlen_q + row, lse, mask=row < s.tasks.seqlen_q)
        tma.store_wait(0)
        for part in gl.static_range(s.PARTS):
            columns = out_tile.reshape([ROWS, HEAD_DIM]).slice(part * COLUMNS, COLUMNS, 1)
            columns.store((acc[part] * _rows_of(out_unit / l_i, acc[part])).to(s.out.dtype))
        fence_async_shared()
        tma_store(s.out, [batch, head - batch * s.tasks.heads_q, start_m, 0], out_tile)
    tma.store_wait(0)


@partial(kernel, jit=gluon.jit)
def _forward_kernel(
    lse,
    q,
    k,
    v,
    out,
    q_scale,
    k_scale,
    v_scale,
    heads,
    heads_q,
    group,
    together,
    seqlen_q,
    seqlen_k,
    scale_log2,
    CAUSAL: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SLOTS: gl.constexpr,
    PARTS: gl.constexpr,
    PING_PONG: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Compute out and lse; q, k, v and out are tensor descriptors whose blocks are tiles."""
    tasks = Tasks(heads, heads_q, group, together, seqlen_q, seqlen_k, CAUSAL, CONSUMERS * ROWS, KEYS)
    # There are as many slots for q as consumers, so each consumer finds its tiles of q in a slot of its own.
    q_ring = new_ring(q, CONSUMERS, 1)
    keys = _KeyRing(new_ring(k, SLOTS, CONSUMERS), new_tiles(v, SLOTS))
    out_tiles = new_tiles(out, CONSUMERS)
    turns = new_barriers(CONSUMERS, 1)
    mbarrier.arrive(turns.index(0), count=1)
    fence_async_shared()
    shared = _State(
        q,
        k,
        v,
        out,
        q_scale,
        k_scale,
        v_scale,
        lse,
        scale_log2,
        tasks,
        q_ring,
        keys,
        out_tiles,
        turns,
        CONSUMERS,
        PARTS,
        PING_PONG,
    )
    # The kernel that quantises v, before which those of q and k have ended, may still run as this one is launched.
    gdc_wait()
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
    """The settings that are tuned for each head_dim.

    Attributes:
        consumers: how many warp groups compute.
        registers: registers of each of their threads.
        slots: tiles in a ring.
        parts: into how many parts the columns of out are split. The product of P and one part starts while the part
            before is added, so that registers hold two of them.
        ping_pong: whether they take turns at their products.
    """

    consumers: int
    registers: int
    slots: int
    parts: int
    ping_pong: bool


_SHAPES = {
    32: _Shape(consumers=3, registers=160, slots=4, parts=1, ping_pong=True),
    64: _Shape(consumers=3, registers=160, slots=4, parts=1, ping_pong=True),
    128: _Shape(consumers=3, registers=160, slots=4, parts=1, ping_pong=True),
    256: _Shape(consumers=2, registers=240, slots=2, parts=4, ping_pong=False),
}
"""The settings by padded head_dim: the fastest that fit a Hopper's registers and its 227 KiB of shared memory."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    format: str = "e4m3",  # noqa: A002  # the contract's launch settings are keywords
    scaling: str = "hadamard",
) -> tuple[Tensor, Tensor]:
    """Return out and lse, with the arguments, results and errors of ``fp8.forward``.

    dtypes are float16 and bfloat16, head_dim is one of ``HEAD_DIMS``, and ``LAUNCH`` has the launch settings. Any
    device but a Hopper GPU raises NotImplementedError.
    """
    prepared = _prepared(q, k, v, causal, sm_scale, format, scaling)
    out, lse = new_results(q, q.dtype)
    if prepared is None:
        return out.zero_(), lse.fill_(-math.inf)
    quantise_q, quantise_k, quantise_v, attend = prepared
    q8, q_scale = quantise_q(q)
    k8, k_scale = quantise_k(k)
    v8, v_scale = quantise_v(v)
    attend(lse, q8, k8, v8, out, q_scale, k_scale, v_scale)
    return out, lse


@remembered
def _prepared(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, form: str, scaling: str
) -> tuple[fp8.Quantiser, fp8.Quantiser, fp8.Quantiser, Prepared] | None:
    """Check the arguments of a call, and prepare to quantise q, k and v and to attend; None if a tensor is empty."""
    check_settings({"format": form, "scaling": scaling}, LAUNCH)
    check_inputs(q, k, v, causal, sm_scale)
    # The TMA copies quantised tensors, and out, which is dense and has dtype and head_dim of q.
    check_copyable(HEAD_DIMS, q=torch.empty_like(q, device="meta", memory_format=torch.contiguous_format))
    check_device(q)
    if 0 in (q.numel(), k.numel()):  # A tensor descriptor cannot describe an empty tensor.
        return None
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    columns = fp8.columns_of(head_dim)
    shape = _SHAPES[columns]
    heads, group = batch * heads_q, heads_q // heads_kv
    k8 = torch.empty(batch, heads_kv, seqlen_k, columns, dtype=torch.uint8, device="meta")
    dtype, rotate = fp8.FORMATS[form][0], scaling == "hadamard"
    quantise_q = fp8.quantiser(q, ROWS.value, scaling, dtype, rotate=rotate)
    quantise_k = fp8.quantiser(k, KEYS.value, scaling, dtype, rotate=rotate)
    quantise_v = fp8.quantiser(v, KEYS.value, scaling, dtype, transpose=True, interleave=True)
    # q and k are multiplied by M / columns instead of M / sqrt(columns).
    unit = sm_scale * columns if rotate else sm_scale
    of_rows, of_k, of_v = (
        partial(descriptor, rows=rows, columns=width)
        for rows, width in ((ROWS.value, columns), (KEYS.value, columns), (columns, KEYS.value))
    )
    attend = Prepared(
        _forward_kernel,
        min(
            heads * math.ceil(seqlen_q / (shape.consumers * ROWS.value)),
            multiprocessors(q.device),
        ),
        [None, of_rows, of_k, of_v, of_rows, None, None, None],  # lse, q, k, v, out, scales of q, k and v
        *(heads, heads_q, group, heads_together(heads, group * heads_in_cache(k8)) if causal else 1),
        *(seqlen_q, seqlen_k, unit * LOG2E.value),
        CAUSAL=causal,
        CONSUMERS=shape.consumers,
        SLOTS=shape.slots,
        PARTS=shape.parts,
        PING_PONG=shape.ping_pong,
        REGISTERS=shape.registers,
        num_warps=4,
        launch_pdl=True,
    )
    return quantise_q, quantise_k, quantise_v, attend


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    """Return the arithmetic of ``fp8`` with its blocks, but for three things.

    A score is one sum in 14 bits over head_dim, and P v one over the keys of a tile. An instruction adds 32 products to
    the sum so far, and errs by 33 * 2^-13 of the largest of these at most (``HOPPER_FP8_ROUNDOFF``). The sum so far is
    no larger than the sizes of all products together, relative to which a chain of instructions then errs by as much
    for each product as a single one.

    The exponent of a weight is up to 8 more than that of P. It is rounded relative to its size, so that it may err by
    8 U in base 2, or 8 ln 2 U in natural units, beside what the exponents of any kernel err by. A largest weight is
    2^8 but for the rounding of the maximum, before it is cast to 2^8.

    out is multiplied by the reciprocal of l, which rounds once more than a quotient.
    """
    blocks = {"block_m": ROWS.value, "block_n": KEYS.value}
    plain = fp8.KERNEL.capabilities.arithmetic(dtype, device, {**launch, **blocks})
    return replace(
        plain,
        accumulate_terms=KEYS.value,
        score_accumulate=HOPPER_FP8_ROUNDOFF,
        exp_error=plain.exp_error + P_EXPONENT.value * LN2.value * FP32_ROUNDOFF,
        div_error=plain.div_error + FP32_ROUNDOFF,
        rounded_reference=True,
    )


KERNEL = AttentionKernel(
    name="fp8_gluon",
    forward=forward,
    capabilities=Capabilities(
        dtypes=("float16", "bfloat16"),
        head_dims=HEAD_DIMS,
        backward=False,
        deterministic=("out", "lse"),
        launch=LAUNCH,
        arithmetic=_arithmetic,
    ),
)

__getattr__ = unavailable(KERNEL.name, twin="fp8")
