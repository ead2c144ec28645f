"""Programs of one launch that write the same place: races show without a GPU, and what is sound is not accused."""

from pathlib import Path

import pytest
import torch

from strategies.case import Case
from tests.harness.bugs.failure import HOLDS_IN_TURN
from tests.unit.support import races
from tests.unit.support.running import SubjectOf, exit_status, finding_of, report_of, script_of

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs kernels in this process, without a GPU"
)

CASE = Case(heads_kv=2, seqlen_q=40, seqlen_k=41, head_dim=16, dtype="float32", seed=1)
RACES = Path(races.__file__)


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    """Return a copy of the kernels, to be mended."""
    path = tmp_path / "races.py"
    path.write_text(RACES.read_text())
    return path


def check(script: Path, toys: Path) -> None:
    """Check that a script exits with 1 until the kernels are mended."""
    assert exit_status(script, script.parent) == 1
    toys.write_text(RACES.read_text().replace("MENDED = False", "MENDED = True"))
    assert exit_status(script, script.parent) == 0


@pytest.mark.usefixtures("unscripted")
def test_a_race_is_shrunk_and_told_with_its_script(toys: Path, subject_of: SubjectOf) -> None:
    subject = subject_of("LAST_SPLIT", toys)
    assert "if the last program of each launch runs first" in finding_of(subject, "determinism", CASE).claim
    (failure,) = subject.known.failures.values()
    assert failure.case.seqlen_q < CASE.seqlen_q
    check(report_of(subject) / "repro.py", toys)


def test_a_report_says_that_programs_have_to_run_at_the_same_time(subject_of: SubjectOf) -> None:
    subject = subject_of("UNPROTECTED_COUNTER", RACES, shrink=False)
    finding_of(subject, "forward", CASE)
    assert not (report_of(subject) / "repro.py").exists()
    assert HOLDS_IN_TURN in (report_of(subject) / "report.md").read_text()


@pytest.mark.parametrize("name", ["FIRST_SPLIT", "CLAIMED_ATOMIC"])
def test_a_script_runs_the_programs_in_both_orders(name: str, toys: Path, tmp_path: Path) -> None:
    check(script_of(f"{toys}:{name}", (), "determinism", CASE, tmp_path), toys)
