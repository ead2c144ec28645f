"""Cases without what a bug needs: whether a failure goes away there tells whether the bug explains it."""

from collections.abc import Callable, Iterator, Sequence

from kernels.contract import Capabilities
from strategies.case import SIMPLEST, Case
from strategies.features import BLIND, LENGTHS, TILES_OF, UNEQUAL, VALUES_OF, feature, value_of, with_value
from tests.harness.bugs.bug import ONE_ABOVE, Condition

MOST_VALUES = 4
"""How many values of a field are tried."""


def is_present(need: Condition, case: Case) -> bool:
    """Whether a case may have what is needed: its value is none of those that held, or any length may be needed."""
    return need.is_irregular or value_of(case, need.name) not in need.holds


def may_be_present(need: Condition, case: Case) -> bool:
    """Whether a case may have what is needed.

    Where no border between lengths is known, one that held may have done so because of its numbers.
    """
    return is_present(need, case) or (need.name in LENGTHS and need.side is None)


def counterfactuals(need: Condition, case: Case, capabilities: Capabilities) -> Iterator[Case]:
    """Yield the case with other values of a field that held, if the kernel claims them; the nearest lengths first."""
    tried = 0
    for value in _values(need, case):
        cured = with_value(case, need.name, value)
        if cured != case and capabilities.admits(cured) and tried < MOST_VALUES:
            tried += 1
            yield cured


def _values(need: Condition, case: Case) -> list[object]:
    if need.name == UNEQUAL:
        return [x for x in dict.fromkeys((case.seqlen_k, case.seqlen_q)) if x]
    if need.name == BLIND:  # with more keys than queries, or else as many
        less, more = sorted((case.seqlen_q, case.seqlen_k))
        return [(less or more, more), (more, more)]
    if need.name not in LENGTHS:
        return list(need.holds)
    own = getattr(case, need.name)
    if need.is_irregular:  # other sizes decide which lengths hold; mostly one of the next does
        return [x for x in (own - 1, own + 1, own - 2, own + 2) if x > 0]
    if need.side and need.side[0] == ONE_ABOVE:  # at these, a bug of partly filled tiles still shows
        return [own + 1, own + 2]
    block = case.blocks.get(TILES_OF[need.name], 0)
    whole = [own // block * block] if block else []
    other = case.seqlen_k if need.name == "seqlen_q" else case.seqlen_q
    near = sorted(need.holds, key=lambda value: abs(value - own))
    # 0 is left out: nothing is wrong in an empty tensor, so it would cure anything.
    return [x for x in dict.fromkeys([*whole, *near[:2], other, *near[2:]]) if x]


def needs_of(
    fields: Sequence[Condition],
    witnesses: Sequence[Case],
    fails: Callable[[Case], bool],
    capabilities: Capabilities,
) -> tuple[Condition, ...]:
    """Return the fields without which none of the ``witnesses`` fails; the first witness is the smallest case.

    In a small case much matters by accident, because other sizes mean other numbers. What a bug needs, it needs in
    every failing case. A larger case is no witness, because it has other bugs as well, if nothing cures it, or if it is
    cured by no field that shrinking had to leave at a special value in the smallest case.
    """
    numbers = (_numbers(witnesses[0], name) for name in VALUES_OF)
    kept = [
        need
        for need in (*fields, *filter(None, numbers))
        if is_needed(need, witnesses[0], fails, capabilities)
    ]
    telling = {need.name for need in kept if resisted_shrinking(need)}
    for witness in witnesses[1:]:
        cured = [need for need in kept if is_needed(need, witness, fails, capabilities)]
        if cured and (not telling or telling & {need.name for need in cured}):
            kept = cured
    return tuple(kept)


def resisted_shrinking(need: Condition) -> bool:
    """Whether shrinking left a field at a value that it would have simplified, had the failure not needed it."""
    if need.name in SIMPLEST:
        return need.name != "dtype" and need.fails[0] != SIMPLEST[need.name]
    return feature(need.name).is_shrunk


def _numbers(case: Case, name: str) -> Condition | None:
    """Return the numbers of a tensor as a field, or None if they are normal."""
    value = value_of(case, name)
    return None if value == "normal" else Condition(name, (value,), ("normal",))


def is_needed(need: Condition, case: Case, fails: Callable[[Case], bool], capabilities: Capabilities) -> bool:
    """Whether other values of a field cure a case."""
    outcomes = (not fails(cured) for cured in counterfactuals(need, case, capabilities))
    if need.cures_by_all:
        return all(found := list(outcomes)) and bool(found)
    return any(outcomes)
