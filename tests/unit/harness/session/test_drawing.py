"""A stream gives the same cases whenever they are drawn, and raises what it can't draw when it is asked for it."""

from itertools import islice
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.errors import FailedHealthCheck

from strategies.case import Case
from tests.harness.session.subject import AT_ONCE, Stream

NUMBERS = st.builds(Case, seed=st.integers(0, 2**32 - 1))


def test_cases_drawn_ahead_are_those_drawn_when_they_are_asked_for() -> None:
    usual, ahead = Stream(NUMBERS, Random(1)), Stream(NUMBERS, Random(1))
    for _ in range(2 * AT_ONCE + 3):
        ahead.draw_ahead()
        assert next(ahead) == next(usual)


@pytest.mark.parametrize("most", [0, 3, AT_ONCE, AT_ONCE + 1])
def test_a_stream_of_few_cases_has_the_first_of_a_long_one(most: int) -> None:
    assert [*Stream(NUMBERS, Random(2), most)] == [*islice(Stream(NUMBERS, Random(2)), most)]


def test_nothing_is_drawn_while_cases_are_left() -> None:
    seeds = Random(3)
    stream = Stream(NUMBERS, seeds)
    next(stream)
    before = seeds.getstate()
    stream.draw_ahead()
    assert seeds.getstate() == before


def test_what_cannot_be_drawn_is_raised_by_next_alone() -> None:
    stream = Stream(NUMBERS.filter(lambda case: False), Random(4))
    stream.draw_ahead()
    with pytest.raises(FailedHealthCheck):
        next(stream)
