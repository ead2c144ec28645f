"""Confirm or refute a bug's conditions, by normal numbers in many rows.

In the smallest case of a bug nearly all numbers are 0, so that a field may matter by chance. In a dense case, with
normal numbers in many rows, no field does: a condition is confirmed if the dense case shows the bug and changing the
field fixes it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, reduce
from itertools import product
from typing import Any

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.features import (
    DIFFERENT,
    LENGTHS,
    PARTIAL,
    SIZES_OF_TILES,
    UNEQUAL,
    VALUES_OF,
    WHOLE,
    tiles_of,
    value_of,
    with_normal_numbers,
    with_seeds,
    with_value,
)
from strategies.size_rules import SIZES, WHOLE_TILES, SizeSearch, left
from tests.harness.bugs.bug import COUNTS, RULED, Condition
from tests.harness.bugs.counterfactuals import counterfactuals
from tests.harness.bugs.dense import FEWEST, LONGER, longer
from tests.harness.clock import BudgetSpent

Fails = Callable[[Case], bool]
"""Whether a changed case fails as the smallest case of a bug does."""

ALIKE = (35, 37, 39, 41)
"""Odd lengths between 32 and 48, hence between the same ends of tiles of 16 and more. If only some of them show a bug,
it is no tile that decides, but what a length leaves when divided by some number, as where keys are split among
processors.
"""
SCALING = ("sm_scale", "head_dim")
"""Fields that scale all scores. Large scores leave few large weights, beside which wrong small ones hardly show."""
SEEDS = 4
"""How many seeds are tried of a changed case whose numbers may hide the bug."""
OTHER_LENGTHS = (LONGER + 1, LONGER + 8, LONGER)
"""The number of keys while that of queries is varied, and the reverse: the first of these that is claimed."""
ELSEWHERE = (2 * LONGER + 9, LONGER // 2 + 7)
"""Other such numbers, far from those: a rule that does not hold beside them is one of unequal lengths."""
FEWEST_KEYS = 3
"""With fewer keys than this a bug of the scores may be absent, as there are too few to weigh."""
LONG = tuple(2**n + more for n in range(10, 14) for more in (0, 1))
"""Lengths that are asked of bugs of long sequences."""
MANY = (*range(1, 10), 15, 16, 17)
"""Numbers of sequences or heads that are asked."""
MOST_OTHERS = 6
"""With how many other head_dims a rule of a length is tried."""
NEAR = 2
"""Tiles differ by more rows than this. Of so few rows beyond a border the error may be too small to be seen."""
TWICE = 2
"""How many seeds must pass for a bug to be absent at a size."""


def confirmed(
    matter: Sequence[Condition], case: Case, fails: Fails, capabilities: Capabilities
) -> Iterator[Condition]:
    """Yield the conditions that dense cases confirm; none if no dense case shows the bug.

    1. A condition of ``matter``, on fields that matter in the smallest case, is confirmed if changing the field fixes
       the dense case.
    2. A condition on a size is found by a search for its rule (``_of_size``): on both lengths, and on the others of
       ``RULED`` that matter. A size that does not matter is yielded without values that hold, and so are unequal
       lengths where the rule of a length holds at equal ones. Rule 1 counts for the others if no rule is found.
    3. If no rule is found for either length, one may fail by no rule (``_lengths_of_no_rule``).
    4. If neither length is enough, the bug may show where neither length fills its tiles (``_of_both``).

    ``fails`` may raise BudgetSpent.
    """
    shows = claimed_and(fails, capabilities)
    shown = next(filter(shows, _dense(case)), None)
    if shown is None:
        return
    others = [need for need in matter if need.name in RULED and need.name not in LENGTHS]
    yield from _cured((need for need in matter if need not in others), shown, shows, capabilities)
    found, seen = dict[str, Condition](), dict[str, SizeSearch]()

    def searched(names: Iterable[str]) -> Iterator[Condition]:
        for name in names:
            for need in _of_size(name, case, shown, shows, capabilities, seen):
                found[name] = need
                yield need

    yield from searched(LENGTHS)
    of_lengths = [need for need in found.values() if need.holds]
    if any(_shows_at_equal_lengths(need, shown, shows, capabilities) for need in of_lengths):
        yield Condition(UNEQUAL, (value_of(case, UNEQUAL),), (), is_certain=True)
    yield from searched(need.name for need in others)
    yield from _cured((need for need in others if need.name not in found), shown, shows, capabilities)
    for need in of_lengths:
        if rules := tuple(_other_rules(need, seen[need.name].sizes, shown, shows, capabilities)):
            yield replace(need, others=rules)
    if of_lengths:
        return
    irregular = [
        x for name in LENGTHS for x in _lengths_of_no_rule(name, seen[name], shown, shows, capabilities)
    ]
    yield from irregular
    if not irregular:
        yield from _of_both(case, shown, shows)


def _cured(
    needs: Iterable[Condition], shown: Case, shows: Fails, capabilities: Capabilities
) -> Iterator[Condition]:
    """Yield those conditions of which no change of the field leaves the dense case failing, as confirmed ones."""
    for need in needs:
        changed = list(counterfactuals(need, shown, capabilities)) if need.is_telling else []
        if changed and not any(shows(x) for cured in changed for x in _with_other_numbers(need, cured)):
            yield replace(need, is_certain=True)


def refuted(
    needs: Sequence[Condition],
    sure: Sequence[Condition],
    case: Case,
    fails: Fails,
    capabilities: Capabilities,
) -> Iterator[Condition]:
    """Yield those conditions that dense cases refute, given the confirmed ones (``sure``).

    Every dense case that shows the bug must still show it after the field of the condition was changed. A condition on
    special numbers is refuted by dense cases as they are. Another bug may make the same tensors wrong there, so each
    confirmed condition must fix the changed case as well.

    Example: causal is confirmed, and group=2 matters in the smallest case. With normal numbers group=1 fails too, and
    causal=False fixes it: group is refuted. ``fails`` may raise BudgetSpent.
    """
    telling = [need for need in sure if need.is_telling]
    shows = claimed_and(fails, capabilities)
    shown = [x for x in _ordinary(case) if shows(x)] if telling else []

    def shows_this(changed: Case) -> bool:
        cured = (x for need in telling for x in counterfactuals(need, changed, capabilities))
        return shows(changed) and not any(map(shows, cured))

    for need in needs:
        changed = shown if need.name in VALUES_OF else []
        if need.is_telling:
            changed = [other for x in shown for other in counterfactuals(need, x, capabilities)]
        if changed and all(any(map(shows_this, _with_other_numbers(need, x))) for x in changed):
            yield need


def _with_other_numbers(need: Condition, changed: Case) -> Iterator[Case]:
    """Yield a case in which the field of a condition was changed, with several seeds if the change scales scores."""
    return with_seeds(changed, SEEDS if need.name in SCALING else 1)


def claimed_and(fails: Fails, capabilities: Capabilities) -> Fails:
    """Return a function that says whether a case is claimed and fails; it remembers its answers."""
    return cache(lambda case: capabilities.admits(case) and fails(case))


def _ordinary(case: Case) -> Iterator[Case]:
    """Yield the case with normal numbers: with 64 more rows and keys, with 192 more, and as it is if it has enough."""
    normal = with_normal_numbers(case)
    yield longer(normal)
    yield longer(normal, 3 * LONGER)
    if min(case.seqlen_q, case.seqlen_k) >= FEWEST:
        yield normal


def _dense(case: Case) -> Iterator[Case]:
    """Yield ordinary cases, others with few rows and keys, and with queries as they are, as where a kernel decodes.

    All sequences of a call have all rows and keys, so that a length is that of each.
    """
    whole = reduce(lambda x, name: with_value(x, name, ()), DIFFERENT.values(), case)
    yield from _ordinary(whole)
    normal = with_normal_numbers(whole)
    yield replace(normal, **{name: max(FEWEST, getattr(case, name)) for name in LENGTHS})
    yield replace(normal, seqlen_k=case.seqlen_k + LONGER)


def _of_size(
    name: str,
    case: Case,
    shown: Case,
    shows: Fails,
    capabilities: Capabilities,
    seen: dict[str, SizeSearch],
) -> Iterator[Condition]:
    """Yield the condition on a size by the rule that explains at which sizes the dense case fails.

    1. None, if no rule does, or not beside other lengths as well: then it is unequal lengths that matter.
    2. One without values that hold, if the dense case fails at every size, also where the other length fills its tiles.
    3. One of which several rules are left, if the time is spent before all but one are ruled out.

    The search is kept in ``seen``.
    """
    sizes = _sizes(name, shown, value_of(case, name), capabilities)
    search = seen[name] = SizeSearch(value_of(case, name), sizes)

    def ask(size: int, others: Sequence[int] = OTHER_LENGTHS) -> bool | None:
        changed = _at(size, name, shown, capabilities, others)
        return None if changed is None else any(map(shows, with_seeds(changed, TWICE)))

    try:
        search.run(ask)
    except BudgetSpent:
        if name in LENGTHS and left(*search.found):
            yield Condition(name, *search.found, is_certain=True)
        raise
    fails, holds = search.found
    if left(fails, holds) and (name not in LENGTHS or _is_of_it_alone(fails, holds, ask)):
        yield Condition(name, fails, holds, is_certain=True)
    elif search.is_always and not any(
        ask(x, (x, *OTHER_LENGTHS)) is False for x in WHOLE_TILES if x in sizes
    ):
        yield Condition(name, fails, (), is_certain=True)


def _other_rules(
    need: Condition, sizes: Sequence[int], shown: Case, shows: Fails, capabilities: Capabilities
) -> Iterator[tuple[str, Any, str, int]]:
    """Yield what ``Condition.others`` has: rules of a length with another head_dim or dtype, on which tiles depend.

    Sizes at the borders of the rule are asked. If the bug shows at some, and not at those at which it shows by the
    rule, the rule there is searched for.
    """
    rule = need.rule
    if rule is None:
        return
    n = rule.size
    asked = [x for x in (n, n + 1, n // 2, n // 2 + 1, 2 * n + 1) if x in sizes]
    for field, values in (("head_dim", capabilities.head_dims), ("dtype", capabilities.dtypes)):
        for value in [x for x in values if x != getattr(shown, field)][:MOST_OTHERS]:
            changed = with_value(shown, field, value)

            def ask(size: int, changed: Case = changed) -> bool | None:
                case = _at(size, need.name, changed, capabilities)
                return None if case is None else any(map(shows, with_seeds(case, TWICE)))

            seen = {x: ask(x) for x in asked}
            showing = [x for x in asked if seen[x]]
            if showing and any(seen[x] is not None and seen[x] != rule.shows_at(x) for x in asked):
                search = SizeSearch(showing[0], sizes, seen)
                search.run(ask)
                rules = left(*search.found)
                yield (
                    (field, value, rules[0].kind, rules[0].size) if len(rules) == 1 else (field, value, "", 0)
                )


def _is_of_it_alone(
    fails: Sequence[int], holds: Sequence[int], ask: Callable[[int, Sequence[int]], bool | None]
) -> bool:
    """Whether the two sizes that tell most of a rule give the same answers beside another number of rows or keys."""
    at, beside = min(product(fails[1:] or fails, holds), key=lambda pair: abs(pair[0] - pair[1]))
    others = [(other, *OTHER_LENGTHS) for other in ELSEWHERE]
    return not any(ask(at, x) is False or ask(beside, x) for x in others)


def _shows_at_equal_lengths(need: Condition, shown: Case, shows: Fails, capabilities: Capabilities) -> bool:
    """Whether a rule of a length holds at equal lengths too, or no equal lengths can tell: those of one query are 1."""
    equal = (with_value(shown, UNEQUAL, x) for x in need.fails if x >= FEWEST_KEYS)
    claimed = list(filter(capabilities.admits, equal))[:TWICE]
    return not claimed or any(map(shows, claimed))


def _sizes(name: str, shown: Case, own: int, capabilities: Capabilities) -> Sequence[int]:
    """Return the sizes that are asked of a bug whose smallest case has the size ``own``, as far as they are claimed."""
    if name in COUNTS:
        return MANY
    if name not in LENGTHS:
        return capabilities.head_dims if name == "head_dim" else capabilities.page_sizes
    first = 1 if name == "seqlen_q" else min(own, FEWEST_KEYS)
    (other,) = {*LENGTHS} - {name}

    def is_claimed(size: int) -> bool:
        pairs = ({name: size, other: x} for x in (*OTHER_LENGTHS, getattr(shown, other), size))
        return any(
            capabilities.takes_lengths(x["seqlen_q"], x["seqlen_k"], causal=shown.causal) for x in pairs
        )

    return [x for x in (*SIZES, *LONG) if first <= x <= max(SIZES[-1], 2 * own) and is_claimed(x)]


def _at(
    size: int, name: str, shown: Case, capabilities: Capabilities, others: Sequence[int] = OTHER_LENGTHS
) -> Case | None:
    """Return the dense case with this size, beside the first of other lengths that is claimed; None if none is.

    These are ``others``, that of the dense case, as where a kernel takes one query alone, and the same size.
    """
    changed = with_value(shown, name, size)
    if name not in LENGTHS:
        return changed if capabilities.admits(changed) else None
    (other,) = {*LENGTHS} - {name}
    beside = (with_value(changed, other, x) for x in (*others, getattr(shown, other), size))
    return next(filter(capabilities.admits, beside), None)


def _lengths_of_no_rule(
    name: str, search: SizeSearch, shown: Case, shows: Fails, capabilities: Capabilities
) -> Iterator[Condition]:
    """Yield a condition on one length if some of the lengths ``ALIKE`` fail and others pass, whatever the seed.

    ``search`` is one that has left no rule.
    """
    showing: dict[int, set[bool | None]] = {}
    for x in ALIKE:
        alike = [_at(x, name, of_seed, capabilities) for of_seed in with_seeds(shown, TWICE)]
        showing[x] = {None if changed is None else shows(changed) for changed in alike}
        if len(showing[x]) > 1 or None in showing[x]:
            return
    outcomes = {True in told for told in showing.values()}
    search.seen.update((x, True in told) for x, told in showing.items())
    fails, holds = search.found
    if len(outcomes) > 1 and not left(fails, holds):
        yield Condition(name, fails, holds, is_certain=True)


def _of_both(case: Case, shown: Case, shows: Fails) -> Iterator[Condition]:
    """Yield a condition on tiles if the bug shows where neither length fills its tiles, and not where both do.

    Lengths are tried in the order of the smallest case's: equal, more queries, or more keys. Order may matter by
    itself, so whole tiles in another order would show nothing about tiles. Example, for tiles of 64 and equal lengths:
    192 and 192 pass, while 193 and 193 fail, and so do 255 and 255.
    """
    # With an odd number of tiles, tiles of twice the size are not full.
    queries = 5 if case.seqlen_q > case.seqlen_k else 3
    keys = 5 if case.seqlen_k > case.seqlen_q else 3
    for size in SIZES_OF_TILES:
        need = Condition(tiles_of(size), (PARTIAL,), (WHOLE,), is_certain=True)
        whole = [((queries + further) * size, (keys + further) * size) for further in (0, 2, 6)]
        full, one_more, one_less = (
            [replace(shown, seqlen_q=q + x, seqlen_k=k + x) for q, k in whole] for x in (0, 1, size - 1)
        )
        if need.is_met(case) and not any(map(shows, full)) and all(map(shows, (*one_more, *one_less))):
            yield need
            return
