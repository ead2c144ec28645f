"""Counterfactuals: a failing case without one of a bug's conditions. If the case then holds, the bug explains it."""

from collections.abc import Callable, Iterator, Sequence

from kernels.contract import Capabilities
from strategies.case import SIMPLEST, Case
from strategies.features import BLIND, LENGTHS, TILES_OF, UNEQUAL, VALUES_OF, feature, value_of, with_value
from strategies.size_rules import ONE_ABOVE, SIZES
from tests.harness.bugs.bug import Condition

MOST_VALUES = 4
"""How many other values of a field are tried."""


def is_present(need: Condition, case: Case) -> bool:
    """Whether a case may meet a condition: its value is none of those that held, or lengths fail by no tile size."""
    if need.is_irregular or need.other_in(case):
        return need.is_met(case)
    return value_of(case, need.name) not in need.holds


def may_be_present(need: Condition, case: Case) -> bool:
    """Whether a case may meet a condition, where a length that held may have done so by chance.

    This counts for lengths that fail by no known rule.
    """
    return is_present(need, case) or (need.name in LENGTHS and need.rule is None)


def counterfactuals(need: Condition, case: Case, capabilities: Capabilities) -> Iterator[Case]:
    """Yield the case with values of a field that held, if the kernel claims them; the nearest lengths first.

    Example: for the condition causal=True this is the case with causal=False; for a length of 65 where tiles have 64
    rows, the case with 64.
    """
    tried = 0
    for value in _values(need, case):
        cured = with_value(case, need.name, value)
        if cured != case and capabilities.admits(cured) and tried < MOST_VALUES:
            tried += 1
            yield cured


def _values(need: Condition, case: Case) -> list[object]:
    if need.name == UNEQUAL:
        return [x for x in dict.fromkeys((case.seqlen_k, case.seqlen_q)) if x]
    if need.name == BLIND:  # more keys than queries, then equal lengths
        less, more = sorted((case.seqlen_q, case.seqlen_k))
        return [(less or more, more), (more, more)]
    if need.name not in LENGTHS:
        return list(need.holds)
    own = getattr(case, need.name)
    if need.is_irregular:  # which lengths hold depends on other sizes; mostly one of the next does
        return [x for x in (own - 1, own + 1, own - 2, own + 2) if x > 0]
    if rule := need.other_in(case):
        return sorted((x for x in SIZES if not rule.shows_at(x)), key=lambda x: abs(x - own))
    if need.rule and need.rule.kind == ONE_ABOVE:
        return [own + 1, own + 2]  # a bug of any last tile that is not full still shows at these
    block = case.blocks.get(TILES_OF[need.name], 0)
    whole = [own // block * block] if block else []
    other = case.seqlen_k if need.name == "seqlen_q" else case.seqlen_q
    near = sorted(need.holds, key=lambda value: abs(value - own))
    # 0 is left out: nothing is wrong in an empty tensor, so a length of 0 would fix any bug.
    return [x for x in dict.fromkeys([*whole, *near[:2], other, *near[2:]]) if x]


def needs_of(
    fields: Sequence[Condition],
    witnesses: Sequence[Case],
    fails: Callable[[Case], bool],
    capabilities: Capabilities,
) -> tuple[Condition, ...]:
    """Return those of the conditions without which none of the ``witnesses`` fails; the first is the smallest case.

    In a small case much matters by chance, because other sizes mean other numbers; a condition of a bug matters in
    every failing case. A larger witness does not count if it has other bugs as well: if changing no condition fixes it,
    or only conditions that shrinking did not leave at a special value in the smallest case.
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
    """Whether shrinking left a field at a value that it would have simplified, had the failure not required it.

    Example: causal=True is left only where causal=False holds.
    """
    if need.name in SIMPLEST:
        return need.name != "dtype" and need.fails[0] != SIMPLEST[need.name]
    return feature(need.name).is_shrunk


def _numbers(case: Case, name: str) -> Condition | None:
    """Return a condition on the numbers of a tensor, such as zeros in v, or None if they are normal."""
    value = value_of(case, name)
    return None if value == "normal" else Condition(name, (value,), ("normal",))


def is_needed(need: Condition, case: Case, fails: Callable[[Case], bool], capabilities: Capabilities) -> bool:
    """Whether changing a field fixes a case: one other value is enough, but all must for ``Condition.cures_by_all``."""
    outcomes = (not fails(cured) for cured in counterfactuals(need, case, capabilities))
    if need.cures_by_all:
        return all(found := list(outcomes)) and bool(found)
    return any(outcomes)
