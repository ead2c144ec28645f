"""Fixtures of tests that run toy kernels in a child process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.budget import SECONDS, ShrinkBudget
from tests.harness.child import Child
from tests.harness.journal import Journal
from tests.harness.kernel_info import KernelInfo
from tests.harness.known_bugs import KnownBugs
from tests.harness.runs import Runs
from tests.harness.subject import Subject
from tests.harness.triage import Triage
from tests.unit.running import ENVIRONMENT, TOYS, SubjectOf


@pytest.fixture(scope="session")
def child() -> Iterator[Child]:
    child = Child("cpu")
    yield child
    child.close()


@pytest.fixture
def subject_of(child: Child, tmp_path: Path) -> SubjectOf:
    """Return a function that makes a ``Subject`` for the kernel of a name in toys.py, or in another file."""

    def make(name: str, toys: Path = TOYS, child: Child = child) -> Subject:
        info = KernelInfo.ask(child, f"{toys}:{name}", ())
        known = KnownBugs(info.name, "float32", tmp_path / "reports", verbose=False)
        runs = Runs(info, child, Journal(tmp_path / "journal.json"), known.bugs)
        return Subject(Triage(runs, known, ENVIRONMENT, ShrinkBudget(SECONDS[runs.device_type])))

    return make


@pytest.fixture
def unscripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep scripts from being run before they are written, because each run imports torch, which takes long."""
    monkeypatch.setattr("tests.harness.investigate.exit_status", lambda script, seconds: 1)
