"""The score: its definition, its ends, and that it never moves the wrong way."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.programs import score


def row(mark: str = "held", **counts: int) -> dict[str, Any]:
    none = dict.fromkeys(("examples", "broken", "refusals", "known", "set_aside", "skipped"), 0)
    return {"mark": mark, **none, **counts}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], 0.0),
        ([row(examples=9)], 1.0),
        ([row(examples=9), row("not tried")], 0.5),
        ([row(examples=9), row("not claimed")], 1.0),
        ([row(examples=9, skipped=5)], 1.0),
        ([row(examples=9), row("not tried", skipped=5)], 0.5),
        ([row("broken", examples=4, broken=1), row(examples=4)], 0.4375),
        ([row("broken", examples=2, broken=1, set_aside=2)], 0.125),
        ([row("less precise", examples=4), row(examples=4)], 0.75),
        ([row("refused", examples=1, refusals=9), row(examples=4)], 0.4125),
        ([row("known", examples=3, known=1)], 0.75),
        ([row("broken", examples=10**6, broken=1), row(examples=1)], 0.4999),
        ([row(examples=10**6, refusals=1)], 0.9999),
    ],
)
def test_it_is_the_mean_share_that_held_times_a_factor_for_what_did_not(
    rows: list[dict[str, Any]], expected: float
) -> None:
    assert score.of_kernel(rows) == expected


def test_that_of_a_run_is_the_lowest() -> None:
    assert score.of_run([1.0, 0.4, 0.9]) == 0.4
    assert score.of_run([]) == 0.0


COUNTS = st.integers(0, 5)


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.sampled_from(["refusals", "known", "set_aside"]), st.booleans())
def test_one_more_case_that_holds_never_lowers_it_and_one_that_fails_never_raises_it(
    held: int, broken: int, refused: int, other: int, against: str, has_broken: bool
) -> None:
    counts = {"examples": held + broken, "broken": broken, "refusals": refused}
    mark = "broken" if has_broken else "held"
    rows = [row(examples=other), row(mark, **counts)]
    before = score.of_kernel(rows)
    better = [rows[0], row(mark, **{**counts, "examples": held + broken + 1})]
    worse = [rows[0], row(mark, **{**counts, against: counts.get(against, 0) + 1})]
    assert score.of_kernel(worse) <= before <= score.of_kernel(better)
    fails = [rows[0], row("broken", **{**counts, "examples": held + broken + 1, "broken": broken + 1})]
    assert score.of_kernel(fails) <= before
    assert not has_broken or before <= 0.5
