"""What Triton compiles a kernel for, and questions about a failure that are put to a kernel compiled for any values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.child import Child
from tests.harness.home import ROOT
from tests.harness.runs import Runs
from tests.harness.specialisation import GENERAL
from tests.harness.verdict import Finding
from tests.unit.running import CASE, SubjectOf, finding_of, report_of
from tests.unit.toys import ROWS


@pytest.mark.parametrize(("arguments", "told"), [([], "3 True"), ([GENERAL], "1 True")])
def test_one_variant_is_for_any_values(arguments: list[str], told: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.variants", *arguments]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == told


def with_general(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a kernel a general child, as if it were one in Triton on a GPU."""
    monkeypatch.setattr(Runs, "is_compiled_by_value", True)
    runs.general = Child("cpu", general=True)


@pytest.mark.parametrize(
    ("finding", "is_asked"),
    [
        (Finding(claim="", kind="error", tensor="out"), True),
        (Finding(claim="", kind="error", tensor="dv"), False),
        (Finding(claim="", kind="died"), False),
    ],
)
def test_only_what_the_general_child_shows_too_is_asked_of_it(
    subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch, finding: Finding, is_asked: bool
) -> None:
    runs = subject_of("wrong").runs
    with_general(runs, monkeypatch)
    assert runs.general is not None
    with runs.asked_of_general("forward", CASE, finding, frozenset()):
        assert runs.is_general == is_asked
        assert runs.hard("forward", CASE) is not None
        assert (runs.general.process is not None) == (finding.kind != "died")
    assert not runs.is_general
    runs.general.close()


@pytest.mark.usefixtures("unscripted")
@pytest.mark.parametrize("name", ["wrong", "wrong_if_general"])
def test_a_search_that_the_general_child_misleads_is_made_again(
    subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The second kernel, compiled for any values, is wrong in every call, and for the values of a call in few."""
    subject = subject_of(name)
    with_general(subject.runs, monkeypatch)
    assert finding_of(subject, "forward", CASE).tensor == "out"
    (failure,) = subject.known.failures.values()
    assert failure.case.seqlen_q == ROWS
    assert Path(report_of(subject), "case.json").exists()
    assert subject.runs.general is not None
    subject.runs.general.close()


def test_nothing_is_compiled_by_value_on_a_cpu(subject_of: SubjectOf) -> None:
    assert not subject_of("wrong").runs.is_compiled_by_value
