"""What runs of cases tell of a kernel: nothing, where a case could not be run."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from kernels.contract.parsing import PLAIN_FUNCTION
from strategies.case import Case
from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.running.journal import Journal
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.runs import Runs
from tests.harness.verdict import Verdict

SMALL, LARGE = Case(seqlen_q=2), Case(seqlen_q=64)


class Scarce:
    """A child of a device that lacks memory for large cases; all others hold."""

    device = "cpu"
    stateful: frozenset[str] = frozenset()

    def run(self, run: Run, meanwhile: Callable[[], None], seconds: float, *, general: bool) -> Verdict:
        return Verdict(status="skipped" if run.case == LARGE else "held")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    info = KernelInfo("mine.py:f", (), "f", PLAIN_FUNCTION, printed={})
    return Runs(info, cast(Child, Scarce()), Journal(tmp_path / "journal.json"))


def test_a_case_that_a_device_lacks_memory_for_is_none_to_learn_from(runs: Runs) -> None:
    assert runs.claims_of("forward").admits(LARGE)
    assert runs.judged("forward", LARGE) is None
    claims = runs.claims_of("forward")
    assert not claims.admits(LARGE)
    assert claims.admits(SMALL)


def test_no_case_holds_as_an_alternative_that_could_not_be_run(runs: Runs) -> None:
    assert runs.holds_as("forward", SMALL, frozenset(), ("an alternative",))
    assert not runs.holds_as("forward", LARGE, frozenset(), ("an alternative",))
