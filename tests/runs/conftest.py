"""Fixtures of tests that run toy kernels in a child process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness.clock import SECONDS, ShrinkBudget
from tests.harness.diagnosis.known_bugs import KnownBugs
from tests.harness.diagnosis.triage import Triage
from tests.harness.running.child import Child
from tests.harness.running.journal import Journal
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.learned_claims import AnsweredLaws
from tests.harness.running.runs import Runs
from tests.harness.session.subject import Subject
from tests.unit.support.running import ENVIRONMENT, TOYS, SubjectOf

# A child process has one thread too. Where sums are split over threads, their bits may differ from run to run, and
# the workers of pytest-xdist, one for each core, would spend most of their time waiting for each other's threads.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def child() -> Iterator[Child]:
    child = Child("cpu")
    yield child
    child.close()


@pytest.fixture
def subject_of(child: Child, tmp_path: Path) -> SubjectOf:
    """Return a function that makes a ``Subject`` for the kernel of a name in toys.py, or in another file.

    Without ``shrink`` no smaller case is looked for.
    """

    def make(name: str, toys: Path = TOYS, child: Child = child, *, shrink: bool = True) -> Subject:
        info = KernelInfo.ask(child, f"{toys}:{name}", ())
        known = KnownBugs(info.name, "float32", tmp_path / "reports", verbose=False)
        runs = Runs(info, child, Journal(tmp_path / "journal.json"), known.bugs)
        seconds = SECONDS if shrink else 0.0
        return Subject(
            Triage(runs, known, ENVIRONMENT, ShrinkBudget(seconds)), AnsweredLaws(info.capabilities)
        )

    return make


@pytest.fixture
def unscripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep scripts from being run before they are written, because each run imports torch, which takes long."""
    monkeypatch.setattr("tests.harness.diagnosis.investigation.exit_status", lambda *_: 1)


@pytest.fixture
def without_ordinary_crashes(unscripted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run no ordinary case of a failure that ends the process either, because each starts another process."""
    monkeypatch.setattr("tests.harness.diagnosis.investigation.FEW_CRASHES", 0)
