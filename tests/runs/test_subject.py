"""A ``Subject`` runs the cases of a kernel: what it journals, leaves out, investigates and reports of them."""

import errno
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategies.case import Case, to_json
from tests.harness.bugs.bug import Bug, Severity
from tests.harness.bugs.failure import Failure
from tests.harness.bugs.imprecise import Imprecise, ImpreciseCall
from tests.harness.diagnosis.known_bugs import MOST_BLAMED, KnownBugs
from tests.harness.law import law_named
from tests.harness.report.screen import repeats
from tests.harness.run import Run
from tests.harness.running.child import Child, ChildDied, DeviceLost, OutOfTime
from tests.harness.running.refusals import LEAST_REFUSED
from tests.harness.running.runs import HANG_SECONDS
from tests.harness.session.subject import Subject
from tests.harness.symptoms import FEWEST_KEYS
from tests.harness.verdict import Finding, Verdict
from tests.unit.support.bugs import CAUSAL, bug
from tests.unit.support.running import CASE, ENVIRONMENT, SMALL, TOYS, SubjectOf, finding_of, report_of


class Recorded:
    """A child that gives the answers it was made with, then "held"; it remembers each request and the journal then."""

    device = "cpu"
    run_seconds = start_seconds = 1.0
    grown = 0
    limited = Child.limited

    def __init__(self, journal: Path, *answers: Verdict) -> None:
        self.journal = journal
        self.answers = list(answers)
        self.journaled: list[dict[str, Any]] = []
        self.runs: list[Run] = []
        self.seconds: list[float] = []
        self.stateful = set[str]()
        self.stateful = set[str]()

    def run(
        self, run: Run, meanwhile: Callable[[], None], seconds: float, *, general: bool = False
    ) -> Verdict:
        self.runs.append(run)
        self.seconds.append(seconds)
        self.journaled.append(json.loads(self.journal.read_text()))
        meanwhile()
        return self.answers.pop(0) if self.answers else HELD

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        raise ChildDied("it is not there", stderr="")

    def close(self) -> None:
        """There is nothing to close."""


HELD = Verdict(status="held")
WRONG = Finding(claim="so", kind="error", tensor="out")
BROKEN = Verdict(status="broken", finding=WRONG)


def imprecise(*explained_by: str) -> Verdict:
    """Return the verdict that a call is wrong, with claims each of which would explain it."""
    fields: dict[str, Any] = {
        "ulps": 12.0,
        "ratio": 1.5,
        "explained_by": explained_by,
        "likely": explained_by,
    }
    return Verdict(status="broken", finding=Finding(claim="so", kind="error", tensor="dq", **fields))


def failure(law: str, finding: Finding) -> Failure:
    """What another process has found."""
    run = ("toys.py:sound", (), law, SMALL)
    return Failure(*run, kernel="toys.sound", finding=finding, environment=ENVIRONMENT)


class TestSubject:
    @pytest.fixture
    def recorded(
        self, subject_of: SubjectOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., tuple[Subject, Recorded]]:
        # A verdict is given once, and is to count as one that every repeat of the case would give.
        monkeypatch.setattr("tests.harness.diagnosis.reruns.AGAIN", 0)
        monkeypatch.setattr("tests.harness.diagnosis.triage.COMES_AND_GOES", "")
        monkeypatch.setattr("tests.harness.bugs.failure.COMES_AND_GOES", "the case was run once")

        def make(*answers: Verdict) -> tuple[Subject, Recorded]:
            subject = subject_of("sound")
            child = Recorded(tmp_path / "journal.json", *answers)
            child.stateful.add(subject.runs.info.spec)  # what it answers follows from no earlier call
            child.stateful.add(subject.runs.info.spec)  # what it answers follows from no earlier call
            subject.runs.child = child  # type: ignore[assignment]  # what it uses of it
            return subject, child

        return make

    def test_a_case_is_journaled_before_it_is_launched(self, recorded: Any) -> None:
        subject, child = recorded(HELD, HELD)
        subject.check(law_named("forward"), CASE)
        subject.check(law_named("backward"), SMALL)
        assert [entry["done"] for entry in child.journaled] == [1, 2]
        assert [entry["law"] for entry in child.journaled] == ["forward", "backward"]
        assert child.journaled[1]["case"] == json.loads(to_json(SMALL))

    def test_what_comes_next_is_drawn_while_a_case_runs_and_in_the_same_item_alone(
        self, recorded: Any
    ) -> None:
        subject, child = recorded()
        launched: list[int] = []
        subject.runs.ahead = lambda: launched.append(len(child.runs))
        subject.check(law_named("forward"), CASE)
        subject.check(law_named("forward"), SMALL)
        assert launched == [1, 2]
        subject.begin()
        subject.check(law_named("forward"), CASE)
        assert launched == [1, 2]

    def test_a_basic_law_can_begin_with_an_ordinary_call_that_shows_a_wrong_corner(
        self, recorded: Any
    ) -> None:
        subject, child = recorded(HELD)
        for name in ("forward", "determinism"):
            subject.try_ordinary(law_named(name))
        (run,) = child.runs
        assert (run.law, run.case.dtype, run.case.causal) == ("forward", "float32", True)
        assert run.case.seqlen_q != run.case.seqlen_k
        assert run.case.q_values == "normal"

    @pytest.mark.parametrize(("device_type", "calls"), [("cpu", 1), ("cuda", 0)])
    def test_what_takes_long_to_compile_does_not_begin_with_an_ordinary_call(
        self, recorded: Any, monkeypatch: pytest.MonkeyPatch, device_type: str, calls: int
    ) -> None:
        subject, child = recorded(*[HELD] * calls)
        for name, value in (("device_type", device_type), ("is_compiled", True)):
            monkeypatch.setattr(type(subject.runs), name, value)
        subject.try_ordinary(law_named("forward"))
        assert len(child.runs) == calls

    def test_rule_2_is_wider_in_the_investigation_of_a_failure(self, recorded: Any) -> None:
        subject, child = recorded(BROKEN)
        finding_of(subject, "forward", CASE)
        assert child.runs[0].safety < child.runs[1].safety

    def test_a_call_that_a_claim_explains_is_remembered_and_not_investigated(self, recorded: Any) -> None:
        first, second = imprecise("k_prescaled=true", "tf32=true"), imprecise("k_prescaled=true")
        subject, child = recorded(first, HELD, second)
        for case in (CASE, SMALL):
            subject.check(law_named("forward"), case)
        lengths = [(run.case.seqlen_q, run.case.seqlen_k) for run in child.runs]
        assert lengths == [
            (CASE.seqlen_q, CASE.seqlen_k),
            (FEWEST_KEYS, FEWEST_KEYS),  # with ordinary numbers, which could show that it is a bug
            (SMALL.seqlen_q, SMALL.seqlen_k),
        ]
        assert subject.known.failures == {}
        (line,) = subject.known.messages()
        assert "less precise than FlashAttention-2 (float32), as k_prescaled=true or tf32=true would" in line
        assert repeats([], line)
        told = Imprecise.from_dict(json.loads(json.dumps(subject.results()))["imprecise"])
        assert (told.total, told.common) == (2, ["k_prescaled=true"])

    def test_calls_that_no_one_claim_explains_are_a_bug(self, recorded: Any) -> None:
        subject, child = recorded(imprecise("k_prescaled=true"))
        subject.check(law_named("forward"), CASE)
        child.answers = [imprecise("l_from_rounded_p=true")] * 3
        assert finding_of(subject, "forward", SMALL).explained_by == ("l_from_rounded_p=true",)

    def test_what_other_processes_remember_counts_too(self, recorded: Any) -> None:
        subject, child = recorded()
        record = Imprecise()
        record.add(ImpreciseCall("forward", replace(CASE, dtype="float16"), "out", ("tf32=true",), 3.0, 2.0))
        subject.known.ledger.append({"imprecise": "toys.sound", **record.to_dict()})
        child.answers = [imprecise("k_prescaled=true")] * 3
        assert finding_of(subject, "forward", CASE).explained_by == ("k_prescaled=true",)

    def test_a_failure_waits_for_the_investigation_of_another_process(self, recorded: Any) -> None:
        subject, child = recorded(BROKEN)
        other = {"process": -1, "begins": "toys.sound", "part": "forward", "time": time.time()}
        subject.known.ledger.append(other)
        subject.check(law_named("forward"), CASE)
        assert (subject.known.failures, len(subject.triage.waiting)) == ({}, 1)
        found = failure("backward", WRONG)
        subject.known.ledger.append(Bug(found, tensors=("out",)).to_dict())
        subject.known.ledger.append({"process": -1, "ends": "toys.sound", "part": "forward"})
        subject.triage.finish()
        assert (subject.known.failures, subject.triage.waiting, len(child.runs)) == ({}, [], 1)
        (message,) = subject.known.messages()
        assert "by a bug that is reported already" in message
        assert subject.known.seen[str(found.folder)].total == 1

    def test_tensors_that_are_always_wrong_are_not_judged_and_counted(self, recorded: Any) -> None:
        subject, child = recorded(Verdict(status="held", beside=("lse",)))
        found = failure("forward", replace(WRONG, tensor="lse"))
        everywhere = Bug(found, tensors=("lse",), severity=Severity(20, 20))
        subject.known.ledger.append(everywhere.to_dict())
        subject.check(law_named("forward"), CASE)
        assert child.runs[0].ignored == {"lse"}
        assert subject.known.seen[str(found.folder)].total == 1

    def test_a_kernel_that_has_hung_gets_little_time_for_a_case_in_all_processes(
        self, recorded: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hung = Verdict(status="broken", finding=Finding(claim="it ends", kind="hung"))
        subject, child = recorded(hung)
        subject.check(law_named("forward"), CASE)
        other = KnownBugs("toys.sound", "float16", subject.known.report_dir, verbose=False)
        other.learn()
        assert other.hangs

        def hang(run: Run, meanwhile: Callable[[], None], seconds: float, *, general: bool) -> Verdict:
            child.seconds.append(seconds)
            raise OutOfTime

        monkeypatch.setattr(child, "run", hang)
        monkeypatch.setattr(subject.known, "closed", lambda law: ())
        found, blamed = dict(subject.known.failures), dict(subject.known.blamed)
        subject.check(law_named("forward"), SMALL)
        assert (child.seconds[0], child.seconds[-1]) == (math.inf, HANG_SECONDS["cpu"])
        assert (subject.tally.slow, subject.tally.cut_off, subject.tally.broken) == (1, 1, 1)
        assert (subject.known.failures, subject.known.blamed) == (found, blamed)

    def test_a_replay_judges_what_its_report_did(self, recorded: Any) -> None:
        subject, child = recorded()
        subject.replay = Run("toys.py:sound", (), "forward", CASE, frozenset({"lse"}))
        subject.check(law_named("forward"), CASE)
        assert child.runs[0].ignored == {"lse"}

    def test_a_report_stands_without_a_script(self, recorded: Any) -> None:
        subject, _ = recorded(BROKEN)
        finding_of(subject, "forward", CASE)
        assert {path.name for path in report_of(subject).iterdir()} == {"case.json", "report.md"}

    def test_a_device_lost_on_the_way_to_a_script_is_as_a_crash(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = subject_of("wrong")
        ask = subject.runs.child.ask

        def lost(request: dict[str, Any], *limits: Any, **options: Any) -> dict[str, Any]:
            if request["do"] == "repro" and request["finding"]["kind"] == "error":
                raise DeviceLost("CUDA error: misaligned address")
            return ask(request, *limits, **options)

        monkeypatch.setattr(subject.runs.child, "ask", lost)
        finding_of(subject, "forward", CASE)
        assert "--inside" in (report_of(subject) / "repro.py").read_text()

    def test_a_full_disk_leaves_what_was_there_and_is_told(
        self, recorded: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject, child = recorded(BROKEN)
        finding_of(subject, "forward", CASE)
        folder = report_of(subject)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}

        def full(path: Path, text: str) -> int:
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        subject.triage.learn()
        subject.known.bugs.clear()  # forgotten, so that it is found and written again
        child.answers = [BROKEN]
        subject.check(law_named("forward"), CASE)
        assert f"report not written: {folder}: No space left on device" in subject.known.messages()
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    @pytest.mark.usefixtures("unscripted")
    def test_what_a_known_failure_meets_is_left_out(self, subject_of: SubjectOf) -> None:
        subject = subject_of("KNOWN")
        assert [known.what for known in subject.info.known_failures] == [
            "a row is half as large again",
            "nothing at all without keys",
            "now and then",
        ]
        subject.check(law_named("forward"), replace(CASE, seqlen_q=1, seqlen_k=0))
        assert (subject.tally.known, subject.tally.moved, subject.tally.examples) == (1, 1, 1)
        assert finding_of(subject, "forward", replace(CASE, seqlen_k=3)).kind == "error"
        subject.check(law_named("backward"), CASE)
        (seen,) = subject.known.seen.values()
        assert seen.names(0) == ("backward", "forward")

    def test_a_call_of_a_comparing_law_that_meets_a_known_failure_is_not_told(
        self, subject_of: SubjectOf
    ) -> None:
        subject = subject_of("KNOWN_FOR_ONE_QUERY")
        two_rows = replace(CASE, seqlen_q=2, seed=1)  # is compared with a call for its last row
        assert subject.runs.judged("composition", two_rows) is not None
        subject.check(law_named("composition"), two_rows)
        assert not subject.known.seen

    def test_a_known_failure_that_is_gone_is_a_complaint(self, subject_of: SubjectOf) -> None:
        subject = subject_of("KNOWN")
        (complaint,) = subject.known_that_hold(law_named("forward"))
        assert complaint.startswith("known: a known failure is gone: nothing at all without keys\n")
        assert "seqlen_k=0" in complaint
        assert subject.tally.examples == 0
        assert subject.known_that_hold(law_named("backward")) == []

    def test_a_known_failure_that_finds_no_memory_is_not_gone(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = subject_of("KNOWN")
        monkeypatch.setattr(
            subject.runs.child, "run", lambda *_, **options: Verdict(status="skipped", reason="no memory")
        )
        assert subject.known_that_hold(law_named("forward")) == []

    def test_refusals_are_counted(self, subject_of: SubjectOf) -> None:
        subject = subject_of("refusing_some")
        for causal in (False, True, True):
            subject.check(law_named("forward"), Case(causal=causal))
        assert (subject.tally.examples, subject.tally.refusals) == (1, 2)
        assert subject.tally.reasons == {"no mask": 2}
        assert subject.complaint() == ""

    def test_what_is_refused_is_run_with_contiguous_inputs(self, subject_of: SubjectOf) -> None:
        """The layout of dout stays, which a kernel that takes contiguous inputs alone may read in a wrong way."""
        subject = subject_of("contiguous_alone", TOYS.with_name("strangers.py"))
        strided = Case(seqlen_q=8, seqlen_k=8, k_layout="gap", dout_layout="gap")
        for _ in range(3):
            subject.check(law_named("forward"), strided)
        tally = subject.tally
        assert (tally.examples, tally.refusals, tally.within, tally.refused_within) == (3, 3, 3, 0)
        assert next(case for _, case in subject.runs.held) == replace(strided, k_layout="contiguous")
        subject.check(law_named("forward"), replace(strided, k_layout="contiguous"))
        assert (tally.examples, tally.refusals) == (4, 3)

    def test_refusing_everything_is_a_complaint(self, subject_of: SubjectOf) -> None:
        subject = subject_of("refusing_all")
        for seed in range(LEAST_REFUSED):
            assert subject.complaint() == ""
            subject.check(law_named("forward"), Case(seed=seed))
        assert subject.complaint() == "toys.refusing_all refused nearly all cases"

    def test_hypothesis_prints_it_in_one_word(self, subject_of: SubjectOf) -> None:
        assert repr(subject_of("sound")) == "<toys.sound float32>"


def test_what_a_bug_seen_often_leaves_right_is_judged_in_its_cases_too(subject_of: SubjectOf) -> None:
    subject, case = subject_of("wrong_gradient", shrink=False), replace(CASE, causal=True)
    of_forward = bug(case, ("lse", "out"), CAUSAL)
    subject.known.add(of_forward)
    for _ in range(MOST_BLAMED):
        subject.known.count(of_forward, "forward", case, "out")
    subject.check(law_named("forward"), case)
    assert (subject.tally.set_aside, subject.tally.moved) == (1, 1)
    assert finding_of(subject, "backward", case).tensor in ("dq", "dk", "dv")
    assert subject.tally.set_aside == 1
