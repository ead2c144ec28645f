"""Confirm or refute a bug's conditions, by normal numbers in many rows.

In the smallest case of a bug nearly all numbers are 0, so that a field may matter by chance. In a dense case, with
normal numbers in many rows, no field does: a condition is confirmed if the dense case shows the bug and changing the
field fixes it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.features import (
    LENGTHS,
    PARTIAL,
    SIZES_OF_TILES,
    VALUES_OF,
    WHOLE,
    tiles_of,
    with_normal_numbers,
    with_seeds,
    with_value,
)
from tests.harness.bugs.bug import Condition
from tests.harness.bugs.counterfactuals import counterfactuals
from tests.harness.bugs.dense import FEWEST, LONGER, longer

Fails = Callable[[Case], bool]
"""Whether a changed case fails as the smallest case of a bug does."""

TRIED = (3, 192, 128, 4, 5, 6, 8, 9, 16, 17, 20, 24, 32, 33, 39, 48, 49, 64, 65, 96, 129, 256)
"""The lengths at which a search for a border tries a bug: some below, at and above the ends of tiles of each size.
6 and 39 leave 2 and 3 when divided by 4, which distinguishes "one above a multiple of 4" from "no multiple of 4".

The first three are far apart: if the bug shows at all of them, or at none, hardly a rule is left to try.
"""
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


def confirmed(
    matter: Sequence[Condition], case: Case, fails: Fails, capabilities: Capabilities
) -> Iterator[Condition]:
    """Yield the conditions that dense cases confirm; none if no dense case shows the bug.

    1. A condition of ``matter``, on fields that matter in the smallest case, is confirmed if changing the field fixes
       the dense case.
    2. A condition on one length is found by a rule about the ends of tiles (``_borders``).
    3. If there is none, a length may fail by no such rule (``_lengths_of_no_rule``).
    4. If neither length is enough, the bug may show where neither length fills its tiles (``_of_both``).

    ``fails`` may raise BudgetSpent.
    """
    shows = claimed_and(fails, capabilities)
    few = with_normal_numbers(replace(case, **{name: max(FEWEST, getattr(case, name)) for name in LENGTHS}))
    shown = next(filter(shows, (*_ordinary(case), few)), None)
    if shown is None:
        return
    for need in matter:
        changed = list(counterfactuals(need, shown, capabilities)) if need.is_telling else []
        if changed and not any(shows(x) for cured in changed for x in _with_other_numbers(need, cured)):
            yield replace(need, is_certain=True)
    for search in (_borders, _lengths_of_no_rule):
        found = [x for name in LENGTHS for x in search(name, case, shown, shows, capabilities)]
        yield from found
        if found:
            return
    yield from _of_both(case, shown, shows)


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


@dataclass(frozen=True)
class _Rule:
    """A rule by which a length decides whether a bug shows, such as "more than 64 keys".

    ``showing`` are the lengths of ``TRIED`` that show the bug by this rule, ``need`` is the condition that says so, and
    ``is_met`` whether the smallest case's length does too.
    """

    showing: frozenset[int]
    need: Condition
    is_met: bool


def _borders(
    name: str, case: Case, shown: Case, shows: Fails, capabilities: Capabilities
) -> Iterator[Condition]:
    """Yield the condition on one length that explains at which of the lengths ``TRIED`` the dense case fails.

    1. One rule of ``_rules`` or ``_beyond`` explains all outcomes. Example: 64 keys and fewer pass, 65 and more fail:
       "above 64".
    2. Or two rules together do, since another bug of the same tensors may show by a rule of its own. Example: up to 16
       keys fail, and so do 65 and more. The condition is the rule that the smallest case meets. If it meets both, it is
       the rule that alone explains a failure at the nearest length.
    3. No condition, if no rule is left, or if all claimed lengths fail or all pass.
    """
    own, tried = getattr(case, name), {}
    rules = [*_rules(name, own)]
    alone = [(x,) for x in (*rules, *_beyond(name, own))]
    left = [*alone, *filter(_are_apart, combinations(rules, 2))]
    for x in TRIED:
        shows_at_x = _shows_at(x, name, shown, shows, capabilities)
        if shows_at_x is None:
            continue
        tried[x] = shows_at_x
        left = [together for together in left if any(x in rule.showing for rule in together) == tried[x]]
        if not left:
            return
    if len({*tried.values()}) < 2:
        return
    met = [rule for rule in left[0] if rule.is_met]
    if met:
        yield min(met, key=lambda rule: _distance(own, rule, left[0])).need


def _distance(own: int, rule: _Rule, together: tuple[_Rule, ...]) -> int:
    """Return how far a length is from the nearest one that shows a bug by this rule and no other of ``together``."""
    others = frozenset[int]().union(*(x.showing for x in together if x is not rule))
    return min(abs(x - own) for x in rule.showing - others)


def _shows_at(length: int, name: str, shown: Case, shows: Fails, capabilities: Capabilities) -> bool | None:
    """Return whether a case with ``name`` at this length shows the bug; None if no such case is claimed.

    The other length is one of ``OTHER_LENGTHS``.
    """
    (other,) = {*LENGTHS} - {name}
    of_length = with_value(shown, name, length)
    beside = (with_value(of_length, other, y) for y in OTHER_LENGTHS)
    changed = next(filter(capabilities.admits, beside), None)
    return None if changed is None else shows(changed)


def _lengths_of_no_rule(
    name: str, case: Case, shown: Case, shows: Fails, capabilities: Capabilities
) -> Iterator[Condition]:
    """Yield a condition on one length if some of the lengths ``ALIKE`` fail and others pass, whatever the seed."""
    showing: dict[int, set[bool | None]] = {}
    for x in ALIKE:
        showing[x] = {_shows_at(x, name, of_seed, shows, capabilities) for of_seed in with_seeds(shown, 2)}
        if len(showing[x]) > 1 or None in showing[x]:
            return
    fails = tuple(x for x, told in showing.items() if True in told)
    if 0 < len(fails) < len(ALIKE):
        holds = tuple(x for x in ALIKE if x not in fails)
        yield Condition(name, (getattr(case, name), *fails), holds, is_certain=True)


def _are_apart(together: tuple[_Rule, ...]) -> bool:
    """Whether two rules can be told apart: each has a length of its own, and some tried length passes by both."""
    one, other = (rule.showing for rule in together)
    return not one <= other and not other <= one and one | other < {*TRIED}


def _rules(name: str, own: int) -> Iterator[_Rule]:
    """Yield four rules for each size of tiles; ``own`` is the length in the smallest case.

    With tiles of 64, the lengths that fail are

    1. those above 64: a bug of the second tile;
    2. those up to 64: a bug of cases with a single tile;
    3. those that are no multiple of 64: a bug of a last tile that is not full;
    4. those one above a multiple of 64: a bug that drops a last tile with a single row or key.
    """
    tried = frozenset(TRIED)
    for size in SIZES_OF_TILES:
        whole = tuple(x for x in TRIED if x % size == 0)
        above = frozenset(x for x in TRIED if x > size)
        one_above = frozenset(x for x in TRIED if x % size == 1)
        # Passing lengths are given next to the border, so that ``Condition.side`` finds the rule in them.
        rules = (
            (above, own > size, (size,)),
            (tried - above, own <= size, (size + 1, size + 2)),
            (tried - {*whole}, own % size != 0, whole),
            (one_above, own % size == 1, (*sorted(tried - one_above), own + 1)),
        )
        for showing, is_met, holds in rules:
            yield _Rule(showing, Condition(name, (own,), holds, is_certain=True), is_met)


def _beyond(name: str, own: int) -> Iterator[_Rule]:
    """Yield, for each size of tiles, the rule that the last tile is not full and other tiles come before it.

    With tiles of 64, 65 to 127 fail, and so do 129 to 191, but 63, 64 and 128 pass. ``own`` is the length in the
    smallest case.
    """
    for size in SIZES_OF_TILES:
        showing = frozenset(x for x in TRIED if x > size and x % size)
        whole = (x for x in TRIED if x % size == 0)
        # ``Condition.side`` finds the rule by these: a length below one tile, and whole tiles up to beyond ``own``.
        holds = (size - 1, *whole, (own // size + 1) * size)
        yield _Rule(showing, Condition(name, (own,), holds, is_certain=True), own > size and own % size != 0)


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
