"""Accesses outside of tensors are told with their line, and reproduced; kernels that make none are not accused."""

from pathlib import Path

import pytest
import torch

from strategies.case import Case
from tests.harness.interpreter.installation import ONLY_INTERPRETER
from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.running.exits import is_outside
from tests.harness.verdict import PAST_THE_END
from tests.unit.support import outside_toys
from tests.unit.support.outside_toys import line_of
from tests.unit.support.running import SubjectOf, exit_status, finding_of, report_of

TOYS = Path(outside_toys.__file__)
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs kernels in this process, without a GPU"
)

CASE = Case(seqlen_q=3, seqlen_k=7, head_dim=16, dtype="float32")


def test_wrong_numbers_are_told_with_the_access_that_they_may_come_from(child: Child) -> None:
    finding = child.run(Run(f"{TOYS}:used", (), "forward", CASE), lambda: None).finding
    assert finding is not None
    assert (finding.kind, finding.tensor) == ("nonfinite", "out")
    assert f"outside_toys.py:{line_of(outside_toys._shifted)} reads x there" in finding.detail


def test_a_kernel_that_is_interpreted_ends_its_process_at_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONLY_INTERPRETER, "1")
    child = Child("cpu")
    finding = child.run(Run(f"{TOYS}:hidden_by_where", (), "memory", CASE), lambda: None).finding
    child.close()
    assert finding is not None
    assert finding.kind == "died"
    assert finding.claim.startswith(PAST_THE_END)
    assert f'File "{TOYS}", line {line_of(outside_toys._hide)}' in finding.detail


@pytest.mark.usefixtures("without_ordinary_crashes")
@pytest.mark.parametrize(
    "name",
    [
        "wrong_stride",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("stored_past_the_end", "hidden_by_where", "before_the_beginning")
        ),
    ],
)
def test_a_script_exits_1_until_the_kernel_is_mended(
    name: str, subject_of: SubjectOf, tmp_path: Path
) -> None:
    toys = tmp_path / "toys.py"
    toys.write_text(TOYS.read_text())
    subject = subject_of(name, toys, shrink=False)
    assert is_outside(finding_of(subject, "memory", CASE))
    script = report_of(subject) / "repro.py"
    assert exit_status(script, tmp_path) == 1
    toys.write_text(TOYS.read_text().replace("MENDED = False", "MENDED = True"))
    assert exit_status(script, tmp_path) == 0
