"""Processes of a run are killed without warning: no failure is lost, none is invented, the next run goes on there."""

import json
import math
import time
from pathlib import Path

import pytest

from tests.faults.killing import invented, kill_all, kill_one, reported, start
from tests.harness.running.journal import unfinished_in

SECONDS = 60.0
"""A run has found its first failure after so many seconds, on a busy machine too."""
MOST_SECONDS = 120.0
"""A run of half a minute is over after so many seconds, although its workers are killed all the time."""


@pytest.mark.nightly
def test_the_death_of_workers_and_children_loses_no_bug_and_invents_none(tmp_path: Path) -> None:
    run = start(tmp_path, 0.5, ["corrupting"], "-n", "2")
    seen, begun = set[tuple[str, str]](), math.inf
    while run.poll() is None:
        time.sleep(5.0)
        if seen:
            kill_one(run.pid)
        seen |= reported(tmp_path)
        begun = min(begun, time.monotonic()) if seen else begun
    assert (
        time.monotonic() - begun < MOST_SECONDS
    )  # a worker that replaces another one has no more time than that
    printed, _ = run.communicate()
    assert run.returncode == 1, printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(bug["kernel"], bug["kind"]) for bug in summary["bugs"]] == [("planted.corrupting", "memory")], (
        printed
    )
    assert seen <= reported(tmp_path), printed
    assert not invented(tmp_path), printed


@pytest.mark.nightly
def test_a_run_that_is_killed_is_taken_up_by_the_next(tmp_path: Path) -> None:
    run, until = start(tmp_path, 5.0, ["corrupting"]), time.monotonic() + SECONDS
    while not reported(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    kill_all(run)
    seen = reported(tmp_path)
    assert seen
    again = start(tmp_path, 0.2, ["corrupting"])
    printed, _ = again.communicate()
    assert again.returncode == 1, printed
    assert "an earlier run was cut off in a case, which comes first now" in printed
    assert not unfinished_in(tmp_path), printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [bug["kind"] for bug in summary["bugs"]] == ["memory"], printed
    assert not invented(tmp_path), printed
