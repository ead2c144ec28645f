"""Atomic operations of all programs: one after the other, in the order of the programs.

Sums whose earlier values nobody asks for may wait to the end of a launch, where each program's come after all of those
of the programs before it, as if one program ran after the other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.harness.interpreter.ttir.calls.memory import Memory, Shape, _tell, conjunction, summed
from tests.harness.interpreter.ttir.calls.numbers import Array, narrow, widen

CHANGES: dict[str, Any] = {
    "add": np.add,
    "fadd": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": np.maximum,
    "min": np.minimum,
    "umax": np.maximum,
    "umin": np.minimum,
}

Waiting = list[tuple[Memory, str, Array, Array, Array]]
"""Sums that wait: the memory, the operation, and for each the number of the program, the offset, and the value."""


def _places(
    memory: Memory,
    programs: Array,
    base: int,
    parts: Sequence[Any],
    masks: Sequence[Any],
    shape: Shape,
    place: int,
) -> tuple[Array, Array]:
    """Return the offsets of all programs, and where something is to be done."""
    whole = (len(programs), *shape)
    offsets = np.broadcast_to(summed(base, parts), whole)
    mask = np.broadcast_to(conjunction(masks), whole)
    wrong = mask & ~memory.inside(offsets)
    if wrong.any():
        _tell(memory, "atomic", offsets, wrong, programs, place)
        mask = mask & ~wrong
    return offsets, mask


def change(
    memory: Memory,
    programs: Array,
    base: int,
    parts: Sequence[Any],
    masks: Sequence[Any],
    value: Any,
    shape: Shape,
    place: int,
    operation: str,
    waiting: Waiting | None,
) -> None:
    """Change memory without asking for what it held before: now, or at the end if there is a list of what waits."""
    offsets, mask = _places(memory, programs, base, parts, masks, shape, place)
    value = np.broadcast_to(value, offsets.shape)[mask]
    if waiting is None:
        _apply(memory, operation, offsets[mask], value)
    else:
        by = np.broadcast_to(programs.reshape(-1, *(1,) * len(shape)), offsets.shape)[mask]
        waiting.append((memory, operation, by, offsets[mask], value))


def finish(waiting: Waiting, *, backward: bool = False) -> None:
    """Make the changes that have waited, those of each program after those of the programs before it, or after it."""
    kinds = {(id(memory), operation): (memory, operation) for memory, operation, *_ in waiting}
    for memory, operation in kinds.values():
        some = [x[2:] for x in waiting if x[0] is memory and x[1] == operation]
        programs, offsets, values = (np.concatenate(x) for x in zip(*some, strict=True))
        order = np.argsort(-programs if backward else programs, kind="stable")
        _apply(memory, operation, offsets[order], values[order])


def _apply(memory: Memory, operation: str, offsets: Array, values: Array) -> None:
    flat = memory.flat
    if operation == "exch":
        flat[offsets] = values
    elif memory.element == "bf16":
        _change_patterns(memory, operation, offsets, values)
    elif operation in ("umax", "umin"):
        view = flat.view(f"u{flat.itemsize}")
        CHANGES[operation].at(view, offsets, values.view(view.dtype))
    else:
        CHANGES[operation].at(flat, offsets, values)


def _change_patterns(memory: Memory, operation: str, offsets: Array, patterns: Array) -> None:
    """Change numbers that NumPy does not have: those to one place one after the other."""
    waiting = np.arange(len(offsets))
    while len(waiting):
        _, first = np.unique(offsets[waiting], return_index=True)
        some = waiting[first]
        held, given = (widen(x, memory.element) for x in (memory.flat[offsets[some]], patterns[some]))
        memory.flat[offsets[some]] = narrow(CHANGES[operation](held, given), memory.element)
        waiting = np.delete(waiting, first)


def exchange(
    memory: Memory,
    programs: Array,
    base: int,
    parts: Sequence[Any],
    masks: Sequence[Any],
    value: Any,
    shape: Shape,
    place: int,
    operation: str,
    compared: Any = None,
) -> Array:
    """Change memory element by element, and return what it held before; with ``compared``, only where it held that."""
    offsets, mask = _places(memory, programs, base, parts, masks, shape, place)
    values = np.broadcast_to(value, offsets.shape)
    wanted = None if compared is None else np.broadcast_to(compared, offsets.shape)
    before = np.zeros(offsets.shape, memory.flat.dtype)
    for at in map(tuple, np.argwhere(mask)):
        offset = offsets[at]
        before[at] = memory.flat[offset]
        if wanted is None or memory.flat[offset] == wanted[at]:
            _apply(memory, operation, offset[None], values[at][None])
    return before
