"""A search names the rule by which a size decides, or says what is left, in few questions."""

import random
from collections.abc import Callable
from itertools import product

import pytest

from strategies.size_rules import (
    ABOVE,
    AT_MOST,
    BEYOND,
    ENDS,
    MOST_ASKED,
    MULTIPLE,
    NO_MULTIPLE,
    OF_TILES,
    ONE_ABOVE,
    SIZES,
    TILES,
    Rule,
    SizeSearch,
    left,
    told,
)

FEW = 24
"""So many questions name a rule among more than seven hundred."""


def searched(own: int, shows: Callable[[int], bool], sizes: tuple[int, ...] = SIZES) -> SizeSearch:
    """Return a search that has ended."""
    search = SizeSearch(own, sizes)
    search.run(shows)
    return search


@pytest.mark.parametrize("seed", range(15))
def test_a_random_rule_is_named_in_few_questions(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        assert_named(chance)


def assert_named(chance: random.Random) -> None:
    kind = chance.choice((*ENDS, *OF_TILES))
    rule = Rule(kind, chance.randint(1, 300) if kind in ENDS else chance.choice(TILES[:-1]))
    search = searched(chance.choice([n for n in SIZES if rule.shows_at(n)]), rule.shows_at)
    assert left(*search.found) == (rule,)
    assert told(*search.found) == str(rule)
    assert len(search.seen) <= FEW
    assert not search.is_always


@pytest.mark.parametrize("seed", range(25))
def test_a_search_that_is_cut_short_keeps_the_rule_among_those_that_are_left(seed: int) -> None:
    chance = random.Random(seed)
    kind, asked = chance.choice((*ENDS, *OF_TILES)), chance.randint(1, 8)
    rule = Rule(kind, chance.choice(TILES[:-1]))
    search = SizeSearch(chance.choice([n for n in SIZES if rule.shows_at(n)]), SIZES)

    def ask(size: int) -> bool:
        if len(search.seen) == asked:
            raise TimeoutError
        return rule.shows_at(size)

    with pytest.raises(TimeoutError):
        search.run(ask)
    fails, holds = search.found
    rules = left(fails, holds)
    ends = sorted(x.size for x in rules if x.kind == kind)
    if holds:
        assert rule in rules or (kind in ENDS and ends[0] <= rule.size <= ends[-1])
    assert len(rules) == 1 or "asked too little" in told(fails, holds) or not holds


@pytest.mark.parametrize("own", [1, 64, 65, 300])
def test_a_size_that_does_not_matter_is_told_so(own: int) -> None:
    search = searched(own, lambda _: True)
    assert search.is_always
    assert left(*search.found) == ()
    assert len(search.seen) <= FEW


@pytest.mark.parametrize("seed", range(15))
def test_of_two_rules_that_of_the_own_size_is_kept(seed: int) -> None:
    """Tiles that are not full fail, and so do long sequences, by another bug."""
    chance = random.Random(seed)
    tile, end = chance.choice((16, 32)), chance.choice((128, 160, 192))
    search = searched(chance.randrange(1, tile), lambda n: n % tile > 0 or n > end)
    assert Rule(NO_MULTIPLE, tile) in left(*search.found)
    assert len(search.seen) <= MOST_ASKED
    search = searched(2 * end // tile * tile, lambda n: n % tile > 0 or n > end)
    assert Rule(ABOVE, end) in left(*search.found)


@pytest.mark.parametrize(
    ("own", "shows"),
    [
        (3, lambda n: n > 32),  # the own size is of another bug
        (35, lambda n: n % 7 == 0),
        (35, lambda n: n % 16 in (3, 5, 6) or n == 35),
    ],
)
def test_no_rule_is_named_where_none_explains_the_answers(own: int, shows: Callable[[int], bool]) -> None:
    fails, holds = searched(own, shows).found
    assert left(fails, holds) == ()
    assert "no rule" in told(fails, holds)


@pytest.mark.parametrize(
    ("claimed", "shows", "expected"),
    [
        ((16, 32, 64, 128, 256), lambda n: n == 16, (16,)),
        ((16, 32, 64, 128), lambda n: n > 64, (128,)),
        ((16, 32, 48, 64, 80, 96, 112, 128), lambda n: n % 32 > 0, (48, 16, 80, 112)),
    ],
)
def test_of_few_claimed_sizes_all_are_told_apart(
    claimed: tuple[int, ...], shows: Callable[[int], bool], expected: tuple[int, ...]
) -> None:
    fails, holds = searched(expected[0], shows, claimed).found
    assert {*fails} <= {*expected}
    assert all(shows(n) == any(rule.shows_at(n) for rule in left(fails, holds)[:1]) for n in claimed)


def test_what_several_rules_may_be_is_told() -> None:
    assert told((65,), (64,)) == "such as 65, not 64: asked too little"
    assert (
        told((65, 66, 96, 128, 192, 256), (33, 48)) == "above something between 48 and 64: asked too little"
    )
    assert told((65, 66, 96, 128), (33, 64)) == "above 64"
    assert told((1, 2, 3, 16), (20, 32)) == "at most something between 16 and 19: asked too little"
    assert told((35, 41), (39,)) == "such as 35, not 39: by no rule that was tried"
    assert told((35,), ()) == "such as 35: by no rule that was tried"


def test_rules_show_where_they_say() -> None:
    shown = {
        ABOVE: (65, 66, 127, 128, 129, 192),
        AT_MOST: (1, 63, 64),
        NO_MULTIPLE: (1, 63, 65, 66, 127, 129),
        BEYOND: (65, 66, 127, 129),
        ONE_ABOVE: (1, 65, 129),
        MULTIPLE: (64, 128, 192),
    }
    sizes = sorted({n for some in shown.values() for n in some})
    for (kind, showing), n in product(shown.items(), sizes):
        assert Rule(kind, 64).shows_at(n) == (n in showing), (kind, n)


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", [NO_MULTIPLE, BEYOND])
def test_a_tail_that_is_too_small_to_be_seen_beside_many_keys_refutes_no_rule(kind: str, tile: int) -> None:
    """One key of zeros among 320 makes an error of the size of roundings."""
    rule = Rule(kind, tile)
    search = searched(tile + tile // 2, lambda n: rule.shows_at(n) and not rule.is_faint_at(n))
    assert rule.is_faint_at(4 * 128 - 1)
    assert left(*search.found)[0] == rule
