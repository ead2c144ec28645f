"""What a bug surely needs: with ordinary numbers in many rows it shows, and without the needed field it does not.

In the smallest case of a bug nearly all numbers are 0, so that much matters by accident; and larger cases, which tell
what matters by accident, may fail because of other bugs. With ordinary numbers in many rows nothing does.
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
Two of them leave 2 or 3 beside tiles of 4, by which one above a multiple is told from no multiple.

Where the bug shows at all of them, or at none, the first three tell that there is no border.
"""
ALIKE = (35, 37, 39, 41)
"""Lengths between the ends of the same tiles, whatever the tiles are. Where only some of them show a bug, that depends
on what they leave when divided by some number, as where keys are split into as many parts as there is room for.
"""
SCALING = ("sm_scale", "head_dim")
"""Fields that make scores larger or smaller. Where the softmax has few large weights, wrong small ones hardly show."""
SEEDS = 4
"""A changed case is tried with this many seeds where its numbers may hide a bug that it has."""
OTHER_LENGTHS = (LONGER + 1, LONGER + 8, LONGER)
"""What the other length is while one is varied: the first of these that is claimed. Odd lengths fill no tile."""


def confirmed(
    matter: Sequence[Condition], case: Case, fails: Fails, capabilities: Capabilities
) -> Iterator[Condition]:
    """Yield the needs that ordinary numbers confirm, and one of tiles that are not full if it takes both lengths.

    ``matter`` are the fields that matter in the smallest case. Nothing is certain of a bug that ordinary numbers do not
    show there. ``fails`` may raise BudgetSpent.
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
    """Yield those of a bug's needs that ordinary numbers refute, given what is ``sure`` of it.

    Ordinary numbers show it without the needed value too, or as they are where special numbers are needed, at all
    lengths at which they show it. That it is this bug, and no other of the same tensors, is known by what is surely
    needed, which cures these cases as well. ``fails`` may raise BudgetSpent.
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
    """Yield a case in which the field of a need was changed, with several seeds if that changes the scores."""
    return with_seeds(changed, SEEDS if need.name in SCALING else 1)


def claimed_and(fails: Fails, capabilities: Capabilities) -> Fails:
    """Return whether a case is claimed and fails, which is remembered."""
    return cache(lambda case: capabilities.admits(case) and fails(case))


def _ordinary(case: Case) -> Iterator[Case]:
    """Yield the case with ordinary numbers, in more rows and keys, and in its own if these are many."""
    normal = with_normal_numbers(case)
    yield longer(normal)
    yield longer(normal, 3 * LONGER)
    if min(case.seqlen_q, case.seqlen_k) >= FEWEST:
        yield normal


@dataclass(frozen=True)
class _Rule:
    """Which of the lengths that are tried show a bug; ``is_met`` says whether the smallest case does, by its length."""

    showing: frozenset[int]
    need: Condition
    is_met: bool


def _borders(
    name: str, case: Case, shown: Case, shows: Fails, capabilities: Capabilities
) -> Iterator[Condition]:
    """Yield a need of one length if it shows the bug beyond some tile, up to its end, or wherever it fills no tile.

    Another bug of the same tensors may show at other lengths by a rule of its own. Then two rules together say where
    something is wrong, and the need is the one that the smallest case meets. If it meets both, it is the one that shows
    by itself at the nearest length: where the other one shows as well, nothing is known of it.
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
    if len({*tried.values()}) < 2:  # where no claimed length is on the other side, nothing tells a border
        return
    met = [rule for rule in left[0] if rule.is_met]
    if met:
        yield min(met, key=lambda rule: _distance(own, rule, left[0])).need


def _distance(own: int, rule: _Rule, together: tuple[_Rule, ...]) -> int:
    """Return how far a length is from the nearest one that shows a bug by one of the rules alone."""
    others = frozenset[int]().union(*(x.showing for x in together if x is not rule))
    return min(abs(x - own) for x in rule.showing - others)


def _shows_at(length: int, name: str, shown: Case, shows: Fails, capabilities: Capabilities) -> bool | None:
    """Return whether a case shows the bug with another length beside one that fills no tile; None if it may not."""
    (other,) = {*LENGTHS} - {name}
    of_length = with_value(shown, name, length)
    beside = (with_value(of_length, other, y) for y in OTHER_LENGTHS)
    changed = next(filter(capabilities.admits, beside), None)
    return None if changed is None else shows(changed)


def _lengths_of_no_rule(
    name: str, case: Case, shown: Case, shows: Fails, capabilities: Capabilities
) -> Iterator[Condition]:
    """Yield a need of one length if only some of the lengths ``ALIKE`` show the bug, whatever the seed is."""
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
    """Whether two rules leave lengths that hold, and neither says what the other does."""
    one, other = (rule.showing for rule in together)
    return not one <= other and not other <= one and one | other < {*TRIED}


def _rules(name: str, own: int) -> Iterator[_Rule]:
    """Yield what a length may have to do with tiles of each size, where ``own`` is the length in the smallest case."""
    tried = frozenset(TRIED)
    for size in SIZES_OF_TILES:
        whole = tuple(x for x in TRIED if x % size == 0)
        above = frozenset(x for x in TRIED if x > size)
        one_above = frozenset(x for x in TRIED if x % size == 1)
        # The lengths that hold are those next to the border, so that ``Need.side`` tells the rule.
        rules = (
            (above, own > size, (size,)),
            (tried - above, own <= size, (size + 1, size + 2)),
            (tried - {*whole}, own % size != 0, whole),
            (one_above, own % size == 1, (*sorted(tried - one_above), own + 1)),
        )
        for showing, is_met, holds in rules:
            yield _Rule(showing, Condition(name, (own,), holds, is_certain=True), is_met)


def _beyond(name: str, own: int) -> Iterator[_Rule]:
    """Yield, for tiles of each size, that a bug shows if the last tile is not full and other tiles come before it.

    ``own`` is the length in the smallest case.
    """
    for size in SIZES_OF_TILES:
        showing = frozenset(x for x in TRIED if x > size and x % size)
        whole = (x for x in TRIED if x % size == 0)
        # The length below a tile, and whole tiles above the smallest case's length, let ``Need.side`` tell the rule.
        holds = (size - 1, *whole, (own // size + 1) * size)
        yield _Rule(showing, Condition(name, (own,), holds, is_certain=True), own > size and own % size != 0)


def _of_both(case: Case, shown: Case, shows: Fails) -> Iterator[Condition]:
    """Yield a need of tiles if the bug shows where neither length fills its tiles, and not where both do.

    Only lengths of the same order as in the smallest case are tried: equal ones, more queries or more keys. Whole tiles
    of another order may hold although those of this order fail, so that tiles are not what the bug needs.
    """
    # These are odd numbers of tiles, so that tiles of twice the size are not full.
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
