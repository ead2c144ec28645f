"""What the code of a kernel calls to bring tensors into other shapes, to multiply matrices, to reduce and to scan."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.harness.interpreter.formats import matrix_product
from tests.harness.interpreter.ttir.calls.numbers import DTYPES, Array

Shape = tuple[int, ...]


def filled(x: Any, shape: Shape) -> Array:
    """Return an array as large as its tensor in all dimensions but that of the programs."""
    if x.shape[1:] == shape:
        return x
    return np.broadcast_to(x, (x.shape[0], *shape))


def array(x: Any, rank: int, element: str) -> Array:
    """Return a number as an array of a tensor with so many dimensions."""
    return np.full((1,) * (rank + 1), x, DTYPES[element])


def reshaped(x: Array, source: Shape, shape: Shape) -> Array:
    """Return a tensor in another shape."""
    return filled(x, source).reshape(x.shape[0], *shape)


def with_ones(x: Array, dimensions: Sequence[int]) -> Array:
    """Return a tensor with dimensions of size 1 taken away or put in: each is given by its number in x, or as 0."""
    return x.reshape(x.shape[0], *(x.shape[i] if i else 1 for i in dimensions))


def dot(a: Array, b: Array, a_shape: Shape, b_shape: Shape, precision: str = "ieee") -> Array:
    """Return the product of matrices, whose operands are taken in a precision: see ``matrix_product``."""
    return matrix_product(filled(a, a_shape), filled(b, b_shape), precision)


def integer_dot(a: Array, b: Array, a_shape: Shape, b_shape: Shape) -> Array:
    """Return the product of matrices of integers, which is exact."""
    return dot(a.astype(np.float64), b.astype(np.float64), a_shape, b_shape).astype(np.int64).astype(np.int32)


def reduce_by(function: Any, x: Array, axis: int, shape: Shape) -> Array:
    """Reduce a tensor along an axis, which is counted with that of the programs, by a function of NumPy."""
    x = filled(x, shape)
    found = function.reduce(x, axis=axis)
    return found if found.dtype == x.dtype else found.astype(x.dtype)


def reduce_pairs(
    combine: Callable[..., tuple[Any, ...]], tensors: Sequence[Array], axis: int, shape: Shape
) -> tuple[Array, ...]:
    """Reduce tensors along an axis: combine each second entry with its neighbour, until one entry is left."""
    lead = max(x.shape[0] for x in tensors)
    parts = [np.moveaxis(np.broadcast_to(x, (lead, *shape)), axis, 0) for x in tensors]
    while len(parts[0]) > 1:
        last = [x[-1:] for x in parts] if len(parts[0]) % 2 else None
        pairs = [x[first : len(x) // 2 * 2 : 2] for first in (0, 1) for x in parts]
        halves = [np.broadcast_to(x, pairs[0].shape) for x in combine(*pairs)]
        parts = halves if last is None else [np.concatenate(x) for x in zip(halves, last, strict=True)]
    return tuple(x[0] for x in parts)


def scan_by(function: Any, x: Array, axis: int, shape: Shape, *, reverse: bool) -> Array:
    """Accumulate a tensor along an axis by a function of NumPy."""
    x = filled(x, shape)
    x = np.flip(x, axis) if reverse else x
    found = function.accumulate(x, axis=axis, dtype=x.dtype)
    return np.flip(found, axis) if reverse else found


def scan_each(
    combine: Callable[..., tuple[Any, ...]],
    tensors: Sequence[Array],
    axis: int,
    shape: Shape,
    *,
    reverse: bool,
) -> tuple[Array, ...]:
    """Accumulate tensors along an axis, entry after entry."""
    lead = max(x.shape[0] for x in tensors)
    parts = [np.moveaxis(np.broadcast_to(x, (lead, *shape)), axis, 0) for x in tensors]
    parts = [x[::-1] for x in parts] if reverse else parts
    rows = [tuple(x[0] for x in parts)]
    for i in range(1, len(parts[0])):
        rows.append(combine(*rows[-1], *(x[i] for x in parts)))
    of = parts[0].shape[1:]
    found = [np.stack([np.broadcast_to(row[j], of) for row in rows]) for j in range(len(parts))]
    found = [x[::-1] for x in found] if reverse else found
    return tuple(np.moveaxis(x, 0, axis) for x in found)


def together(tensors: Sequence[Array], shape: Shape) -> list[Array]:
    """Return tensors of one shape with the same first dimension."""
    lead = max(x.shape[0] for x in tensors)
    return [np.broadcast_to(x, (lead, *shape)) for x in tensors]


def join(a: Array, b: Array, shape: Shape) -> Array:
    """Return two tensors as one with a last dimension of size 2."""
    return np.stack(together((a, b), shape), -1)


def split(x: Array, shape: Shape) -> tuple[Array, Array]:
    """Return the halves of a tensor whose last dimension has size 2."""
    x = filled(x, shape)
    return x[..., 0], x[..., 1]


def cat(a: Array, b: Array, shape: Shape) -> Array:
    """Return one tensor behind another one."""
    return np.concatenate(together((a, b), shape), 1)


def gather(x: Array, indices: Array, axis: int, shape: Shape, index_shape: Shape) -> Array:
    """Return the entries of a tensor that lie at indices along an axis."""
    lead = max(x.shape[0], indices.shape[0])
    x, indices = np.broadcast_to(x, (lead, *shape)), np.broadcast_to(indices, (lead, *index_shape))
    return np.take_along_axis(x, indices, axis)


def histogram(x: Array, mask: Any, bins: int, shape: Shape) -> Array:
    """Count how often each number from 0 to ``bins`` - 1 occurs."""
    lead = max(x.shape[0], mask.shape[0] if isinstance(mask, np.ndarray) else 1)
    x = np.broadcast_to(x, (lead, *shape))
    inside = np.broadcast_to((x >= 0) & (x < bins) & mask, x.shape)
    counts = [np.bincount(row[kept], minlength=bins) for row, kept in zip(x, inside, strict=True)]
    return np.stack(counts).astype(np.int32)
