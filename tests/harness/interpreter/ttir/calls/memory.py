"""Loads and stores of all programs at once, within the tensors that a kernel was given.

An offset is a sum of parts, in elements from the beginning of a storage: arrays that need not be as large as the
tensor of pointers. Where one part alone changes along a dimension, and does so in equal steps, whole rows are copied
along it. A place outside of the storage is never touched: it is entered among the ``outside`` of the memory, a load
gets poison from there, and a store does nothing.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.harness.interpreter.ttir.calls.numbers import Array, raw_dtype

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Outside:
    """An access outside of a tensor.

    Attributes:
        kind: "load", "store" or "atomic"; "unwritten" if what is loaded lies inside but was never written.
        tensor: the parameter that the pointer comes from.
        address: of that element.
        item: the bytes of an element.
        program: the number of the first program that does it.
        place: the number of the operation.
    """

    kind: str
    tensor: str
    address: int
    item: int
    program: int
    place: int


@dataclass
class Memory:
    """The storage of a tensor that a kernel is given a pointer to.

    Attributes:
        name: the parameter.
        flat: the elements of the storage as they lie in memory.
        address: where the storage begins.
        element: the type of the elements in TTIR.
        outside: accesses outside of it, of all tensors of the launch.
        spans: the storages that it reaches over, if it is that of a pointer to one of several tensors.
        unwritten: the bits of elements that nobody has written, if loads of these are to be told.
    """

    name: str
    flat: Array
    address: int
    element: str
    outside: list[Outside] = field(repr=False)
    spans: tuple["Memory", ...] = ()
    unwritten: int | None = None

    def inside(self, offsets: Any) -> Any:
        """Return which offsets are those of elements."""
        if not self.spans:
            return (offsets >= 0) & (offsets < self.flat.size)
        found: Any = False
        for span in self.spans:
            begin = self.moved(span, 0)
            found = found | ((offsets >= begin) & (offsets < begin + span.flat.size))
        return found

    def moved(self, other: "Memory", offset: Any) -> Any:
        """Return an offset in another memory as one in this memory, which has it inside."""
        return offset + (other.address - self.address) // self.flat.itemsize

    def rows(self, length: int, step: int) -> Array:
        """Return a view of all rows of ``length`` elements that lie ``step`` apart: [i, j] is element i + j * step."""
        size = self.flat.itemsize
        count = self.flat.size - (length - 1) * step
        return np.ndarray((count, length), self.flat.dtype, self.flat, 0, (size, size * step))

    @property
    def poison(self) -> Any:
        """Return what a load from outside gives: NaN, or 0 of integers."""
        return _poison(self.element)

    def as_type(self, element: str) -> "Memory":
        """Return the same storage with elements of another type."""
        dtype = raw_dtype(element)
        found = self.flat.view(np.uint8)
        return Memory(
            self.name,
            found[: found.size // dtype.itemsize * dtype.itemsize].view(dtype),
            self.address,
            element,
            self.outside,
        )


_POISON = {"f16": 0x7FFF, "bf16": 0x7FFF, "f8E4M3FN": 0x7F, "f8E5M2": 0x7F}


def _poison(element: str) -> Any:
    dtype = raw_dtype(element)
    if element in _POISON:
        return np.array(_POISON[element], f"u{dtype.itemsize}").view(dtype)[()]
    return dtype.type(np.nan) if dtype.kind == "f" else dtype.type(0x80 if element.startswith("f8") else 0)


def elements_at(address: int, size: int, dtype: np.dtype[Any]) -> Array:
    """Return so many bytes of this process as elements."""
    buffer: Any = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(buffer, dtype)


def memory_at(
    name: str, address: int, size: int, start: int, element: str, outside: list[Outside]
) -> tuple[Memory, int]:
    """Return the memory of a tensor, and the offset in elements of where its pointer points.

    Args:
        name: the parameter.
        address: where the storage begins.
        size: bytes of the storage.
        start: the address that the pointer has.
        element: the type of the elements.
        outside: where accesses outside of it are entered.
    """
    dtype = raw_dtype(element)
    skipped = (start - address) % dtype.itemsize
    count = max(0, size - skipped) // dtype.itemsize
    flat = elements_at(address + skipped, count * dtype.itemsize, dtype) if count else np.empty(0, dtype)
    return Memory(name, flat, address + skipped, element, outside), (start - address) // dtype.itemsize


def anywhere(*memories: Memory) -> Memory:
    """Return one memory that reaches over those of several tensors, of which no place between them is touched."""
    first = min(memories, key=lambda x: x.address)
    end = max(x.address + x.flat.nbytes for x in memories)
    size = (end - first.address) // first.flat.itemsize * first.flat.itemsize
    flat = elements_at(first.address, size, first.flat.dtype)
    spans = tuple(span for x in memories for span in (x.spans or (x,)))
    name = " or ".join(dict.fromkeys(x.name for x in spans))
    return Memory(name, flat, first.address, first.element, first.outside, spans)


def as_offsets(x: Any, rank: int) -> Array:
    """Return an offset as an array of a tensor with so many dimensions."""
    return x if isinstance(x, np.ndarray) else np.full((1,) * (rank + 1), x, np.int64)


def as_scalars(x: Any) -> Array:
    """Return what was loaded as an array of one number for each program, or for all of them."""
    return x if isinstance(x, np.ndarray) else np.array([x])


def summed(base: int, parts: Sequence[Any]) -> Any:
    """Return the sum of parts of an offset: a number, or an array of int64."""
    found: Any = base
    for part in parts:
        if isinstance(part, np.ndarray) and part.dtype != np.int64:
            part = part.astype(np.int64)
        found = part if isinstance(found, int) and found == 0 else found + part
    return found


def conjunction(masks: Sequence[Any]) -> Any:
    """Return whether all masks hold, element by element: True or False if it is the same everywhere."""
    found: Any = True
    for mask in masks:
        if not isinstance(mask, np.ndarray):
            if not mask:
                return False
        elif found is True:
            found = mask
        else:
            found = found & mask
    return found


def step_of(part: Array) -> tuple[int, int] | None:
    """Return the first entry and the step of a part that changes in equal steps, unless it wraps around."""
    first, last = part.item(0), part.item(part.size - 1)
    step = part.item(1) - first
    return (first, step) if last - first == step * (part.size - 1) else None


@dataclass
class Rows:
    """An access row by row: where the rows begin, how long they are, and which of them and of their columns count."""

    starts: Any
    step: int
    length: int
    axis: int
    mask: Any
    width: int


def rows_of(
    memory: Memory,
    base: int,
    parts: Sequence[Any],
    stepping: Sequence[tuple[int, Array]],
    masks: Sequence[Any],
    shape: Shape,
) -> Rows | None:
    """Return how an access can be made row by row; None if it can't."""
    best = None
    if memory.spans:  # between which a row may lie
        return None
    for number, (axis, part) in enumerate(stepping):
        if part.size == 1 or part.size != part.shape[axis] or part.size != shape[axis - 1]:
            continue
        found = step_of(part)
        if found and found[1] > 0 and (best is None or found[1] < best[1]):
            best = (number, found[1], found[0], axis)
    if best is None:
        return None
    number, step, first, axis = best
    others = [*parts, *(part for i, (_, part) in enumerate(stepping) if i != number)]
    if any(isinstance(x, np.ndarray) and x.shape[axis] != 1 for x in others):
        return None
    of_rows: Any = True
    width = length = shape[axis - 1]
    for mask in masks:
        if not isinstance(mask, np.ndarray):
            if not mask:
                return None
        elif mask.shape[axis] == 1:
            of_rows = mask if of_rows is True else of_rows & mask
        elif mask.size == length:
            count = int(np.count_nonzero(mask))
            if not mask.ravel()[:count].all():
                return None
            width = min(width, count)
        else:
            return None
    if of_rows is not True and of_rows.all():
        of_rows = True
    return Rows(summed(base + first, others), step, length, axis, of_rows, width)


def load(
    memory: Memory,
    programs: Array,
    base: int,
    parts: Sequence[Any],
    stepping: Sequence[tuple[int, Array]],
    masks: Sequence[Any],
    other: Any,
    shape: Shape,
    place: int,
) -> Any:
    """Load a tensor, or a number where all of the offset is the same in all programs.

    Args:
        memory: where from.
        programs: the numbers of the programs that do it.
        base: an offset.
        parts: further parts of the offset.
        stepping: parts that change in equal steps along one dimension, each with its number.
        masks: where all of these hold, memory is read.
        other: what is given elsewhere.
        shape: that of the tensor.
        place: the number of the operation.
    """
    rows = rows_of(memory, base, parts, stepping, masks, shape)
    found = _load_rows(memory, rows, other) if rows else None
    if found is None:
        offsets = summed(base, [*parts, *(part for _, part in stepping)])
        found = _load_each(memory, programs, offsets, conjunction(masks), other, shape, place)
    if memory.unwritten is not None:
        bits = np.asarray(found, memory.flat.dtype).view(f"u{memory.flat.itemsize}")
        if (bits == memory.unwritten).any():
            offsets = np.asarray(summed(base, [*parts, *(part for _, part in stepping)]))
            _tell(memory, "unwritten", offsets, bits == memory.unwritten, programs, place)
    return found


def _load_each(
    memory: Memory, programs: Array, offsets: Any, mask: Any, other: Any, shape: Shape, place: int
) -> Any:
    """Load element by element, or a number; ``mask`` is True or False if it is the same everywhere."""
    if mask is False:
        fill = memory.flat.dtype.type(0) if other is None else other
        if not shape and isinstance(offsets, int) and not isinstance(fill, np.ndarray):
            return _scalar(fill) if isinstance(fill, np.generic) else fill
        return np.full((1,) * (len(shape) + 1), fill, memory.flat.dtype) if np.ndim(fill) == 0 else fill
    if isinstance(offsets, int):
        if not shape and mask is True:
            if memory.inside(offsets):
                return _scalar(memory.flat[offsets])
            _tell(memory, "load", np.array([offsets]), True, programs, place)
            return _scalar(memory.poison)
        offsets = np.full((1,) * (len(shape) + 1), offsets)
    return _gather(memory, programs, offsets, mask, other, place)


def _scalar(x: Any) -> Any:
    return x.item() if x.dtype.kind in "ib" else x


def _load_rows(memory: Memory, rows: Rows, other: Any) -> Array | None:
    """Load row by row; None if a row leaves the storage, which is then looked at element by element."""
    starts, mask, width = rows.starts, rows.mask, rows.width
    if width == 0 or isinstance(starts, int):
        return None
    size = memory.flat.size
    if mask is not True:
        if not mask.any():
            return None
        if starts.shape != mask.shape:
            starts, mask = np.broadcast_arrays(starts, mask)
        kept = starts[mask]
        low, high = int(kept.min()), int(kept.max())
        starts = np.where(mask, starts, low)
    else:
        low, high = int(starts.min()), int(starts.max())
    if low < 0 or high + (width - 1) * rows.step >= size:
        return None
    length = rows.length
    reaches = high + (length - 1) * rows.step < size
    first = starts.squeeze(rows.axis) if rows.axis != starts.ndim - 1 else starts[..., 0]
    found = memory.rows(length if reaches else width, rows.step)[first]
    fill = 0 if other is None else other
    if width < length:
        if isinstance(fill, np.ndarray):
            return None
        if reaches:
            found[..., width:] = fill
        else:
            whole = np.full((*found.shape[:-1], length), fill, found.dtype)
            whole[..., :width] = found
            found = whole
    if mask is not True:
        if isinstance(fill, np.ndarray):
            return None
        found[~(mask.squeeze(rows.axis))] = fill
    if rows.axis == found.ndim - 1:
        return found
    return np.ascontiguousarray(np.moveaxis(found, -1, rows.axis))


def _gather(memory: Memory, programs: Array, offsets: Array, mask: Any, other: Any, place: int) -> Array:
    """Load the elements at an array of offsets."""
    flat = memory.flat
    inside = memory.inside(offsets)
    if mask is True and inside.all():
        return flat[offsets]
    wrong = ~inside if mask is True else mask & ~inside
    if wrong.any():
        _tell(memory, "load", offsets, wrong, programs, place)
    if flat.size == 0:
        found = np.full(offsets.shape, memory.poison)
    else:
        found = flat[np.where(inside, offsets, 0)]
        if wrong.any():
            found = np.where(wrong, memory.poison, found)
    if mask is True:
        return found
    fill = flat.dtype.type(0) if other is None else other
    return np.where(mask, found, fill).astype(flat.dtype, copy=False)


def store(
    memory: Memory,
    programs: Array,
    base: int,
    parts: Sequence[Any],
    stepping: Sequence[tuple[int, Array]],
    masks: Sequence[Any],
    value: Any,
    shape: Shape,
    place: int,
) -> None:
    """Store a tensor, or a number: program after program, so that of several to one place the last one stays.

    The arguments are those of ``load``.
    """
    whole = (len(programs), *shape)
    rows = rows_of(memory, base, parts, stepping, masks, shape)
    if rows and _store_rows(memory, rows, value, whole):
        return
    offsets = summed(base, [*parts, *(part for _, part in stepping)])
    mask = conjunction(masks)
    if mask is False:
        return
    offsets, value = np.broadcast_to(offsets, whole), np.broadcast_to(value, whole)
    wrong = ~memory.inside(offsets)
    if mask is not True:
        mask = np.broadcast_to(mask, whole)
        wrong &= mask
    if wrong.any():
        _tell(memory, "store", offsets, wrong, programs, place)
        mask = ~wrong if mask is True else mask & ~wrong
    if mask is True:
        memory.flat[offsets] = value
    else:
        memory.flat[offsets[mask]] = value[mask]


def _store_rows(memory: Memory, rows: Rows, value: Any, whole: Shape) -> bool:
    """Store row by row, and return whether that could be done: not if a row leaves the storage."""
    starts, mask, width, axis = rows.starts, rows.mask, rows.width, rows.axis
    if isinstance(value, np.ndarray) and value.shape != whole:
        value = np.broadcast_to(value, whole)
    first = (*whole[:axis], 1, *whole[axis + 1 :])
    starts = np.broadcast_to(starts, first)
    if width == 0:
        return True
    last = axis == len(whole) - 1
    if not last:
        starts = np.moveaxis(starts, axis, -1)
        value = np.moveaxis(value, axis, -1) if isinstance(value, np.ndarray) else value
    starts = starts[..., 0]
    if isinstance(value, np.ndarray) and width < rows.length:
        value = value[..., :width]
    if mask is not True:
        mask = np.broadcast_to(mask, first)
        mask = (mask if last else np.moveaxis(mask, axis, -1))[..., 0]
        starts = starts[mask]
        value = value[mask] if isinstance(value, np.ndarray) else value
        if not starts.size:
            return True
    if int(starts.min()) < 0 or int(starts.max()) + (width - 1) * rows.step >= memory.flat.size:
        return False
    memory.rows(width, rows.step)[starts] = value
    return True


def _tell(memory: Memory, kind: str, offsets: Array, wrong: Any, programs: Array, place: int) -> None:
    """Enter the first wrong access of an operation."""
    offsets, wrong = np.broadcast_arrays(offsets, wrong)
    at = np.argwhere(np.atleast_1d(wrong))[0]
    offsets = np.atleast_1d(offsets)
    index = int(offsets[tuple(at)])
    program = int(programs[at[0] if len(programs) > at[0] else 0])
    item = memory.flat.itemsize
    address = memory.address + index * item
    memory.outside.append(Outside(kind, memory.name, address, item, program, place))
