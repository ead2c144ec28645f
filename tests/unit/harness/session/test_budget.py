"""A budget is read strictly, and its parts fit into it."""

import math
import time

import pytest

from tests.harness.clock import GRACE_SECONDS
from tests.harness.session.budget import LEAST_SECONDS, Budget, age, budget_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20s", 20.0), ("20", 20.0), (" 0.5 m ", 30.0), ("2m", 120.0), ("1.5h", 5400.0), ("1e2s", 100.0)],
)
def test_a_time_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert budget_of(text).seconds == seconds


@pytest.mark.parametrize("text", ["0", "0s", "-1s", "", "s", "20d", "2m3s", "nan", "inf", "1e999h", "soon"])
def test_any_other_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"\Agot '.*', expected a time above 0, such as 20s, 2m or 1h\Z"):
        budget_of(text)


@pytest.mark.parametrize("seconds", [3.0, 10.0, 20.0, 60.0, 3600.0])
def test_all_parts_fit_into_it(seconds: float) -> None:
    budget, passed = Budget(seconds), 0.2 * seconds
    parts = passed + budget.drawing(passed) + budget.grace + budget.concluding + budget.closing
    assert math.isclose(parts, seconds)
    assert budget.drawing(passed) > 0.25 * seconds
    assert budget.grace <= GRACE_SECONDS


def test_one_that_is_spent_before_the_first_example_allows_a_few() -> None:
    assert Budget(2.0).drawing(5.0) == LEAST_SECONDS


def test_the_age_of_a_process_grows() -> None:
    before = age()
    time.sleep(0.02)
    assert 0.0 < before < age() < 24 * 3600
