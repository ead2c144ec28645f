"""Fixtures of tests that run toy kernels in a child process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.child import Child
from tests.harness.journal import Journal
from tests.harness.kernel_info import KernelInfo
from tests.harness.subject import Subject
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
        journal = Journal(tmp_path / "journal.json")
        info = KernelInfo.ask(child, f"{toys}:{name}", ())
        return Subject(
            info,
            "float32",
            child=child,
            environment=ENVIRONMENT,
            report_dir=tmp_path / "reports",
            journal=journal,
        )

    return make


@pytest.fixture
def unscripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep scripts from being run before they are written, because each run imports torch, which takes long."""
    monkeypatch.setattr("tests.harness.investigate.exit_status", lambda script, seconds: 1)
