"""The size of an error in a finding, and tensors that are compared but not judged."""

import math

import pytest
import torch

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.trial.compare import (
    Check,
    describe,
    error_over_bound,
    relative_error,
    unit_in_the_last_place,
)
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Finding
from tests.unit.support.running import TOYS


@pytest.mark.parametrize(
    ("value", "dtype", "unit"),
    [
        (1.0, torch.float16, 2.0**-10),
        (-3.0, torch.float16, 2.0**-9),
        (1.0, torch.bfloat16, 2.0**-7),
        (0.0, torch.float16, 2.0**-24),
        (1e-300, torch.float32, 2.0**-149),
        (math.inf, torch.float16, 2.0**5),
        (math.nan, torch.float32, 2.0**-149),
    ],
)
def test_a_unit_in_the_last_place(value: float, dtype: torch.dtype, unit: float) -> None:
    assert unit_in_the_last_place(value, dtype) == unit


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([3.0, math.nan], [3.0, 4.0], math.inf),
        ([-math.inf, 2.0], [-math.inf, 1.0], 1.0),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([1.0], [0.0], math.inf),
        ([0.0], [0.0], 0.0),
    ],
)
def test_the_error_relative_to_the_norm(actual: list[float], expected: list[float], error: float) -> None:
    assert relative_error(torch.tensor(actual), torch.tensor(expected)) == pytest.approx(error)


@pytest.mark.parametrize(("wrong", "ulps"), [(1.0 + 3 * 2.0**-10, 3.0), (math.nan, "inf")])
def test_a_finding_tells_how_large_the_error_is(wrong: float, ulps: float | str) -> None:
    actual, expected = torch.tensor([1.0, wrong], dtype=torch.float16), torch.ones(2, dtype=torch.float64)
    bound = torch.full((2,), 1e-4, dtype=torch.float64)
    check = Check("so", "out", actual, expected, bound)
    found = describe(check, error_over_bound(actual, expected, bound))
    assert found.ulps == ulps
    assert found.index == (1,)


def test_tensors_that_are_ignored_break_no_law_and_are_noted() -> None:
    trial = Trial(load(f"{TOYS}:sound", ()), Case(), "cpu", SAFETY)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    checks = [Check("so", tensor, 2.0 * one, one, 0.1 * one) for tensor in ("out", "lse")]
    with pytest.raises(LawBroken) as broken:
        trial.settle(checks)
    assert broken.value.finding.tensors == ("out", "lse")
    trial.ignored = frozenset({"out"})
    with pytest.raises(LawBroken) as broken:
        trial.settle(checks)
    assert broken.value.finding.tensors == ("lse",)
    assert trial.settle(checks[:1]) == {}
    assert trial.beside == {"out"}


@pytest.mark.parametrize(("other", "of_nan"), [(None, ("lost",)), (0, ("lost", "made"))])
def test_of_two_calls_it_is_not_known_which_made_nan_or_lost_it(
    other: int | None, of_nan: tuple[str, ...]
) -> None:
    trial = Trial(load(f"{TOYS}:sound", ()), Case(), "cpu", SAFETY)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    with pytest.raises(LawBroken) as broken:
        trial.settle([Check("so", "out", one, math.nan * one, one, other=other)])
    assert broken.value.finding.of_nan == of_nan


def test_lists_of_json_become_tuples() -> None:
    fields = {"index": [0, 1], "tensors": ["out"], "explained_by": ["k_prescaled=true"]}
    found = Finding(claim="so", kind="error", **fields)  # type: ignore[arg-type]  # as JSON has it
    assert (found.index, found.tensors, found.explained_by) == ((0, 1), ("out",), ("k_prescaled=true",))
