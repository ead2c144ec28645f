"""How much memory a process holds: what a leak is and what a cache is, and who fills the machine."""

from pathlib import Path

import pytest

from strategies.case import Case
from tests.harness.diagnosis.reruns import GROWN_BYTES, left_behind
from tests.harness.running.exits import exit_status
from tests.unit.support.running import SubjectOf, report_of

PLANTED = Path(__file__).parents[1] / "faults" / "planted.py"
SCRIPT_SECONDS = 60.0
"""A script that repeats a call is over after so many seconds."""


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
