"""What Gluon kernels for Hopper share: tiles in shared memory, rings of them, tasks, and how a tensor is described.

In these kernels one warp group loads and the others, the consumers, compute. A tile is a block of the
(seqlen, head_dim) matrix of one head, which the TMA copies. It may reach over the edges of the matrix: there loads give
0, and stores do nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, dataclass_transform

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, ir
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate

from kernels.common.launching import is_hopper, padded_head_dim
from kernels.common.tiles import NEG_INF
from kernels.common.validation import check_copyable, check_inputs

# Renamed between Triton 3.6 and 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_add(descriptor, coordinates, tile, _semantic=None):
    """Start to add a tile in shared memory to a tensor in memory, each number atomically."""
    # Triton has had such a function of its own since 3.9 only, under another name.
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    builder = _semantic.builder
    builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@dataclass_transform()
def record(cls: type) -> Any:
    """Make a class a Gluon aggregate: values that a kernel handles as one, which its constructor takes in order."""

    # From Triton 3.8 on, this is what a class without a constructor gets.
    def constructor(self: Any, *values: Any) -> None:
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(self, name, value)

    constructor.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = constructor  # type: ignore[misc]
    return _aggregate(cls)


HEAD_DIMS = tuple(range(8, 257, 8))
"""The head dims of 16-bit rows that the TMA can copy."""

ROWS = gl.constexpr(64)
"""Rows of a consumer's tile: those of one wgmma instruction."""


@gluon.constexpr_function
def accumulator(columns, dtype):
    """Return the register layout of a wgmma accumulator with 64 rows and this many columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // dtype.primitive_bitwidth]
    )


@record
class Ring:
    """A ring of slots in shared memory, which the producer fills with tiles and the consumers free, in turn.

    Tile ``n`` is in slot ``n % SLOTS``. A barrier's phase, 0 or 1, tells whether a slot was used an even or an odd
    number of times. To wait for phase 1 of a new barrier does not block, so the first tiles are copied at once.
    """

    tiles: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor
    SLOTS: gl.constexpr

    @gluon.jit
    def fill(self, n, descriptor, coordinates):
        """Copy tile ``n`` into its slot as soon as all consumers have freed it."""
        slot = n % self.SLOTS
        mbarrier.wait(self.freed.index(slot), n // self.SLOTS + 1 & 1)
        mbarrier.expect(self.filled.index(slot), descriptor.block_type.nbytes)
        tma_load(descriptor, coordinates, self.filled.index(slot), self.tiles.index(slot))

    @gluon.jit
    def take(self, n):
        """Wait for tile ``n`` and return it as (rows, head_dim)."""
        slot = n % self.SLOTS
        mbarrier.wait(self.filled.index(slot), n // self.SLOTS & 1)
        tile = self.tiles.index(slot)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def again(self, n, step):
        """Return tile ``n``, which was taken ahead of a loop, in one of the steps of that loop, below 2^30.

        Two registers say where 16 columns of an operand lie. Those of a tile that stays the same are hoisted out of the
        loop, all of them, and spilled. Here they seem to depend on the step, so they are made as they are needed.
        """
        tile = self.tiles.index(n % self.SLOTS + (step >> 30))
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def free(self, n):
        """Say that this consumer is done with tile ``n``."""
        mbarrier.arrive(self.freed.index(n % self.SLOTS), count=1)

    @gluon.jit
    def skip(self, n):
        """Say that this consumer does without tile ``n``, once it is there: a barrier counts one tile at a time."""
        self.take(n)
        self.free(n)


@gluon.jit
def wait_for_turn(s, n, SELF: gl.constexpr):
    """Wait for turn number ``n`` of consumer number SELF, if consumers take turns.

    What they share, ``s``, has ``turns``, a barrier for each of them, how many CONSUMERS there are, and whether they
    PING_PONG.
    """
    if s.PING_PONG:
        mbarrier.wait(s.turns.index(SELF), n & 1)


@gluon.jit
def end_turn(s, SELF: gl.constexpr):
    """Give the next consumer its turn, if consumers take turns."""
    if s.PING_PONG:
        mbarrier.arrive(s.turns.index((SELF + 1) % s.CONSUMERS), count=1)


@gluon.jit
def new_tiles(descriptor, COUNT: gl.constexpr):
    """Allocate shared memory for COUNT of a descriptor's blocks."""
    shape: gl.constexpr = [COUNT] + descriptor.block_type.shape  # noqa: RUF005
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate mbarriers, each of which enters its next phase after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def new_ring(descriptor, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Make a ring of tiles, each of which CONSUMERS consumers read."""
    return Ring(new_tiles(descriptor, SLOTS), new_barriers(SLOTS, 1), new_barriers(SLOTS, CONSUMERS), SLOTS)


@gluon.jit
def start_product(a_tile, b_tile):
    """Start the asynchronous product a @ b^T of two tiles of (rows, head_dim) in shared memory, a having 64 rows."""
    COLUMNS: gl.constexpr = b_tile.shape[0]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout=accumulator(COLUMNS, a_tile.dtype))
    return warpgroup_mma(a_tile, b_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def partial_sums(p):
    """Return four sums of each of 64 rows, one for each thread that holds it, which need not wait for each other.

    Thread t of the four has columns 2 t and 2 t + 1 of every 8: the layout of a wgmma accumulator.
    """
    return gl.sum(gl.sum(p.reshape([ROWS, p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def walk(task, heads, together, tiles):
    """Return the head of a task, and its tile, where tile 0 of a head takes the longest and the last one the shortest.

    Programs take tasks in turn, of ``together`` heads at a time, whose tensors stay in the L2 cache. These heads'
    tasks go from the longest to the shortest, and those of the next heads back again: a program that has had the
    longer tasks of some heads then has the shorter ones of others. The last heads end with their shortest tasks.
    """
    first = task // (together * tiles) * together
    walked = gl.minimum(together, heads - first)
    place = task - first * tiles
    if (gl.cdiv(heads, together) - first // together) % 2 == 0:
        place = walked * tiles - 1 - place
    return first + place % walked, place // walked


@gluon.jit
def hide(scores, last_key, start_n):
    """Return the scores, with -inf for the keys that a row does not see."""
    BLOCK_KEYS: gl.constexpr = scores.shape[1]
    keys = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, scores.type.layout))
    return gl.where(keys[None, :] <= (last_key - start_n)[:, None], scores, NEG_INF)


@record
class Tasks:
    """The tasks, each a (head, query tile).

    A query tile has the rows of all of a program's consumers. Under a causal mask the last tile sees the most
    keys.
    """

    heads: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor
    together: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    CAUSAL: gl.constexpr
    TILE_ROWS: gl.constexpr
    BLOCK_KEYS: gl.constexpr

    @gluon.jit
    def count(self):
        """Return how many tasks there are."""
        return self.heads * gl.cdiv(self.seqlen_q, self.TILE_ROWS)

    @gluon.jit
    def get(self, task):
        """Return batch, query head, and first row of a task."""
        tiles = gl.cdiv(self.seqlen_q, self.TILE_ROWS)
        head, tile = walk(task, self.heads, self.together, tiles)
        return head // self.heads_q, head % self.heads_q, (tiles - 1 - tile) * self.TILE_ROWS

    @gluon.jit
    def key_tiles(self, start_m):
        """Return how many key tiles all rows of a task see as a whole, and how many any row sees at least in part.

        The latter is at least 1: a task whose rows see no key still takes one tile, which is masked as a whole.
        """
        return self._key_tiles(start_m, self.TILE_ROWS)

    @gluon.jit
    def key_tiles_of_consumer(self, start_m):
        """Return the same as ``key_tiles``, for the 64 rows of a task that one consumer computes.

        Under a causal mask, where the last task takes the longest, rows behind the last one have a single tile.
        """
        whole, tiles = self._key_tiles(start_m, ROWS)
        if self.CAUSAL:
            tiles = gl.where(start_m < self.seqlen_q, tiles, 1)
        return whole, tiles

    @gluon.jit
    def _key_tiles(self, start_m, NUMBER: gl.constexpr):
        """Return which key tiles NUMBER rows from start_m on see, in the form of ``key_tiles``."""
        whole = self.seqlen_k // self.BLOCK_KEYS
        tiles = gl.cdiv(self.seqlen_k, self.BLOCK_KEYS)
        if self.CAUSAL:
            end = gl.maximum(start_m + self.seqlen_k - self.seqlen_q, -NUMBER)
            whole = gl.minimum(gl.maximum(end + 1, 0) // self.BLOCK_KEYS, whole)
            tiles = gl.minimum(gl.cdiv(end + NUMBER, self.BLOCK_KEYS), tiles)
        return whole, gl.maximum(tiles, 1)


def check_call(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, head_dims: Sequence[int] = HEAD_DIMS
) -> None:
    """Check what every kernel takes, and that the TMA of a Hopper GPU can copy q, k and v of one of ``head_dims``."""
    check_inputs(q, k, v, causal, sm_scale)
    check_copyable(head_dims, q=q, k=k, v=v)
    check_device(q)


def check_device(q: Tensor) -> None:
    """Raise NotImplementedError for a tensor that is not on a Hopper GPU."""
    if not is_hopper(q.device):
        raise NotImplementedError(f"q: got a tensor on {q.device}, expected one on a Hopper GPU")


def unavailable(name: str, twin: str) -> Callable[[str], Mapping[tuple[str, str], str]]:
    """Return the ``__getattr__`` of a module that has a kernel in Gluon, which makes UNAVAILABLE when it is asked for.

    That says why the kernel cannot run here, by (name, device type). Looking at a GPU takes memory on it, so this is
    not done when the module is imported. ``twin`` is the name of the kernel in ``triton.language`` that computes the
    same. Any other attribute raises AttributeError.
    """

    def attribute(asked: str) -> Mapping[tuple[str, str], str]:
        if asked != "UNAVAILABLE":
            raise AttributeError(f"the module of {name} has no attribute {asked!r}")
        reasons = {(name, "cpu"): f"Gluon does not run in Triton's interpreter; its plain twin, {twin}, does"}
        if torch.cuda.is_available() and not is_hopper(torch.device("cuda")):
            reasons[name, "cuda"] = f"needs a Hopper GPU; its plain twin, {twin}, does not"
        return reasons

    return attribute


_CACHED_BYTES = 2**25
"""This many bytes of two tensors stay in a Hopper's L2 cache of 50 MiB, beside everything else that passes it."""


def heads_in_cache(tensor: Tensor) -> int:
    """Return of how many heads two tensors like this one stay in the L2 cache; at least 1."""
    _, _, seqlen, head_dim = tensor.shape
    return max(1, _CACHED_BYTES // (2 * seqlen * head_dim * tensor.element_size()))


def heads_together(heads: int, most: int) -> int:
    """Return how many heads to ``walk`` at a time, at most ``most``.

    They are walked an even number of times, if their number allows it, and as many each time.
    """
    times = math.ceil(heads / most)
    return math.ceil(heads / (times + times % 2))


@dataclass
class Tiles(TensorDescriptor):
    """A tensor in tiles of a ``kind``, which says all that a kernel is compiled for."""

    kind: Any = None

    def __post_init__(self) -> None:
        """Leave out Triton's checks, which take microseconds: launchers have made sure that the TMA can copy it."""


def descriptor(tensor: Tensor, rows: int, columns: int | None = None) -> Tiles:
    """Describe the tensor in tiles of so many rows and columns, which may reach over its edges: loads give 0 there.

    If ``columns`` is None, a tile has all columns.
    """
    shape = tensor.shape
    kind = (tensor.dtype, rows, columns or padded_head_dim(shape[3]))
    return Tiles(tensor, shape, tensor.stride(), *_tile(*kind), kind=kind)


@cache
def _tile(dtype: torch.dtype, rows: int, columns: int) -> tuple[list[int], Any]:
    """Return the block of a tensor that a tile is, and how the tile lies in shared memory."""
    block = [1, 1, rows, columns]
    if rows == 1:  # These are numbers of rows, not operands of a product.
        return block, gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
    return block, gl.NVMMASharedLayout.get_default_for(block, _DTYPES[dtype])


_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.float32: gl.float32,
}
