"""Strides: a tensor that is read by the strides of another one, or as if it were contiguous."""

import math
from collections.abc import Collection

from torch import Tensor

from reference.alternatives.declaration import (
    BACKWARD,
    DK_AND_DV,
    EVERY,
    OUT_AND_LSE,
    Change,
    Given,
    Moved,
    alternative,
)
from reference.bounds import Exact

READ = ("q", "k", "v", "dout")
DIMENSIONS = ("batches", "heads", "rows", "columns")


class LeavesMemory(LookupError):
    """A kernel that computes an alternative reads memory behind a tensor, of which nothing is known."""


def by_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return what is read of a tensor by other strides. Raises LeavesMemory where that leaves its memory."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True) if size)
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if not x.numel() or min(strides) < 0 or last >= room:
        raise LeavesMemory("these strides leave the tensor's memory")
    return x.as_strided(x.shape, strides, x.storage_offset())


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@alternative("{tensor} is read as if it were contiguous", scopes=(EVERY, OUT_AND_LSE, BACKWARD), tensor=READ)
def as_contiguous(tensor: str) -> Change:
    """Strides are computed from shapes."""

    def call(g: Given) -> Given:
        x = g[tensor]
        if x.is_contiguous():
            return g
        return {**g, tensor: by_strides(x, contiguous_strides(x.shape))}

    return Change(call=call)


@alternative(
    "{tensor} is read by the strides of {other}",
    scopes=(EVERY, OUT_AND_LSE, BACKWARD),
    tensor=READ,
    other=(*READ, "out"),
)
def by_strides_of(tensor: str, other: str) -> Change:
    """One tensor's strides are passed for another's."""
    return Change(call=lambda g: _with_strides(tensor, other, range(4), g))


@alternative(
    "{what} of {tensor} are read by the strides of {other}",
    scopes=(EVERY, OUT_AND_LSE, BACKWARD, ("dq",), DK_AND_DV),
    when=lambda g: len({g[name].stride() for name in READ if g.get(name) is not None}) > 1,
    tensor=READ,
    other=(*READ, "out"),
    what=DIMENSIONS,
)
def one_stride_of(tensor: str, other: str, what: str) -> Change:
    """One tensor's stride is passed for another's."""
    return Change(call=lambda g: _with_strides(tensor, other, [DIMENSIONS.index(what)], g))


def _with_strides(tensor: str, other: str, dims: Collection[int], g: Given) -> Given:
    """Return the call with a tensor that is read by the strides of another one in some dimensions."""
    if g.get(other) is None or tensor == other or (len(dims) == 1 and g[tensor].shape != g[other].shape):
        return g
    own, found = g[tensor].stride(), g[other].stride()
    strides = tuple(found[dim] if dim in dims else own[dim] for dim in range(4))
    return g if strides == own else {**g, tensor: by_strides(g[tensor], strides)}


@alternative(
    "{tensor} is read from the start of its storage: its offset is ignored",
    scopes=(EVERY, OUT_AND_LSE, BACKWARD),
    tensor=READ,
)
def offset_ignored(tensor: str) -> Change:
    """The pointer is that of the storage."""
    return Change(call=lambda g: {**g, tensor: g[tensor].as_strided(g[tensor].shape, g[tensor].stride(), 0)})


@alternative(
    "{tensors} is stored by the strides of {other}",
    scopes=(("out",), *((name,) for name in BACKWARD)),
    other=(*READ, "out", *BACKWARD),
)
def stored_by_strides_of(other: str) -> Change:
    """One tensor's strides are passed for another's; what is not stored is 0."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        def of(name: str) -> Moved:
            def move(x: Tensor) -> Tensor:
                strides, own = g[other].stride(), g[name].stride()
                if g[other].shape != x.shape or min(strides) <= 0:
                    return x
                memory = x.new_zeros(max(by(x.shape, strides), by(x.shape, own)))
                memory.as_strided(x.shape, strides).copy_(x)
                return memory.as_strided(x.shape, own)

            return lambda value, bound: (move(value), move(bound))

        return {name: of(name) for name in ("out", *BACKWARD) if g.get(name) is not None and other in g}

    return Change(results=results)


@alternative(
    "sequences of {tensors} are stored as far apart as those of {other}",
    scopes=(("out",), *((name,) for name in BACKWARD)),
    when=lambda g: len(g["q"]) > 1 and g["q"].shape[1:3] != g["k"].shape[1:3],
    other=("k", "q"),
)
def sequences_of(other: str) -> Change:
    """The distance between sequences in memory follows from another tensor's shape; what is never stored is 0."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        def move(x: Tensor) -> Tensor:
            apart, own = math.prod(g[other].shape[1:3]), math.prod(x.shape[1:3])
            memory = x.new_zeros((len(x) - 1) * max(apart, own) + own, x.shape[-1])
            for number, sequence in enumerate(x):
                memory[number * apart : number * apart + own] = sequence.flatten(0, 1)
            return memory[: len(x) * own].view(x.shape)

        return dict.fromkeys(("out", *BACKWARD), lambda value, bound: (move(value), move(bound)))

    return Change(results=results)


def by(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements of memory a tensor with these strides reaches over."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
