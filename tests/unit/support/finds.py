"""What tests of the database of finds share: bugs and cases to keep, and what is kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis.database import DirectoryBasedExampleDatabase

from strategies.case import Case
from tests.harness.bugs.bug import Bug
from tests.harness.report.database import Finds, Near
from tests.harness.run import Run
from tests.unit.support.bugs import CASE, CAUSAL, bug

WITHOUT_REDIS = "the package redis is not installed here"
BUG = bug(CASE, ("out",), CAUSAL)


def on(case: Case, **changed: Any) -> Bug:
    """Return the same bug on another case."""
    return replace(BUG, failure=replace(BUG.failure, case=case, **changed))


SMALLER = on(replace(CASE, seqlen_q=1))


def near(ratio: float, tensor: str = "out", law: str = "forward", **case: Any) -> Near:
    fields = {"dtype": "float32", "causal": False, "launch": (), **case}
    return Near(Run("k", (), law, replace(CASE, **fields)), tensor, ratio)


def values_in(finds: Finds, key: bytes) -> set[bytes]:
    (database, *_) = finds.databases.values()
    return {*database.fetch(key)}


def cases_of(finds: Finds, kernel: str = "k") -> list[str]:
    return [repr(kept.run.case) for kept in finds.of(kernel)]


def local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put Hypothesis's own database into a folder of a test's, and return the folder."""
    folder = tmp_path / "local"
    monkeypatch.setattr(
        "tests.harness.report.database.local_database", lambda: DirectoryBasedExampleDatabase(folder)
    )
    return folder
