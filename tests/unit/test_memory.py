"""How much memory a process holds: what a leak is and what a cache is, and who fills the machine."""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from strategies.case import Case
from tests.harness.device import memory
from tests.harness.device.memory import fills_the_machine, growth, held_bytes
from tests.harness.diagnosis.reruns import GROWN_BYTES, left_behind
from tests.harness.running.exits import exit_status
from tests.unit.calling import DEVICE
from tests.unit.running import SubjectOf, report_of

PLANTED = Path(__file__).parents[1] / "faults" / "planted.py"
SIZE = 2**20
SCRIPT_SECONDS = 60.0
"""A script that repeats a call is over after so many seconds."""


def keeping(most: int | None) -> Callable[[], None]:
    """Return a function that keeps a megabyte of each call, but of no more than the last ``most``."""
    kept: deque[torch.Tensor] = deque(maxlen=most)
    return lambda: kept.append(torch.ones(SIZE, dtype=torch.uint8, device=DEVICE))


def test_what_every_call_leaves_behind_is_measured() -> None:
    assert growth(keeping(None), 1.0) == pytest.approx(SIZE, rel=0.1)


@pytest.mark.parametrize("most", [0, 1, 30, 100])
def test_a_cache_that_is_full_at_some_time_is_no_leak(most: int) -> None:
    assert growth(keeping(most), 1.0) == 0.0


def test_a_call_that_needs_memory_once_hides_no_leak() -> None:
    keep, calls, once = keeping(None), iter(range(10**6)), list[torch.Tensor]()

    def call() -> None:
        keep()
        if next(calls) == 3 * memory.MOST_CALLS:
            once.append(torch.ones(100 * SIZE, dtype=torch.uint8, device=DEVICE))

    assert growth(call, 1.0) == pytest.approx(SIZE, rel=0.1)


def test_only_a_process_that_holds_much_fills_a_machine_with_little_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not fills_the_machine(os.getpid())
    monkeypatch.setattr(memory, "SHARE_LEFT", 1.0)
    assert not fills_the_machine(os.getpid())
    monkeypatch.setattr(memory, "SHARE_HELD", 0.0)
    assert fills_the_machine(os.getpid())
    assert held_bytes(os.getpid()) > SIZE


def test_of_a_process_on_a_gpu_only_the_memory_of_the_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    statistics = {"allocated_bytes": {"all": {"current": SIZE}}}
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda: statistics)
    assert held_bytes() == SIZE
    assert held_bytes(os.getpid()) > SIZE


class TestLeak:
    def test_a_kernel_that_leaks_is_reported_once_with_what_it_needs(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = subject_of("leaking", PLANTED)
        subject.triage.may_grow = 0
        for _ in range(2):
            subject.triage.look_for_leak("forward", Case(causal=True, group=2))
        (bug,) = subject.known.bugs.values()
        assert bug.failure.finding.kind == "leak"
        assert " 4 MiB stay behind" in bug.failure.finding.claim
        assert [need.name for need in bug.needs] == ["causal"]
        assert bug.failure.case.group == 1
        assert subject.runs.child.grown < GROWN_BYTES
        script = (report_of(subject) / "repro.py").read_text()
        assert exit_status(script, SCRIPT_SECONDS) == 1
        assert exit_status(script.replace(").leaking", ").sound"), SCRIPT_SECONDS) == 0
        assert len(subject.known.messages()) == 1

    def test_a_kernel_that_does_not_leak_is_left_in_peace_for_longer(self, subject_of: SubjectOf) -> None:
        subject = subject_of("leaking", PLANTED)
        subject.triage.may_grow = 1
        subject.runs.child.held = 2 + subject.runs.child.held_first
        subject.triage.look_for_leak("forward", Case())
        assert not subject.known.bugs
        assert subject.triage.may_grow == 2
        assert left_behind("forward", Case(), subject.runs) == 0.0
