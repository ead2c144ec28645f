"""FlashAttention-3's backward pass for Hopper in Gluon: one warp group loads, the others compute.

Jay Shah et al., *FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision* (2024),
section 3.1 and algorithm 3, for float16 and bfloat16. What is computed is FlashAttention-2 (see ``flash_v2``); who does
what is as in ``flash_v3_gluon``. There are two kernels, so that every sum has one order and results are the same in
every run:

- dk and dv: a program owns a tile of keys, 64 for each consumer, and walks over the query tiles that see it, of all
  query heads of the key head. Scores are held transposed, (keys, rows), so that P and dS stay in registers as they
  enter their products.
- dq: a program owns a tile of queries, 64 for each consumer, and walks over the key tiles as the forward pass does.

Each computes P anew, so there are seven products for a pair of tiles, where ``flash_v3_gluon_atomic``, one kernel that
adds to dq atomically, has five. Neither kernel needs the other: as soon as no program of dk and dv waits for a
multiprocessor, those of dq start where one is free (programmatic dependent launch).

Of a wide head, whose padded head_dim is 256, dk and dv of 64 keys are 32768 float32 numbers: half of all the registers
of a multiprocessor, and more than a consumer has. There the two consumers have the same 64 keys: one computes P and dv,
the other dS and dk. P goes from the one to the other through shared memory, so no product is computed twice.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import triton.language as tl
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.common.deltas import row_deltas
from kernels.common.hopper import (
    ROWS,
    Ring,
    Tasks,
    accumulator,
    check_call,
    descriptor,
    heads_in_cache,
    heads_together,
    new_barriers,
    new_ring,
    new_tiles,
    record,
    start_product,
    tma_load,
    tma_store,
    walk,
)
from kernels.common.launching import is_aligned, multiprocessors, padded_head_dim, remembered
from kernels.common.prepared import Prepared
from kernels.common.tiles import LOG2E, kernel
from kernels.common.validation import check_gradient_inputs


@gluon.jit
def _weights(scores, scale, row_lse, largest=0.0):
    """Return P from unscaled scores, lse in base 2, and the largest exponents that P may have; nan stays nan."""
    # lse is rounded, so it may lie below the largest score, and far below a huge one. P is then at most 1 all the same.
    return gl.exp2(gl.minimum(gl.fma(scores, scale, -row_lse), largest, propagate_nan=tl.PropagateNan.ALL))


@record
class RowRing:
    """A ring of query tiles, as ``Ring``, each of which comes with a float32 number for each of its rows."""

    ring: Ring
    numbers: gl.shared_memory_descriptor

    @gluon.jit
    def fill(self, n, tiles, numbers, batch, head, row):
        """Copy tile ``n`` of a head and its numbers, both from ``row`` on."""
        slot = n % self.ring.SLOTS
        filled = self.ring.filled.index(slot)
        mbarrier.wait(self.ring.freed.index(slot), n // self.ring.SLOTS + 1 & 1)
        mbarrier.expect(filled, tiles.block_type.nbytes + numbers.block_type.nbytes)
        tma_load(tiles, [batch, head, row, 0], filled, self.ring.tiles.index(slot))
        tma_load(numbers, [batch, head, 0, row], filled, self.numbers.index(slot))

    @gluon.jit
    def load_numbers(self, n, LAYOUT: gl.constexpr):
        """Return the numbers of tile ``n``, which has been taken, as (1, rows)."""
        numbers = self.numbers.index(n % self.ring.SLOTS)
        return numbers.reshape([1, numbers.shape[3]]).load(LAYOUT)


@record
class KeyTasks:
    """The tasks of dk and dv, each a (key head, key tile).

    A key tile has the keys of all of a program's consumers. Under a causal mask the most rows see the first tile.
    """

    heads: gl.tensor
    heads_kv: gl.tensor
    group: gl.tensor
    together: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    CAUSAL: gl.constexpr
    TILE_KEYS: gl.constexpr
    BLOCK_ROWS: gl.constexpr

    @gluon.jit
    def count(self):
        """Return how many tasks there are."""
        return self.heads * gl.cdiv(self.seqlen_k, self.TILE_KEYS)

    @gluon.jit
    def get(self, task):
        """Return batch, key head, and first key of a task."""
        tiles = gl.cdiv(self.seqlen_k, self.TILE_KEYS)
        head, tile = walk(task, self.heads, self.together, tiles)
        return head // self.heads_kv, head % self.heads_kv, tile * self.TILE_KEYS

    @gluon.jit
    def query_tiles(self, start_n):
        """Return which query tiles see a task's keys: the first one, and the one after the last.

        There is always a tile, as the last row sees all keys.
        """
        first = 0
        if self.CAUSAL:
            first = gl.maximum(start_n - (self.seqlen_k - self.seqlen_q), 0) // self.BLOCK_ROWS
        return first, gl.cdiv(self.seqlen_q, self.BLOCK_ROWS)

    @gluon.jit
    def query_tiles_of_consumer(self, start_n):
        """Return the first query tile that sees any of a consumer's 64 keys; if there is none, the one after the last.

        And which tiles see all of the keys, and have all of their rows: the first of these, and the one after the last.
        """
        first, tiles = self.query_tiles(start_n)
        whole = 0
        if self.CAUSAL:
            diagonal = start_n - (self.seqlen_k - self.seqlen_q)
            whole = gl.cdiv(gl.maximum(diagonal + ROWS - 1, 0), self.BLOCK_ROWS)
        first = gl.where(start_n < self.seqlen_k, gl.minimum(first, tiles), tiles)
        return first, whole, self.seqlen_q // self.BLOCK_ROWS

    @gluon.jit
    def first_rows(self, keys):
        """Return the first row that sees each of the keys."""
        first_row = gl.full(keys.shape, 0, gl.int32, layout=keys.type.layout)
        if self.CAUSAL:
            first_row = keys - (self.seqlen_k - self.seqlen_q)
        return first_row


@record
class OfKeys:
    """What the producer and the consumers of dk and dv share. Tiles of q come with lse_log2, of dout with delta."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    dout: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    lse_log2: tma.tensor_descriptor
    delta: tma.tensor_descriptor
    sm_scale: gl.tensor
    scale_log2: gl.tensor
    tasks: KeyTasks
    q_ring: RowRing
    do_ring: RowRing
    k_ring: Ring
    v_ring: Ring
    dk_tiles: gl.shared_memory_descriptor
    dv_tiles: gl.shared_memory_descriptor


@record
class _NoReader:
    """Stands for what reads dS beside the products of dk, where dq is computed by a kernel of its own."""

    @gluon.jit
    def largest_exponents(self, keys, seqlen_k):
        """Return 0 for all keys: what is computed of those behind the last one is not stored."""
        return 0.0

    @gluon.jit
    def put(self, n, SELF: gl.constexpr, ds):
        """Do nothing with dS of query tile ``n``."""


@gluon.jit
def load_for_dk_dv(s):
    """Run the producer of dk and dv: it loads the tiles of each task in the order in which they are needed."""
    loaded_k = 0
    loaded = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head_kv, start_n = s.tasks.get(task)
        first, tiles = s.tasks.query_tiles(start_n)
        for _ in gl.static_range(s.tasks.TILE_KEYS // ROWS):
            s.k_ring.fill(loaded_k, s.k, [batch, head_kv, start_n, 0])
            s.v_ring.fill(loaded_k, s.v, [batch, head_kv, start_n, 0])
            start_n += ROWS
            loaded_k += 1
        for head in range(head_kv * s.tasks.group, (head_kv + 1) * s.tasks.group):
            for tile in range(first, tiles):
                s.q_ring.fill(loaded, s.q, s.lse_log2, batch, head, tile * s.tasks.BLOCK_ROWS)
                s.do_ring.fill(loaded, s.dout, s.delta, batch, head, tile * s.tasks.BLOCK_ROWS)
                loaded += 1


@gluon.jit
def compute_dk_dv(s, ds_reader, SELF: gl.constexpr):
    """Run consumer number SELF of dk and dv: it computes 64 keys of each task, and gives ``ds_reader`` dS."""
    dtype: gl.constexpr = s.dk.dtype
    BLOCK_ROWS: gl.constexpr = s.tasks.BLOCK_ROWS
    HEAD_DIM: gl.constexpr = s.dk.block_type.shape[3]
    of_scores: gl.constexpr = accumulator(BLOCK_ROWS, dtype)
    of_gradients: gl.constexpr = accumulator(HEAD_DIM, dtype)
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_gradients, 32 // dtype.primitive_bitwidth)
    rows = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, of_scores))
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_scores))
    taken_k = SELF
    taken = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head_kv, start_n = s.tasks.get(task)
        first, tiles = s.tasks.query_tiles(start_n)
        start_n += SELF * ROWS
        own_first, whole, whole_end = s.tasks.query_tiles_of_consumer(start_n)
        first_row = s.tasks.first_rows(start_n + keys)
        largest = ds_reader.largest_exponents(start_n + keys, s.tasks.seqlen_k)
        dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=of_gradients)
        dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=of_gradients)
        s.k_ring.take(taken_k)
        s.v_ring.take(taken_k)

        for _ in range(s.tasks.group):
            # No row of these tiles sees a key of this consumer.
            for _ in range(first, own_first):
                s.q_ring.ring.skip(taken)
                s.do_ring.ring.skip(taken)
                ds_reader.put(taken, SELF, gl.zeros([ROWS, BLOCK_ROWS], dtype, layout=of_scores))
                taken += 1
            for tile in range(own_first, tiles):
                start_m = tile * BLOCK_ROWS
                q_tile = s.q_ring.ring.take(taken)
                scores = start_product(s.k_ring.again(taken_k, tile), q_tile)
                row_lse = s.q_ring.load_numbers(taken, of_scores)
                do_tile = s.do_ring.ring.take(taken)
                dp = start_product(s.v_ring.again(taken_k, tile), do_tile)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                p = _weights(scores, s.scale_log2, row_lse, largest)
                cut = (tile < whole) | (tile >= whole_end)
                if cut:
                    p = _keep(p, first_row, rows, start_m, s.tasks.seqlen_q)
                dv = warpgroup_mma(gl.convert_layout(p.to(dtype), of_weights), do_tile, dv, is_async=True)
                row_delta = s.do_ring.load_numbers(taken, of_scores)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                ds = p * (dp - row_delta)
                if cut:
                    ds = _keep(ds, first_row, rows, start_m, s.tasks.seqlen_q)
                ds = ds.to(dtype)
                dk = warpgroup_mma(gl.convert_layout(ds, of_weights), q_tile, dk, is_async=True)
                ds_reader.put(taken, SELF, ds)
                dv = warpgroup_mma_wait(1, deps=(dv,))
                s.do_ring.ring.free(taken)
                dk = warpgroup_mma_wait(0, deps=(dk,))
                s.q_ring.ring.free(taken)
                taken += 1
        s.k_ring.free(taken_k)
        s.v_ring.free(taken_k)
        taken_k += s.tasks.TILE_KEYS // ROWS

        tma.store_wait(0)
        s.dk_tiles.index(SELF).reshape([ROWS, HEAD_DIM]).store((dk * s.sm_scale).to(dtype))
        s.dv_tiles.index(SELF).reshape([ROWS, HEAD_DIM]).store(dv.to(dtype))
        fence_async_shared()
        tma_store(s.dk, [batch, head_kv, start_n, 0], s.dk_tiles.index(SELF))
        tma_store(s.dv, [batch, head_kv, start_n, 0], s.dv_tiles.index(SELF))
    tma.store_wait(0)


@gluon.jit
def _keep(transposed, first_row, rows, start_m, seqlen_q):
    """Return a transposed tile, with 0 for the rows that do not see a key, and for those that there are not."""
    seen = (rows[None, :] >= (first_row - start_m)[:, None]) & (rows < seqlen_q - start_m)[None, :]
    return gl.where(seen, transposed, 0.0)


@partial(kernel, jit=gluon.jit)
def _dk_dv_kernel(
    lse_log2,
    delta,
    q,
    k,
    v,
    dout,
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
    CONSUMERS: gl.constexpr,
    SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Compute dk and dv; q, k, v, dout, dk and dv are tensor descriptors whose blocks are tiles.

    The kernel that is launched next may start as soon as all programs of this one have.
    """
    gdc_launch_dependents()
    BLOCK_ROWS: gl.constexpr = q.block_type.shape[2]
    tasks = KeyTasks(
        heads, heads_kv, group, together, seqlen_q, seqlen_k, CAUSAL, CONSUMERS * ROWS, BLOCK_ROWS
    )
    q_ring = RowRing(new_ring(q, SLOTS, CONSUMERS), new_tiles(lse_log2, SLOTS))
    do_ring = RowRing(new_ring(dout, SLOTS, CONSUMERS), new_tiles(delta, SLOTS))
    k_ring = new_ring(k, CONSUMERS, 1)
    v_ring = new_ring(v, CONSUMERS, 1)
    dk_tiles = new_tiles(dk, CONSUMERS)
    dv_tiles = new_tiles(dv, CONSUMERS)
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
            (compute_dk_dv, (shared, _NoReader(), 0)),
            (compute_dk_dv, (shared, _NoReader(), 1)),
            (compute_dk_dv, (shared, _NoReader(), 2)),
        ][: CONSUMERS + 1],
        [4, 4, 4][:CONSUMERS],
        [REGISTERS, REGISTERS, REGISTERS][:CONSUMERS],
    )


@record
class _Passage:
    """A ring of slots in shared memory through which one consumer passes float32 tiles on to another."""

    tiles: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor
    SLOTS: gl.constexpr

    @gluon.jit
    def put(self, n, tile):
        """Store tile ``n`` as soon as its slot is free."""
        slot = n % self.SLOTS
        mbarrier.wait(self.freed.index(slot), n // self.SLOTS + 1 & 1)
        self.tiles.index(slot).store(tile)
        mbarrier.arrive(self.filled.index(slot), count=1)

    @gluon.jit
    def get(self, n, LAYOUT: gl.constexpr):
        """Wait for tile ``n`` and return it."""
        slot = n % self.SLOTS
        mbarrier.wait(self.filled.index(slot), n // self.SLOTS & 1)
        tile = self.tiles.index(slot).load(LAYOUT)
        mbarrier.arrive(self.freed.index(slot), count=1)
        return tile


@gluon.jit
def _compute_dv(s, passage):
    """Run the first consumer of a wide head: it computes P, which it passes on, and dv of 64 keys of each task."""
    dtype: gl.constexpr = s.dv.dtype
    BLOCK_ROWS: gl.constexpr = s.tasks.BLOCK_ROWS
    HEAD_DIM: gl.constexpr = s.dv.block_type.shape[3]
    of_scores: gl.constexpr = accumulator(BLOCK_ROWS, dtype)
    of_gradients: gl.constexpr = accumulator(HEAD_DIM, dtype)
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_gradients, 32 // dtype.primitive_bitwidth)
    rows = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, of_scores))
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_scores))
    taken_k = 0
    taken = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head_kv, start_n = s.tasks.get(task)
        first, tiles = s.tasks.query_tiles(start_n)
        _, whole, whole_end = s.tasks.query_tiles_of_consumer(start_n)
        first_row = s.tasks.first_rows(start_n + keys)
        dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=of_gradients)
        k_tile = s.k_ring.take(taken_k)

        for _ in range(s.tasks.group):
            for tile in range(first, tiles):
                scores = start_product(k_tile, s.q_ring.ring.take(taken))
                row_lse = s.q_ring.load_numbers(taken, of_scores)
                scores = warpgroup_mma_wait(0, deps=(scores,))
                s.q_ring.ring.free(taken)
                p = _weights(scores, s.scale_log2, row_lse)
                if (tile < whole) | (tile >= whole_end):
                    p = _keep(p, first_row, rows, tile * BLOCK_ROWS, s.tasks.seqlen_q)
                passage.put(taken, p)
                p = gl.convert_layout(p.to(dtype), of_weights)
                dv = warpgroup_mma(p, s.do_ring.ring.take(taken), dv, is_async=True)
                dv = warpgroup_mma_wait(0, deps=(dv,))
                s.do_ring.ring.free(taken)
                taken += 1

        k_tile.store(dv.to(dtype))
        fence_async_shared()
        tma_store(s.dv, [batch, head_kv, start_n, 0], s.dv_tiles.index(0))
        tma.store_wait(0)
        s.k_ring.free(taken_k)
        taken_k += 1  # noqa: SIM113, as Gluon has no enumerate


@gluon.jit
def _compute_dk(s, passage):
    """Run the second consumer of a wide head: from the first one's P it computes dS, and dk of the same 64 keys."""
    dtype: gl.constexpr = s.dk.dtype
    BLOCK_ROWS: gl.constexpr = s.tasks.BLOCK_ROWS
    HEAD_DIM: gl.constexpr = s.dk.block_type.shape[3]
    of_scores: gl.constexpr = accumulator(BLOCK_ROWS, dtype)
    of_gradients: gl.constexpr = accumulator(HEAD_DIM, dtype)
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_gradients, 32 // dtype.primitive_bitwidth)
    rows = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, of_scores))
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_scores))
    taken_v = 0
    taken = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head_kv, start_n = s.tasks.get(task)
        first, tiles = s.tasks.query_tiles(start_n)
        _, whole, whole_end = s.tasks.query_tiles_of_consumer(start_n)
        first_row = s.tasks.first_rows(start_n + keys)
        dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=of_gradients)
        v_tile = s.v_ring.take(taken_v)

        for _ in range(s.tasks.group):
            for tile in range(first, tiles):
                dp = start_product(v_tile, s.do_ring.ring.take(taken))
                row_delta = s.do_ring.load_numbers(taken, of_scores)
                p = passage.get(taken, of_scores)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                s.do_ring.ring.free(taken)
                ds = p * (dp - row_delta)
                if (tile < whole) | (tile >= whole_end):
                    ds = _keep(ds, first_row, rows, tile * BLOCK_ROWS, s.tasks.seqlen_q)
                ds = gl.convert_layout(ds.to(dtype), of_weights)
                dk = warpgroup_mma(ds, s.q_ring.ring.take(taken), dk, is_async=True)
                dk = warpgroup_mma_wait(0, deps=(dk,))
                s.q_ring.ring.free(taken)
                taken += 1

        v_tile.store((dk * s.sm_scale).to(dtype))
        fence_async_shared()
        tma_store(s.dk, [batch, head_kv, start_n, 0], s.dk_tiles.index(0))
        tma.store_wait(0)
        s.v_ring.free(taken_v)
        taken_v += 1  # noqa: SIM113, as Gluon has no enumerate


@partial(kernel, jit=gluon.jit)
def _wide_dk_dv_kernel(
    lse_log2,
    delta,
    q,
    k,
    v,
    dout,
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
    SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Compute dk and dv of a wide head, with the arguments of ``_dk_dv_kernel``."""
    gdc_launch_dependents()
    BLOCK_ROWS: gl.constexpr = q.block_type.shape[2]
    tasks = KeyTasks(heads, heads_kv, group, together, seqlen_q, seqlen_k, CAUSAL, ROWS, BLOCK_ROWS)
    q_ring = RowRing(new_ring(q, SLOTS, 2), new_tiles(lse_log2, SLOTS))
    do_ring = RowRing(new_ring(dout, SLOTS, 2), new_tiles(delta, SLOTS))
    k_ring = new_ring(k, 1, 1)
    v_ring = new_ring(v, 1, 1)
    # The pairs of columns that a warp stores at a time, of 8 rows of an accumulator, fall into different banks.
    layout: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    weights = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS, BLOCK_ROWS], layout)
    passage = _Passage(weights, new_barriers(SLOTS, 1), new_barriers(SLOTS, 1), SLOTS)
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
        v_ring.tiles,
        k_ring.tiles,
    )
    gl.warp_specialize(
        [(load_for_dk_dv, (shared,)), (_compute_dv, (shared, passage)), (_compute_dk, (shared, passage))],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


@record
class _OfQueries:
    """What the producer and the consumers of dq share.

    ``OUT_IN_Q`` says that a consumer's tile of dq takes the place of its tile of q.
    """

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    dout: tma.tensor_descriptor
    dq: tma.tensor_descriptor
    lse_log2: gl.tensor
    delta: gl.tensor
    sm_scale: gl.tensor
    scale_log2: gl.tensor
    tasks: Tasks
    q_ring: Ring
    do_ring: Ring
    k_ring: Ring
    v_ring: Ring
    dq_tiles: gl.shared_memory_descriptor
    OUT_IN_Q: gl.constexpr


@gluon.jit
def _load_for_dq(s):
    """Run the producer of dq: it loads the tiles of each task in the order in which they are needed."""
    loaded_q = 0
    loaded = 0
    for task in range(gl.program_id(0), s.tasks.count(), gl.num_programs(0)):
        batch, head, start_m = s.tasks.get(task)
        _, tiles = s.tasks.key_tiles(start_m)
        head_kv = head // s.tasks.group
        for consumer in gl.static_range(s.tasks.TILE_ROWS // ROWS):
            s.q_ring.fill(loaded_q + consumer, s.q, [batch, head, start_m + consumer * ROWS, 0])
            s.do_ring.fill(loaded_q + consumer, s.dout, [batch, head, start_m + consumer * ROWS, 0])
        loaded_q += s.tasks.TILE_ROWS // ROWS
        for i in range(tiles):
            row = (tiles - 1 - i) * s.tasks.BLOCK_KEYS
            s.k_ring.fill(loaded + i, s.k, [batch, head_kv, row, 0])
            s.v_ring.fill(loaded + i, s.v, [batch, head_kv, row, 0])
        loaded += tiles


@gluon.jit
def _compute_dq(s, SELF: gl.constexpr):
    """Run consumer number SELF of dq: it computes 64 rows of each task."""
    dtype: gl.constexpr = s.dq.dtype
    BLOCK_KEYS: gl.constexpr = s.tasks.BLOCK_KEYS
    HEAD_DIM: gl.constexpr = s.dq.block_type.shape[3]
    of_scores: gl.constexpr = accumulator(BLOCK_KEYS, dtype)
    of_gradient: gl.constexpr = accumulator(HEAD_DIM, dtype)
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_gradient, 32 // dtype.primitive_bitwidth)
    keys = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, of_scores))
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
        first_of_head = (batch * s.tasks.heads_q + head).to(gl.int64) * s.tasks.seqlen_q
        in_head = rows < s.tasks.seqlen_q
        row_lse = gl.load(s.lse_log2 + first_of_head + rows, mask=in_head, other=0.0)
        row_delta = gl.load(s.delta + first_of_head + rows, mask=in_head, other=0.0)
        dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=of_gradient)
        s.q_ring.take(taken_q)
        s.do_ring.take(taken_q)

        # No row of this consumer sees a key of these tiles.
        for i in range(tiles - own_tiles):
            s.k_ring.skip(taken + i)
            s.v_ring.skip(taken + i)
        for i in range(tiles - own_tiles, tiles):
            k_tile = s.k_ring.take(taken + i)
            scores = start_product(s.q_ring.again(taken_q, i), k_tile)
            v_tile = s.v_ring.take(taken + i)
            dp = start_product(s.do_ring.again(taken_q, i), v_tile)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            p = _weights(scores, s.scale_log2, row_lse[:, None])
            start_n = (tiles - 1 - i) * BLOCK_KEYS
            cut = tiles - 1 - i >= whole
            if cut:
                p = gl.where(keys[None, :] <= (last_key - start_n)[:, None], p, 0.0)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            s.v_ring.free(taken + i)
            ds = p * (dp - row_delta[:, None])
            if cut:
                ds = gl.where(keys[None, :] <= (last_key - start_n)[:, None], ds, 0.0)
            dq = warpgroup_mma(gl.convert_layout(ds.to(dtype), of_weights), k_tile, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            s.k_ring.free(taken + i)
        if not s.OUT_IN_Q:
            s.q_ring.free(taken_q)
        s.do_ring.free(taken_q)
        taken += tiles

        tma.store_wait(0)
        s.dq_tiles.index(SELF).reshape([ROWS, HEAD_DIM]).store((dq * s.sm_scale).to(dtype))
        fence_async_shared()
        tma_store(s.dq, [batch, head, start_m, 0], s.dq_tiles.index(SELF))
        if s.OUT_IN_Q:
            tma.store_wait(0)
            s.q_ring.free(taken_q)
        taken_q += s.tasks.TILE_ROWS // ROWS
    tma.store_wait(0)


@partial(kernel, jit=gluon.jit)
def _dq_kernel(
    lse_log2,
    delta,
    q,
    k,
    v,
    dout,
    dq,
    sm_scale,
    scale_log2,
    heads,
    heads_q,
    group,
    together,
    seqlen_q,
    seqlen_k,
    CAUSAL: gl.constexpr,
    CONSUMERS: gl.constexpr,
    K_SLOTS: gl.constexpr,
    V_SLOTS: gl.constexpr,
    OUT_IN_Q: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Compute dq; q, k, v, dout and dq are tensor descriptors whose blocks are tiles."""
    BLOCK_KEYS: gl.constexpr = k.block_type.shape[2]
    tasks = Tasks(heads, heads_q, group, together, seqlen_q, seqlen_k, CAUSAL, CONSUMERS * ROWS, BLOCK_KEYS)
    q_ring = new_ring(q, CONSUMERS, 1)
    do_ring = new_ring(dout, CONSUMERS, 1)
    k_ring = new_ring(k, K_SLOTS, CONSUMERS)
    v_ring = new_ring(v, V_SLOTS, CONSUMERS)
    # There are as many slots for q as consumers, so each consumer finds its tiles of q in a slot of its own.
    dq_tiles = q_ring.tiles if OUT_IN_Q else new_tiles(dq, CONSUMERS)
    fence_async_shared()
    shared = _OfQueries(
        q,
        k,
        v,
        dout,
        dq,
        lse_log2,
        delta,
        sm_scale,
        scale_log2,
        tasks,
        q_ring,
        do_ring,
        k_ring,
        v_ring,
        dq_tiles,
        OUT_IN_Q,
    )
    gl.warp_specialize(
        [
            (_load_for_dq, (shared,)),
            (_compute_dq, (shared, 0)),
            (_compute_dq, (shared, 1)),
            (_compute_dq, (shared, 2)),
        ][: CONSUMERS + 1],
        [4, 4, 4][:CONSUMERS],
        [REGISTERS, REGISTERS, REGISTERS][:CONSUMERS],
    )
    # The next launch waits for this kernel alone, so it must not end before the one of dk and dv has.
    gdc_wait()


@dataclass(frozen=True)
class _Shape:
    """The settings that are tuned for each head_dim.

    Attributes:
        consumers: how many warp groups compute.
        registers: registers of each of their threads.
        block_rows: rows of a query tile that dk and dv are computed from.
        row_slots: such tiles in a ring.
        block_keys: keys of a key tile that dq is computed from.
        k_slots: such tiles of k in a ring.
        v_slots: such tiles of v in a ring.
        wide: whether two consumers share 64 keys, and gradients go to memory by way of the tiles of q, k and v.
    """

    consumers: int
    registers: int
    block_rows: int
    row_slots: int
    block_keys: int
    k_slots: int
    v_slots: int
    wide: bool = False


_OF_THREE = _Shape(
    consumers=3, registers=160, block_rows=64, row_slots=3, block_keys=64, k_slots=4, v_slots=4
)
_SHAPES = {
    16: _OF_THREE,
    32: _OF_THREE,
    64: _OF_THREE,
    128: _Shape(consumers=2, registers=240, block_rows=64, row_slots=2, block_keys=128, k_slots=2, v_slots=2),
    256: _Shape(
        consumers=2, registers=240, block_rows=64, row_slots=2, block_keys=64, k_slots=2, v_slots=1, wide=True
    ),
}
"""The settings by padded head_dim.

At head_dim 64 threads of three consumers spill up to 16 registers inside of the loop over query tiles, with Triton
3.6.0 and a causal mask. Yet they beat two consumers, which spill none, by 5 % without a mask on an H200 with 4096 keys,
and are as fast with one. Smaller head dims use the same settings; they were not timed. At larger ones threads spill
at most five registers there, and others between tasks.
"""


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
    """Return the gradients (dq, dk, dv), with the arguments, results and errors of ``flash_v2.backward``.

    q, k and v are those that ``flash_v3_gluon.forward`` takes, and there is nothing beyond a causal mask and sm_scale.
    """
    prepared = _prepared(dout, q, k, v, out, lse, causal, sm_scale)
    dq, dk, dv = (torch.empty(*t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if prepared is None:
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout, out = (t if is_aligned(t) else t.contiguous() for t in (dout, out))
    delta, lse_log2 = row_deltas(dout, out, lse, aligned=True)
    of_keys, of_queries = prepared
    of_keys(for_the_tma(lse_log2), for_the_tma(delta), q, k, v, dout, dk, dv)
    of_queries(lse_log2, delta, q, k, v, dout, dq)
    return dq, dk, dv


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
) -> tuple[Prepared, Prepared] | None:
    """Check the arguments of a call, and prepare the launches of dk and dv, and of dq; None if a tensor is empty."""
    check_call(q, k, v, causal, sm_scale)
    check_gradient_inputs(dout, q, out, lse)
    if 0 in (q.numel(), k.numel()):  # A tensor descriptor cannot describe an empty tensor.
        return None
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    shape = _SHAPES[padded_head_dim(head_dim)]
    group = heads_q // heads_kv
    own = shape.consumers * ROWS.value
    scales = (float(sm_scale), sm_scale * LOG2E.value)
    constants = {"CAUSAL": causal, "REGISTERS": shape.registers, "num_warps": 4}
    own_rows, row_tiles, key_tiles = (
        partial(descriptor, rows=rows) for rows in (ROWS.value, shape.block_rows, shape.block_keys)
    )
    numbers = partial(descriptor, rows=1, columns=shape.block_rows)
    heads = batch * heads_kv
    of_keys = Prepared(
        _wide_dk_dv_kernel if shape.wide else _dk_dv_kernel,
        programs_for(heads * math.ceil(seqlen_k / (ROWS.value if shape.wide else own)), causal, q.device),
        # lse, delta, q, k, v, dout, dk, dv
        [numbers, numbers, row_tiles, own_rows, own_rows, row_tiles, own_rows, own_rows],
        *scales,
        *(heads, heads_kv, group, heads_together(heads, max(1, heads_in_cache(q) // group)) if causal else 1),
        *(seqlen_q, seqlen_k),
        SLOTS=shape.row_slots,
        **constants,
        **({} if shape.wide else {"CONSUMERS": shape.consumers}),
    )
    heads = batch * heads_q
    of_queries = Prepared(
        _dq_kernel,
        programs_for(heads * math.ceil(seqlen_q / own), causal, q.device),
        [None, None, own_rows, key_tiles, key_tiles, own_rows, own_rows],  # lse, delta, q, k, v, dout, dq
        *scales,
        *(heads, heads_q, group, heads_together(heads, group * heads_in_cache(k)) if causal else 1),
        *(seqlen_q, seqlen_k),
        CONSUMERS=shape.consumers,
        K_SLOTS=shape.k_slots,
        V_SLOTS=shape.v_slots,
        OUT_IN_Q=shape.wide,
        launch_pdl=True,
        **constants,
    )
    return of_keys, of_queries


def programs_for(tasks: int, causal: bool, device: torch.device) -> int:
    """Return how many programs walk over the tasks: one for each multiprocessor, or for each task under a causal mask.

    Then tasks take from one tile to all, so the GPU gives the next one to whichever multiprocessor is done first.
    """
    return tasks if causal else min(tasks, multiprocessors(device))


def for_the_tma(rows: Tensor) -> Tensor:
    """Return float32 (batch, heads, seqlen) as (batch, heads, 1, seqlen) of which the TMA can copy tiles."""
    if missing := -rows.shape[2] % 4:  # Each head has to begin at a multiple of 16 bytes.
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.unsqueeze(2)
