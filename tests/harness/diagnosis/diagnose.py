"""What a failing case may need, told in few runs: each of its fields is set to a simple value by itself.

This comes before any shrinking. A case as it was drawn has many numbers, so hardly a field matters in it by accident,
and what is known of it tells one bug from another even if there is no time for anything else.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

from kernels.contract import Capabilities
from strategies.case import LAYOUT_FIELDS, OPTIONS, SIMPLEST, SIZES, Case
from strategies.features import HUGE, LENGTHS, UNEQUAL, VALUES_OF, value_of, with_value
from tests.harness.bugs.bug import Need

WHOLE_TILES = (64, 128)
"""Lengths that fill the tiles of most kernels."""


def diagnosed(case: Case, fails: Callable[[Case], bool], capabilities: Capabilities) -> Iterator[Need]:
    """Yield the fields of a case without whose values it does not fail; ``fails`` may end the search."""
    lengths_tell = True
    all_contiguous = reduce(lambda x, name: with_value(x, name, "contiguous"), LAYOUT_FIELDS, case)
    layouts_matter = all_contiguous != case and not (
        capabilities.admits(all_contiguous) and fails(all_contiguous)
    )
    for name, values in _alternatives(case, capabilities):
        if name in (*LAYOUT_FIELDS, HUGE) and not layouts_matter:
            continue
        if name in LENGTHS and not lengths_tell:
            continue
        changed = [(value, with_value(case, name, value)) for value in values]
        claimed = [(value, x) for value, x in changed if x != case and capabilities.admits(x)]
        holds = [value for value, x in claimed if not fails(x)]
        if name == UNEQUAL:  # short ones may cure a case by being short
            holds = ["equal"] if holds and len(holds) == len(claimed) else []
            lengths_tell = not holds
        if holds:
            yield Need(name, (value_of(case, name),), tuple(holds))


def _alternatives(case: Case, capabilities: Capabilities) -> Iterator[tuple[str, list[Any]]]:
    """Yield the fields that are not at their simplest value, with the values to try instead."""
    for name in (x for x in (*OPTIONS, *SIZES) if x not in (*LENGTHS, "head_dim")):
        yield name, [SIMPLEST[name]]
    for name, value in case.launch:
        yield name, [x for x in capabilities.launch[name][:1] if x != value]
    yield HUGE, [False]
    for name in LAYOUT_FIELDS:
        yield name, [] if getattr(case, name) == "huge" else ["contiguous"]
    for name in VALUES_OF:
        yield name, ["normal"]
    yield "dtype", [x for x in capabilities.dtypes if x != case.dtype]
    if case.seqlen_q != case.seqlen_k:
        yield UNEQUAL, [x for x in (case.seqlen_q, case.seqlen_k) if x]
    for name in LENGTHS:
        yield name, [x for x in WHOLE_TILES if x != getattr(case, name)]
    yield "head_dim", _beside(case.head_dim, capabilities.head_dims)


def _beside(value: int, allowed: tuple[int, ...]) -> list[int]:
    """Return the allowed values next to one."""
    at = allowed.index(value)
    return [*allowed[max(at - 1, 0) : at], *allowed[at + 1 : at + 2]]
