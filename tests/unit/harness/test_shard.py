"""Machines that share a night draw different cases, and the same seed and shard draw the same."""

import pytest

from strategies.case import LAYOUT_FIELDS
from tests.harness.session.turns import Turn
from tests.harness.shard import Shard, shard_of
from tests.unit.support.shards import common, drawn, drawn_in_turn


@pytest.mark.parametrize("last", [False, True])
def test_the_last_of_many_turns_begins_with_huge_strides(*, last: bool) -> None:
    turn = Turn(3, 3, 1.0, last=last, examples=5)
    turns = [drawn_in_turn(turn, seed) for seed in range(8)]
    layouts = [[{getattr(case, name) for name in LAYOUT_FIELDS} for case in of_turn] for of_turn in turns]
    assert all(len(of_turn) == 5 for of_turn in layouts)
    assert all(of_turn[0] == {"huge"} for of_turn in layouts) == last
    assert any("huge" not in of_case for of_turn in layouts for of_case in of_turn[1:])


def test_the_same_seed_and_shard_draw_the_same() -> None:
    assert len(drawn(1, "1/2")) == 20
    assert drawn(1, "1/2") == drawn(1, "1/2")
    assert drawn(1) == drawn(1)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("shards", [("1/2", "2/2"), ("1/2", "1/3"), (None, "1/2"), ("1/12", "11/12")])
def test_other_shards_draw_others(seed: int | None, shards: tuple[str | None, str | None]) -> None:
    one, other = shards
    assert common(drawn(seed, one), drawn(seed, other)) < 0.2


@pytest.mark.parametrize("text", ["1/1", "3/8", "8/8"])
def test_a_shard_is_written_as_it_is_read(text: str) -> None:
    assert str(shard_of(text)) == text


def test_numbers_begin_at_one() -> None:
    assert shard_of("3/8") == Shard(3, 8)


@pytest.mark.parametrize("text", ["", "3", "0/8", "9/8", "-1/8", "1/0", "3/8/1", "a/b", "٣/8", "/8", " 3/8"])
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="expected i/n with 1 <= i <= n, such as 3/8") as refused:
        shard_of(text)
    assert repr(text) in str(refused.value)
    assert "\n" not in str(refused.value)
