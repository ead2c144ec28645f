"""What the code of a kernel calls where programs part: a branch or a loop is run with those programs that take it.

What a region uses of values outside of it is ``given`` to it, so that each region gets that of its own programs alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.harness.interpreter.ttir.calls.numbers import DTYPES, Array

Values = tuple[Any, ...]
Pieces = list[tuple[Array, Values]]
Types = Sequence[tuple[str, int]]
"""The types of results: that of the elements, and how many dimensions a tensor has."""


def of_some(values: Values, which: Array) -> Values:
    """Return the values of some programs; those that are the same in all programs stay as they are."""
    return tuple(x[which] if isinstance(x, np.ndarray) and x.shape[0] > 1 else x for x in values)


def merged(pieces: Pieces, count: int, types: Types) -> Values:
    """Return the values of ``count`` programs, of which each piece has those of some."""
    if len(pieces) == 1:
        return tuple(_as_array(x, *of) for x, of in zip(pieces[0][1], types, strict=True))
    found = []
    for i, (element, rank) in enumerate(types):
        parts = [_as_array(values[i], element, rank) for _, values in pieces]
        tail = np.broadcast_shapes(*(x.shape[1:] for x in parts))
        whole = np.empty((count, *tail), DTYPES[element])
        for (programs, _), part in zip(pieces, parts, strict=True):
            whole[programs] = part
        found.append(whole)
    return tuple(found)


def _as_array(x: Any, element: str, rank: int) -> Array:
    return x if isinstance(x, np.ndarray) else np.full((1,) * (rank + 1), x, DTYPES[element])


def branch(
    condition: Array,
    then: Callable[..., Values],
    given_then: Values,
    otherwise: Callable[..., Values],
    given_otherwise: Values,
    types: Types = (),
) -> Values:
    """Run one region for the programs where a condition holds, and then the other one for the rest."""
    if condition.all():
        return then(*given_then)
    if not condition.any():
        return otherwise(*given_otherwise)
    yes, no = np.flatnonzero(condition), np.flatnonzero(~condition)
    pieces = [(yes, then(*of_some(given_then, yes))), (no, otherwise(*of_some(given_otherwise, no)))]
    return merged(pieces, len(condition), types)


def loop(
    low: Any, high: Any, step: Any, body: Callable[..., Values], given: Values, carried: Values, types: Types
) -> Values:
    """Run a region for each number from ``low`` to ``high``, as long as any program has one."""
    count = max(len(x) for x in (low, high, step) if isinstance(x, np.ndarray))
    high, programs, pieces = np.broadcast_to(high, (count,)), np.arange(count), Pieces()
    while True:
        goes_on = np.broadcast_to(high > low, high.shape)
        if not goes_on.all():
            ends, stays = np.flatnonzero(~goes_on), np.flatnonzero(goes_on)
            pieces.append((programs[ends], of_some(carried, ends)))
            if not len(stays):
                return merged(pieces, count, types)
            programs, high = programs[stays], high[stays]
            given, carried = of_some(given, stays), of_some(carried, stays)
            low, step = of_some((low, step), stays)
        carried = body(*given, low, *carried)
        low = low + step


def repeat(
    count: int,
    before: Callable[..., tuple[Any, Values]],
    given_before: Values,
    after: Callable[..., Values],
    given_after: Values,
    carried: Values,
    types: Types,
) -> Values:
    """Run two regions in turn, as long as any program goes on by the condition that the first one returns."""
    programs, pieces = np.arange(count), Pieces()
    while True:
        condition, forwarded = before(*given_before, *carried)
        goes_on = np.broadcast_to(condition, (len(programs),))
        if not goes_on.all():
            ends, stays = np.flatnonzero(~goes_on), np.flatnonzero(goes_on)
            pieces.append((programs[ends], of_some(forwarded, ends)))
            if not len(stays):
                return merged(pieces, count, types)
            programs, forwarded = programs[stays], of_some(forwarded, stays)
            given_before, given_after = of_some(given_before, stays), of_some(given_after, stays)
        carried = after(*given_after, *forwarded)
