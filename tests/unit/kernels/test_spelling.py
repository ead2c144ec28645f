"""A value of a claim is written in a form that is read as the same value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.contract.parsing import ARITHMETIC, CAPABILITIES
from kernels.contract.spelling import PROBABILITIES, RELATIVE_ERROR, Spelling, words, write_integers

INTEGERS = CAPABILITIES["head_dims"]
SPELLINGS = {**CAPABILITIES, **ARITHMETIC}


@pytest.mark.parametrize("name", SPELLINGS)
def test_examples_are_read_and_written(name: str) -> None:
    spelling = SPELLINGS[name]
    for text in spelling.examples:
        value = spelling.read(text)
        assert spelling.read(spelling.write(value)) == value


steps = st.builds(range, st.integers(1, 50), st.integers(51, 300), st.integers(1, 64))
fractions = st.floats(0, 1, exclude_max=True)


@given(st.lists(steps, min_size=1, max_size=3), st.sets(st.integers(1, 300), max_size=9))
def test_integers_are_read_as_they_were_written(runs: list[range], others: set[int]) -> None:
    numbers = tuple(sorted(others.union(*runs)))
    assert INTEGERS.read(write_integers(numbers)) == numbers


@given(fractions, st.sets(fractions, min_size=1, max_size=4))
def test_fractions_are_read_as_they_were_written(error: float, probabilities: set[float]) -> None:
    assert RELATIVE_ERROR.read(RELATIVE_ERROR.write(error)) == error
    values = tuple(sorted(probabilities))
    assert PROBABILITIES.read(PROBABILITIES.write(values)) == values


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((64,), "64"),
        ((16, 32, 64, 128), "16,32,64,128"),
        ((1, 2), "1,2"),
        ((1, 2, 3, 64), "1-3,64"),
        ((8, 16, 24, 32), "8,16,24,32"),
        ((8, 16, 24, 32, 40), "8-40/8"),
        ((1, 2, 4, 6, 8, 10, 12), "1,2-12/2"),
        (range(1, 257), "1-256"),
    ],
)
def test_runs_are_written_by_their_ends(numbers: tuple[int, ...], text: str) -> None:
    assert write_integers(numbers) == text


@pytest.mark.parametrize(
    ("spelling", "value", "text"),
    [
        (CAPABILITIES["causal"], (True, False), "both"),
        (CAPABILITIES["layouts"], ("packed", "contiguous"), "packed,contiguous"),
        (CAPABILITIES["deterministic"], (), "none"),
        (CAPABILITIES["ragged"], (), "none"),
        (CAPABILITIES["ragged"], ("cache", "paged"), "cache,paged"),
        (CAPABILITIES["dropout"], (0.0, 0.1), "0,0.1"),
        (RELATIVE_ERROR, 2.0**-22, "2^-22"),
        (RELATIVE_ERROR, 0.001, "0.001"),
        (words(none="", some="x"), "a value that is not spelled", "a value that is not spelled"),
    ],
)
def test_values_are_written(spelling: Spelling, value: object, text: str) -> None:
    assert spelling.write(value) == text


@pytest.mark.parametrize("text", ["0^-1", "2^9999", "2^", "^2", "2^0", "2^-2^-2", "8/2"])
def test_what_is_no_power_is_no_error(text: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        RELATIVE_ERROR.read(text)


@pytest.mark.parametrize("text", ["8-64/0", "8-64/-8", "/8", "8/x", "0-8/4"])
def test_what_is_no_run_is_no_integers(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (whoever reads a claim tells what was expected)
        INTEGERS.read(text)
