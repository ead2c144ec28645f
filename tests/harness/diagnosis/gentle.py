"""The smallest case of a failure that ends the process. Each run costs the start of a process, so few are made.

Fields are set to their simplest values together, a group at a time. The failure needs those that can't be.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kernels.contract import Capabilities
from strategies.case import LAYOUT_FIELDS, OPTIONS, SIMPLEST, Case
from strategies.features import HUGE, LENGTHS, UNEQUAL, VALUES_OF, value_of, with_value
from tests.harness.bugs.bug import Need
from tests.harness.clock import BudgetSpent

RUNS = 10
"""At most this many runs are made, halvings of a length included: together they take a minute or two."""

SHORT = 16
"""A length at which few rows are left, but more than the one or two that a kernel may treat as special cases."""

HALVINGS = 3
MOST_HEAD_DIMS = 3
"""How many further values of head_dim are tried. Cases with others are not run later, as they may end the process."""

GENERAL = "gap"
"""A layout that has strides of its own in every shape."""
AMBIGUOUS = ("bnhd", "packed", "offset")
"""Layouts that may have the strides of contiguous tensors, for example if there is only one head."""


def smallest(
    case: Case, fails: Callable[[Case], bool], capabilities: Capabilities, spend: Callable[[], None]
) -> tuple[Case, tuple[Need, ...]]:
    """Return the smallest case that was found, with what it needs, once ``spend`` has ended the search."""
    found: tuple[Case, tuple[Need, ...]] = (case, ())

    def tried(smaller: Case) -> bool:
        spend()
        return fails(smaller)

    with suppress(BudgetSpent):
        for smaller in gently_reduced(case, tried, capabilities):
            found = smaller
    return found


def gently_reduced(
    case: Case, fails: Callable[[Case], bool], capabilities: Capabilities
) -> Iterator[tuple[Case, tuple[Need, ...]]]:
    """Yield ever smaller cases that fail, each with the needs known so far. ``fails`` may end the search."""
    needs: tuple[Need, ...] = ()
    for group in _groups(case, capabilities):
        smaller = _put(case, group)
        if smaller == case or not capabilities.admits(smaller):
            continue
        if group.keys() <= set(LENGTHS) and any(need.name == UNEQUAL for need in needs):
            continue  # of unequal lengths, short ones tell nothing more
        if UNEQUAL in group and any(need.name in LENGTHS and need.fails == (0,) for need in needs):
            continue  # no keys, or no queries, are unequal lengths only by the way
        if fails(smaller):
            case = smaller
        else:
            case, found = _without_one(case, group, fails, capabilities)
            for need in found:
                yield case, (*needs, need)  # there may be no time for the next runs
                if need.name in LENGTHS:
                    case, need = _nearer(case, need, fails, capabilities)
                elif need.name == "head_dim":
                    case, need = _with_head_dims(case, need, fails, capabilities)
                needs += (need,)
        yield case, needs


def _groups(case: Case, capabilities: Capabilities) -> Iterator[dict[str, Any]]:
    """Yield groups of fields with their simplest values; a failure hardly ever needs more than one of a group."""
    yield dict.fromkeys(LAYOUT_FIELDS, "contiguous")
    simple = {name: values[0] for name, values in capabilities.launch.items() if name in dict(case.launch)}
    seldom = [name for name in ("batch", "heads_kv", *OPTIONS) if name != "causal"]
    yield {**simple, **dict.fromkeys(VALUES_OF, "normal"), **{name: SIMPLEST[name] for name in seldom}}
    yield {"group": 1}
    yield {"causal": False}
    yield {name: 1 for name in LENGTHS if getattr(case, name) == 0}
    longest = max(case.seqlen_q, case.seqlen_k)
    yield {UNEQUAL: longest} if case.seqlen_q != case.seqlen_k else {}
    yield {name: min(SHORT, getattr(case, name)) for name in LENGTHS}
    yield {"head_dim": min(capabilities.head_dims)}


def _put(case: Case, group: dict[str, Any]) -> Case:
    for name, value in group.items():
        case = with_value(case, name, value)
    return case


def _without_one(
    case: Case, group: dict[str, Any], fails: Callable[[Case], bool], capabilities: Capabilities
) -> tuple[Case, tuple[Need, ...]]:
    """Return the case with as much of a group at its simplest values as possible, and what is needed instead.

    Each field is tried as the only one that is left as it is, because mostly one of them is to blame.
    """
    changed = [name for name, value in group.items() if value_of(case, name) != value]
    if len(changed) > 1:
        for name in changed:
            others = _put(case, {other: value for other, value in group.items() if other != name})
            if capabilities.admits(others) and fails(others):
                general = in_general_layout(others, name, fails, capabilities)
                return general, (_need(general, name, group[name]),)
        huge = [name for name in changed if name in LAYOUT_FIELDS and getattr(case, name) == "huge"]
        return case, (_need(case, huge[0], "contiguous"),) if huge else ()
    if changed:
        case = in_general_layout(case, changed[0], fails, capabilities)
        return case, (_need(case, changed[0], group[changed[0]]),)
    return case, ()


def in_general_layout(
    case: Case, name: str, fails: Callable[[Case], bool], capabilities: Capabilities
) -> Case:
    """Return the case with GENERAL for a layout that has the strides of another in a small case, if it fails so too."""
    if name in LAYOUT_FIELDS and getattr(case, name) in AMBIGUOUS:
        general = with_value(case, name, GENERAL)
        if capabilities.admits(general) and fails(general):
            return general
    return case


def _nearer(
    case: Case, need: Need, fails: Callable[[Case], bool], capabilities: Capabilities
) -> tuple[Case, Need]:
    """Bring the length that fails and the one that holds nearer to each other, by halving their distance."""
    for _ in range(HALVINGS):
        middle = (getattr(case, need.name) + max(need.holds)) // 2
        halved = with_value(case, need.name, middle)
        if middle in need.fails + need.holds or not capabilities.admits(halved):
            break
        if fails(halved):
            case, need = halved, replace(need, fails=(middle,))
        else:
            need = replace(need, holds=(*need.holds, middle))
    return case, need


def _with_head_dims(
    case: Case, need: Need, fails: Callable[[Case], bool], capabilities: Capabilities
) -> tuple[Case, Need]:
    """Try the values of head_dim between the one that fails and the one that holds, the largest first."""
    between = [x for x in capabilities.head_dims if max(need.holds) < x < case.head_dim]
    others = (with_value(case, "head_dim", x) for x in sorted(between, reverse=True)[:MOST_HEAD_DIMS])
    for other in (x for x in others if capabilities.admits(x)):
        if fails(other):
            case, need = other, replace(need, fails=(other.head_dim,))
        else:
            need = replace(need, holds=(*need.holds, other.head_dim))
    return case, need


def _need(case: Case, name: str, simple: Any) -> Need:
    if name == UNEQUAL:
        return Need(name, (value_of(case, name),), ("equal",))
    if name in LAYOUT_FIELDS and getattr(case, name) == "huge":
        return Need(HUGE, (True,), (False,))
    return Need(name, (value_of(case, name),), (simple,))
