"""Statuses: the worst of a law's dtypes, what speaks against a kernel, and how a run ended."""

import pytest

from tests.harness.programs.statuses import STATUSES, of_kernel, of_law, of_run, status_of
from tests.harness.report.screen import MARKS


def test_each_mark_is_a_status_and_what_could_not_be_run_is_one_more() -> None:
    counts = {"examples": 0, "refusals": 0, "skipped": 0}
    assert [status_of({**counts, "mark": mark}) for mark in MARKS] == list(MARKS)
    assert {*STATUSES} - {*MARKS} == {"error of the environment"}
    assert status_of({**counts, "mark": "not tried", "skipped": 2}) == "error of the environment"
    assert status_of({**counts, "mark": "held", "skipped": 2, "examples": 1}) == "held"


@pytest.mark.parametrize(
    ("statuses", "law", "kernel"),
    [
        (["held", "broken", "less precise"], "broken", "broken"),
        (["held", "less precise"], "less precise", "less precise"),
        (["held", "refused"], "refused", "refused"),
        (["held", "not tried"], "not tried", "held"),
        (["held", "error of the environment"], "error of the environment", "held"),
        (["not tried", "error of the environment"], "error of the environment", "error of the environment"),
        (["held", "not claimed"], "held", "held"),
        (["not claimed"], "not claimed", "not claimed"),
        ([], "not tried", "not tried"),
    ],
)
def test_a_law_is_as_its_worst_dtype_and_a_kernel_holds_if_nothing_speaks_against_it(
    statuses: list[str], law: str, kernel: str
) -> None:
    assert of_law(statuses) == law
    assert of_kernel(statuses) == kernel


@pytest.mark.parametrize(
    ("statuses", "of_forward", "kernel"),
    [
        (["held"], ["not tried"], "not tried"),
        (["held"], ["not claimed", "error of the environment"], "error of the environment"),
        (["held"], ["not tried", "held"], "held"),
        (["held"], ["known"], "held"),
        (["held", "not claimed"], ["not claimed"], "held"),
        (["held", "broken"], ["not tried"], "broken"),
    ],
)
def test_a_kernel_of_which_forward_was_not_tried_does_not_hold(
    statuses: list[str], of_forward: list[str], kernel: str
) -> None:
    assert of_kernel([*statuses, *of_forward], of_forward) == kernel


@pytest.mark.parametrize(
    ("kernels", "exit_status", "status"),
    [
        (["held", "broken"], 1, "broken"),
        (["held", "held"], 0, "held"),
        (["held"], None, "running"),
        (["held"], 1, "error of the environment"),
        (["held"], 2, "error of the environment"),
        (["broken"], 2, "broken"),
        ([], 5, "not tried"),
        (["not tried"], 5, "not tried"),
        (["held", "not tried"], 5, "not tried"),
        (["broken", "not tried"], 1, "broken"),
    ],
)
def test_a_run_that_failed_or_was_interrupted_never_holds(
    kernels: list[str], exit_status: int | None, status: str
) -> None:
    assert of_run(kernels, exit_status) == status
