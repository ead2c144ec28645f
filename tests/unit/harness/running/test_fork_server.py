"""Processes that are copies of one that has imported torch: each is like a new one."""

import signal

import pytest

from strategies.case import Case
from tests.harness.run import Run
from tests.harness.running.child import START_SECONDS, Child
from tests.harness.running.exits import exit_status
from tests.harness.verdict import Verdict
from tests.unit.support.running import CASE, TOYS


def verdict(child: Child, name: str, case: Case = CASE) -> Verdict:
    return child.run(Run(f"{TOYS}:{name}", (), "forward", case), lambda: None)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("import sys; sys.exit('torch' not in sys.modules)", 0),
        ("import sys; sys.exit('tests' in sys.modules or 'triton' in sys.modules)", 0),
        ("import os, sys; sys.exit(os.listdir() != ['repro.py'])", 0),
        ("raise ValueError", 1),
        ("import sys; sys.exit(3)", 3),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_a_script_runs_as_in_a_new_process_that_has_imported_torch(script: str, status: int) -> None:
    assert exit_status(script, START_SECONDS) == status
