"""What Triton compiles a kernel for, and what is run with a kernel that is compiled for any values."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.files import ROOT
from tests.harness.law import law_named
from tests.harness.running.child import ChildDied
from tests.harness.running.runs import BY_VALUE, Runs
from tests.harness.verdict import Finding
from tests.unit.support.running import CASE, SubjectOf, finding_of, report_of
from tests.unit.support.toys import ROWS


def test_one_variant_is_for_any_values_and_kept_apart() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.support.variants"]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "3", "1", "3", "True"]


def general(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Return the runs of a kernel as if it were one in Triton on a GPU."""
    monkeypatch.setattr(Runs, "may_be_general", True)
    return runs


@pytest.mark.parametrize(
    ("finding", "is_asked"),
    [
        (Finding(claim="", kind="error", tensor="out"), True),
        (Finding(claim="", kind="error", tensor="dv"), False),
        (Finding(claim="", kind="died"), False),
    ],
)
def test_only_what_shows_as_compiled_for_any_values_too_is_asked_so(
    subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch, finding: Finding, is_asked: bool
) -> None:
    runs = general(subject_of("wrong").runs, monkeypatch)
    with runs.asked_of_general("forward", CASE, finding, frozenset()):
        assert runs.compiling.is_general == is_asked
        assert runs.judged("forward", CASE) is not None
    assert not runs.compiling.is_general


@pytest.mark.usefixtures("unscripted")
@pytest.mark.parametrize("name", ["wrong", "wrong_if_general"])
def test_a_search_that_is_misled_by_the_general_kernel_is_made_again(
    subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The second kernel, compiled for any values, is wrong in every call, and for the values of a call in few."""
    subject = subject_of(name)
    general(subject.runs, monkeypatch)
    assert finding_of(subject, "forward", CASE).tensor == "out"
    (failure,) = subject.known.failures.values()
    assert failure.case.seqlen_q == ROWS
    assert Path(report_of(subject), "case.json").exists()


def test_drawn_cases_are_compiled_for_any_values_most_of_the_time(
    subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = general(subject_of("sound").runs, monkeypatch)
    runs.drawn("forward", CASE, frozenset())
    assert not runs.compiling.seconds[True]
    with runs.in_turns():
        for _ in range(6):
            spent = dict(runs.compiling.seconds)
            runs.drawn("forward", CASE, frozenset())
            is_general = runs.compiling.seconds[True] > spent[True]
            assert is_general == (BY_VALUE * spent[True] <= (1 - BY_VALUE) * spent[False])
            assert is_general != (runs.compiling.seconds[False] > spent[False])
    assert runs.tally.examples == 7


def test_what_fails_as_compiled_for_any_values_alone_is_no_bug(
    subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of("wrong_if_general")
    runs, holding = general(subject.runs, monkeypatch), replace(CASE, seqlen_q=ROWS - 1)
    with runs.in_turns():
        subject.check(law_named("forward"), holding)
        assert not subject.known.failures
        assert "compiled" in subject.known.messages()[0]
        before = runs.compiling.seconds[True]
        subject.check(law_named("forward"), holding)
    assert runs.compiling.seconds[True] == before


def test_nothing_is_compiled_on_a_cpu(subject_of: SubjectOf) -> None:
    runs = subject_of("wrong").runs
    assert not runs.may_be_general
    assert not runs.is_compiled


def test_where_no_process_can_be_started_nothing_is_compiled_for_any_values(
    subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(request: dict[str, Any]) -> dict[str, Any]:
        raise ChildDied("no memory", stderr="")

    runs = subject_of("wrong").runs
    runs.has_general = True
    monkeypatch.setattr(runs.child, "ask", dead)
    assert not runs.may_be_general
