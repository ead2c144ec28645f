"""Failures that come and go: they are told as such, with their rate, once, and without a search for what they need."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.harness.bugs.bug import Occurrences
from tests.harness.bugs.failure import headline
from tests.harness.clock import BudgetSpent, meter
from tests.harness.diagnosis import triage
from tests.harness.diagnosis.reruns import FIRST_CALL, REPEATS, RIGHT_ALONE, rate
from tests.harness.law import law_named
from tests.harness.report.conclusion import DistinctBug
from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.running.exits import exit_status
from tests.harness.running.runs import Runs
from tests.unit.support.running import CASE, SubjectOf, report_of

SCRIPT_SECONDS = 60.0
"""A script that repeats a call is over after so many seconds."""


def every(n: int) -> Callable[[], bool]:
    """Return a function that is true in one of ``n`` calls."""
    calls = iter(range(10**6))
    return lambda: next(calls) % n == 0


def test_the_rate_is_that_of_the_repeats() -> None:
    assert rate(every(4), meter(60.0)) == (REPEATS // 4, REPEATS)


def test_repeats_that_no_time_is_left_for_are_not_counted() -> None:
    assert rate(every(1), meter(60.0, calls=7)) == (7, 7)


def test_a_repeat_that_is_cut_short_is_not_counted() -> None:
    def fails() -> bool:
        raise BudgetSpent

    assert rate(fails, meter(60.0)) == (0, 0)


def test_a_repeat_that_can_not_be_run_here_is_not_counted() -> None:
    is_run = every(2)
    assert rate(lambda: True if is_run() else None, meter(60.0)) == (REPEATS // 2, REPEATS // 2)
    assert rate(lambda: None, meter(60.0)) == (0, 0)


class TestIntermittent:
    def test_a_race_is_one_bug_in_every_law_with_its_rate(self, subject_of: SubjectOf) -> None:
        subject = subject_of("racing")
        for law, case in (("forward", CASE), ("backward", replace(CASE, causal=True, seqlen_k=7))):
            failed = subject.tally.broken
            while subject.tally.broken == failed:
                subject.check(law_named(law), case)
        (bug,) = subject.known.bugs.values()
        assert bug.failure.finding.kind == "intermittent"
        assert bug.failure.finding.rate == (20, REPEATS)
        assert bug.failure.case == CASE
        assert bug.needs == ()
        assert subject.known.seen[bug.key].total == 2
        assert "shows in 20 of 100 repeats" in (report_of(subject) / "report.md").read_text()
        script = (report_of(subject) / "repro.py").read_text()
        assert exit_status(script, SCRIPT_SECONDS) == 1
        assert exit_status(script.replace(").racing", ").sound"), SCRIPT_SECONDS) == 0

    @pytest.mark.usefixtures("unscripted")
    def test_a_failure_of_every_repeat_is_no_such_bug(self, subject_of: SubjectOf) -> None:
        subject = subject_of("right_once", child=(child := Child("cpu")))
        subject.check(law_named("forward"), CASE)
        (bug,) = subject.known.bugs.values()
        assert bug.failure.finding.kind == "error"
        assert len(list(report_of(subject).parent.iterdir())) == 1
        child.close()

    @pytest.mark.usefixtures("unscripted")
    def test_where_smaller_cases_come_and_go_the_drawn_one_is_told(self, subject_of: SubjectOf) -> None:
        subject = subject_of("racing_on_few_rows")
        drawn = replace(CASE, seqlen_q=3 * CASE.seqlen_q)
        subject.check(law_named("forward"), drawn)
        (bug,) = subject.known.bugs.values()
        assert (bug.failure.finding.kind, bug.failure.case) == ("error", drawn)
        assert len(list(report_of(subject).parent.iterdir())) == 1

    def test_a_failure_that_never_shows_again_is_kept(self, subject_of: SubjectOf) -> None:
        child = Child("cpu")
        subject = subject_of("wrong_once", child=child)
        subject.check(law_named("forward"), CASE)
        (bug,) = subject.known.bugs.values()
        assert bug.failure.finding.rate == (0, REPEATS)
        assert bug.failure.case == CASE
        assert subject.known.seen[bug.key].total == 1
        assert bug.failure.explanation.sentences == (FIRST_CALL,)
        assert exit_status((report_of(subject) / "repro.py").read_text(), SCRIPT_SECONDS) == 1
        child.close()

    @pytest.mark.usefixtures("unscripted")
    def test_a_replay_repeats_the_case_until_it_fails(self, subject_of: SubjectOf) -> None:
        again = subject_of("racing")
        while again.runs.judged("forward", CASE) is None:
            again.runs.forget()  # in the end the next call is right
        again.replay = Run(again.info.spec, (), "forward", CASE, repeats=REPEATS)
        again.check(law_named("forward"), CASE)
        assert again.tally.broken == 1
        assert 1 < again.tally.examples <= 5

    @pytest.mark.usefixtures("unscripted")
    def test_a_failure_of_every_run_is_no_such_bug(self, subject_of: SubjectOf) -> None:
        subject = subject_of("wrong")
        subject.check(law_named("forward"), CASE)
        (bug,) = subject.known.bugs.values()
        assert bug.failure.finding.kind == "error"
        assert bug.failure.finding.rate == ()


class TestAfterOtherCalls:
    LONG, SHORT = (replace(CASE, seqlen_k=x, causal=True) for x in (9, 5))
    UNMASKED = replace(CASE, seqlen_k=20)

    def test_a_failure_that_no_new_process_shows_is_told_with_the_calls_that_it_needs(
        self, subject_of: SubjectOf
    ) -> None:
        subject = subject_of("keeping_the_longest", child=(child := Child("cpu")))
        for case in (self.LONG, self.SHORT):
            subject.check(law_named("forward"), case)
        (bug,) = subject.known.bugs.values()
        f = bug.failure
        assert (f.law, f.finding.kind, f.case.earlier) == ("sequences", "error", ("longer",))
        assert f.finding.certificate == "wrong after a call with longer sequences"
        assert headline(f).endswith("out keeps state (float32)")
        script = (report_of(subject) / "repro.py").read_text()
        assert exit_status(script, SCRIPT_SECONDS) == 1
        assert exit_status(script.replace(").keeping_the_longest", ").sound"), SCRIPT_SECONDS) == 0
        child.close()

    def test_a_failure_that_no_known_sequence_shows_is_a_bug_of_its_own(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(triage, "as_sequence", lambda broken, runs: None)
        subject = subject_of("keeping_the_longest", child=(child := Child("cpu")))
        for case in (self.LONG, self.SHORT):
            subject.check(law_named("forward"), case)
        (bug,) = subject.known.bugs.values()
        assert (bug.failure.finding.kind, bug.failure.finding.rate) == ("after others", ())
        assert headline(bug.failure).endswith("out keeps state (float32)")
        assert dict(DistinctBug(bug, Occurrences()).facts())["instead"] == RIGHT_ALONE
        assert bug.failure.case == self.SHORT
        assert not (report_of(subject) / "repro.py").exists()
        subject.check(law_named("forward"), self.UNMASKED)
        _, other = subject.known.bugs.values()
        assert [(need.name, need.holds) for need in other.needs if need.is_telling] == [("causal", (True,))]
        child.close()

    def test_where_no_process_can_be_copied_one_bug_is_told_with_the_calls_that_it_needs(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Runs, "has_quick_copies", False)  # as on a GPU
        subject = subject_of("keeping_the_longest", child=(child := Child("cpu")))
        info = subject.info  # without a causal mask it is wrong by itself
        subject.runs.info = replace(info, capabilities=replace(info.capabilities, causal=(True,)))
        cases = (self.LONG, self.SHORT, self.LONG, replace(self.SHORT, seqlen_k=4))
        for law, case in itertools.product(("forward", "backward"), cases):
            subject.check(law_named(law), case)
        (bug,) = subject.known.bugs.values()
        assert (bug.failure.law, bug.failure.case.earlier) == ("sequences", ("longer",))
        assert [need.name for need in bug.needs] == ["earlier"]
        assert subject.known.seen[bug.key].total == subject.tally.broken
        assert not subject.runs.in_copies
        child.close()

    def test_where_no_process_can_be_copied_what_fails_alone_is_told_beside_it(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Runs, "has_quick_copies", False)  # as on a GPU
        subject = subject_of("keeping_the_longest", child=(child := Child("cpu")))
        for case in (self.LONG, self.SHORT, self.UNMASKED, replace(self.UNMASKED, seqlen_k=3)):
            subject.check(law_named("forward"), case)
        state, plain = (bug.failure for bug in subject.known.bugs.values())
        assert (state.law, state.case.earlier, state.case.causal) == ("sequences", ("longer",), True)
        assert (plain.law, plain.finding.kind, plain.case.causal) == ("forward", "error", False)
        child.close()

    @pytest.mark.nightly
    def test_what_earlier_calls_leave_misleads_no_search_for_a_smaller_case(
        self, subject_of: SubjectOf
    ) -> None:
        subject = subject_of("keeping_the_longest", child=(child := Child("cpu")))
        subject.check(law_named("forward"), self.UNMASKED)
        (bug,) = subject.known.bugs.values()
        assert [(need.name, need.holds) for need in bug.needs if need.is_telling] == [("causal", (True,))]
        assert subject.runs.in_copies
        assert len(list(report_of(subject).parent.iterdir())) == 1
        child.close()

    def test_where_no_process_can_be_copied_a_case_that_holds_alone_is_tried_in_a_new_one(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(triage, "as_sequence", lambda broken, runs: None)
        monkeypatch.setattr(Runs, "has_quick_copies", False)  # as on a GPU
        subject = subject_of("keeping_the_longest", child=(child := Child("cpu")))
        info = subject.info  # without a causal mask it is wrong by itself
        subject.runs.info = replace(info, capabilities=replace(info.capabilities, causal=(True,)))
        for case in (self.LONG, self.SHORT, self.LONG, replace(self.SHORT, seqlen_k=4)):
            subject.check(law_named("forward"), case)
        (bug,) = subject.known.bugs.values()
        assert bug.failure.finding.kind == "after others"
        assert RIGHT_ALONE in (report_of(subject) / "report.md").read_text()
        assert bug.failure.case == self.SHORT
        assert subject.known.seen[bug.key].total == 2
        child.close()
