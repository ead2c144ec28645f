"""The harness end to end: children that crash and hang, refusals, reports, scripts, command lines."""

import errno
import importlib
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.contract import AttentionKernel
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike, to_json
from tests.harness import plan as planning
from tests.harness import report, trial
from tests.harness.budget import ShrinkBudget
from tests.harness.bugs import Bug, Severity
from tests.harness.child import ROOT, Child, ChildDied, DeviceLost, HarnessError
from tests.harness.device import OVERRAN
from tests.harness.explain import HOLDS_ALONE
from tests.harness.imprecise import Call, Imprecise
from tests.harness.journal import Journal, examples_done, set_aside_unfinished
from tests.harness.kernel_info import KernelInfo
from tests.harness.progress import progress
from tests.harness.repro import PROGRAM, _right, _window
from tests.harness.subject import Subject
from tests.harness.tally import Tally
from tests.harness.trial import Check, LawBroken, Outputs, Problem, Trial
from tests.harness.verdict import Finding, Verdict
from tests.harness.worker import Worker
from tests.unit.toys import CLAIMS, ROWS, sound

TOYS = Path(__file__).with_name("toys.py")
SEVERAL = Path(__file__).with_name("several.py")
SMALL = Case(seqlen_q=ROWS - 1, seqlen_k=2)
CASE = Case(seqlen_q=ROWS, seqlen_k=2)
ENVIRONMENT = {"device": "cpu", "device_name": "abacus", "torch": "2.0"}


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child("cpu")
    yield child
    child.close()


SubjectOf = Callable[..., Subject]


@pytest.fixture
def subject_of(child: Child, tmp_path: Path) -> SubjectOf:
    """A subject by its name in toys.py (or in ``toys``)."""

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
    """Scripts are not run before they are written: each would import torch."""
    monkeypatch.setattr("tests.harness.investigate.exit_status", lambda script, seconds: 1)


def law(name: str) -> Any:
    return importlib.import_module(f"tests.properties.test_{name}").law


def finding_of(subject: Subject, law_name: str, case: Case) -> Finding:
    """What ``uphold`` finds that is new."""
    known = set(subject.failures)
    subject.uphold(law(law_name), case)
    (new,) = subject.failures.keys() - known
    return subject.failures[new].finding


class TestChild:
    def test_a_sound_kernel_holds(self, subject_of: SubjectOf) -> None:
        subject = subject_of("sound")
        subject.uphold(law("forward"), CASE)
        assert subject.tally.examples == 1
        assert subject.tally.broken == 0
        assert 0 < subject.tally.worst < 1
        assert {"kernel", "tensors", "check"} <= subject.tally.seconds.keys()

    @pytest.mark.usefixtures("unscripted")
    @pytest.mark.parametrize(
        ("name", "law_name", "kind"),
        [
            ("wrong", "forward", "error"),
            ("nonfinite", "forward", "nonfinite"),
            ("raising", "forward", "exception"),
            ("misshapen", "forward", "contract"),
            ("writing", "memory", "memory"),
            ("overwriting", "forward", "memory"),
            ("ACCEPTING", "rejection", "accepted"),
            ("REFUSING", "forward", "refused"),
        ],
    )
    def test_each_kind_of_finding(self, subject_of: SubjectOf, name: str, law_name: str, kind: str) -> None:
        subject = subject_of(name)
        subject.shrinking = ShrinkBudget(seconds=0.0)
        assert finding_of(subject, law_name, CASE).kind == kind

    def test_a_child_whose_device_no_longer_answers_is_replaced(
        self, child: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = child.ask({"do": "environment"})
        monkeypatch.setattr(child, "_read_line", lambda seconds: b'{"status": "broken", "fatal": true}')
        assert child.ask({"do": "environment"}) == {"status": "broken"}
        assert child.process is None
        monkeypatch.undo()
        assert child.ask({"do": "environment"}) == before

    @pytest.mark.parametrize(
        ("answers", "kind"), [(True, "exception"), (False, "fault")], ids=["alive", "lost"]
    )
    def test_an_exception_that_ends_the_device_is_a_fault(
        self, monkeypatch: pytest.MonkeyPatch, answers: bool, kind: str
    ) -> None:
        monkeypatch.setattr(trial, "device_answers", lambda device: answers)
        with pytest.raises(LawBroken) as broken:
            law("forward")(Trial(load(f"{TOYS}:faulting", ()), CASE, "cpu", SAFETY))
        assert broken.value.finding.kind == kind

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="a device fault needs a GPU")
    def test_a_device_fault_is_a_finding_and_the_child_is_replaced(
        self, subject_of: SubjectOf, tmp_path: Path
    ) -> None:
        on_gpu = Child("cuda:0")
        subject = subject_of("faulting", child=on_gpu)
        assert finding_of(subject, "forward", CASE).kind == "fault"
        assert on_gpu.process is None
        (failure,) = subject.failures.values()
        assert exit_status(tmp_path / "reports" / failure.folder / "repro.py", tmp_path) == 1

    @pytest.mark.parametrize("kind", ["fault", "died"])
    def test_a_script_is_written_without_a_call_that_ends_the_process(self, child: Child, kind: str) -> None:
        finding = asdict(Finding(claim="it runs", kind=kind))
        request = report.record(f"{TOYS}:crashing", (), "forward", CASE)
        request |= {"do": "repro", "safety": SAFETY, "finding": finding, "title": "", "seconds": 9.0}
        assert "--inside" in child.ask(request)["text"]

    def test_an_error_of_ours_in_an_old_process_is_tried_in_a_new_one(
        self, child: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        request = {"kernel": f"{TOYS}:sound", "claims": [], "law": "forward", "safety": SAFETY}
        request |= {"case": json.loads(to_json(CASE))}
        child.ask({"do": "environment"})
        before, receive = child.process, child._receive
        spoiled = iter([HarnessError("TypeError: unsupported operand type(s) for &: 'Tensor' and 'Tensor'")])

        def spoiled_once(seconds: float) -> dict[str, Any]:
            answer = receive(seconds)
            for error in spoiled:
                raise error
            return answer

        monkeypatch.setattr(child, "_receive", spoiled_once)
        assert child.run(request, lambda: None).status == "held"
        assert child.process is not before

    def test_what_is_found_is_kept_where_we_fail_ourselves(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(*_: Any) -> None:
            raise HarnessError("TypeError: of ours")

        subject = subject_of("wrong")
        monkeypatch.setattr(subject.runs, "script", failing)
        assert finding_of(subject, "forward", CASE).tensor == "out"
        assert len(subject.bugs) == 1
        assert any("TypeError: of ours" in message for message in subject.messages())

    @pytest.mark.usefixtures("unscripted")
    def test_a_crash_is_a_finding_and_the_child_is_replaced(self, subject_of: SubjectOf) -> None:
        subject = subject_of("crashing")
        subject.shrinking = ShrinkBudget(seconds=0.0)
        finding = finding_of(subject, "forward", CASE)
        assert finding.kind == "died"
        assert "signal 11" in finding.claim
        subject.uphold(law("forward"), SMALL)
        assert subject.tally.examples == 2

    @pytest.mark.usefixtures("unscripted")
    def test_what_is_not_written_is_nan_on_every_run(self, subject_of: SubjectOf) -> None:
        assert finding_of(subject_of("unwritten"), "forward", CASE).actual == "nan"

    @pytest.mark.usefixtures("unscripted")
    def test_a_crash_while_shrinking_leaves_what_was_smallest(
        self, subject_of: SubjectOf, tmp_path: Path
    ) -> None:
        subject = subject_of("crashing_on_one_key")
        finding_of(subject, "forward", replace(CASE, batch=2, seqlen_k=5))
        (failure,) = subject.failures.values()
        assert failure.finding.kind == "error"
        assert (failure.case.batch, failure.case.seqlen_q, failure.case.seqlen_k) == (1, ROWS, 2)
        assert report.read(tmp_path / "reports" / failure.folder / "case.json").case == failure.case

    @pytest.mark.usefixtures("unscripted")
    def test_what_a_crash_needs_is_found_in_few_runs_and_the_rest_is_run_without(
        self, subject_of: SubjectOf
    ) -> None:
        subject = subject_of("behind_a_crash", SEVERAL)
        subject.shrinking = ShrinkBudget(
            seconds=100.0
        )  # each run starts a process, on a busy machine for seconds
        case = replace(CASE, batch=2, heads_kv=3, causal=True, q_layout="bnhd", v_layout="gap", sm_scale=-1.0)
        assert finding_of(subject, "forward", case).kind == "died"
        (bug,) = subject.bugs.values()
        assert [need.name for need in bug.needs] == ["v_layout"]
        assert subject.runs.journal.done < 20
        assert finding_of(subject, "forward", case).kind == "error"
        assert (subject.tally.set_aside, subject.tally.moved, subject.tally.broken) == (1, 1, 2)

    @pytest.mark.usefixtures("unscripted")
    def test_a_hang_is_a_finding(self, subject_of: SubjectOf) -> None:
        impatient = Child("cpu", run_seconds=1.0)
        subject = subject_of("hanging", child=impatient)
        subject.shrinking = ShrinkBudget(seconds=0.0)
        finding = finding_of(subject, "forward", CASE)
        assert finding.kind == "hung"
        assert "still running after 1 s" in finding.claim
        assert impatient.process is None

    def test_a_child_that_hangs_ends_with_its_parent(self) -> None:
        request = report.record(f"{TOYS}:hanging", (), "forward", CASE)
        program = (
            "from tests.harness.child import Child; child = Child('cpu')\n"
            "def meanwhile(): print(child.process.pid, flush=True)\n"
            f"child.run({request | {'safety': 4.0}}, meanwhile)"
        )
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert runs(pid)
            parent.kill()
        for _ in range(300):  # half a minute at most: no one tells when a grandchild is gone
            if runs(pid):
                time.sleep(0.1)
        assert not runs(pid)

    @pytest.mark.usefixtures("unscripted")
    def test_a_hang_of_the_device_is_a_finding(self, subject_of: SubjectOf) -> None:
        subject = subject_of("hanging_on_the_device")
        subject.shrinking = ShrinkBudget(seconds=0.0)
        finding = finding_of(subject, "forward", CASE)
        assert finding.kind == "hung"
        assert "the device was still running" in finding.claim

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="a device that hangs is a GPU")
    def test_a_process_whose_device_hangs_is_ended(self) -> None:
        program = (
            "import torch; from tests.harness.device import wait_for_device; "
            "torch.cuda._sleep(1 << 36); wait_for_device('cuda', seconds=0.5)"
        )
        assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == OVERRAN

    def test_output_and_input_of_a_kernel_do_not_mix_with_answers(self, subject_of: SubjectOf) -> None:
        subject_of("talking").uphold(law("forward"), CASE)

    def test_an_error_of_the_harness_is_not_blamed_on_the_kernel(self, child: Child) -> None:
        request = report.record(f"{TOYS}:sound", (), "nonsense", CASE)
        with pytest.raises(HarnessError, match=r"No module named 'tests.properties.test_nonsense'"):
            child.run({**request, "safety": 4.0}, lambda: None)

    def test_a_kernel_that_ends_its_process_on_import_is_a_one_line_error(
        self, child: Child, tmp_path: Path
    ) -> None:
        (tmp_path / "fatal.py").write_text("import os\nos._exit(7)\n")
        with pytest.raises(ValueError, match=r"fatal.py:f'.* ended with status 7$"):
            KernelInfo.ask(child, f"{tmp_path}/fatal.py:f", ())

    def test_a_folder_called_tests_does_not_hide_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "__init__.py").write_text("raise RuntimeError\n")
        (tmp_path / "mine.py").write_text("def f(q, k, v, *, causal, sm_scale):\n    return q\n")
        monkeypatch.chdir(tmp_path)
        child = Child("cpu")
        assert KernelInfo.ask(child, "mine:f", ()).name == "mine.f"
        child.close()


class Recorded:
    """A child that remembers what was in the journal when a case was sent, and answers as told, then that all holds."""

    device = "cpu"
    run_seconds = start_seconds = 1.0

    def __init__(self, journal: Path, *answers: Verdict) -> None:
        self.journal = journal
        self.answers = list(answers)
        self.journaled: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []

    def run(self, request: dict[str, Any], meanwhile: Callable[[], None]) -> Verdict:
        self.requests.append(request)
        self.journaled.append(json.loads(self.journal.read_text()))
        meanwhile()
        return self.answers.pop(0) if self.answers else HELD

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        raise ChildDied("it is not there", hung=False, stderr="")


HELD = Verdict(status="held")
WRONG = Finding(claim="so", kind="error", tensor="out")
BROKEN = Verdict(status="broken", finding=WRONG)


def imprecise(*explained_by: str) -> Verdict:
    """That a call is wrong as each of some claims would have it."""
    fields: dict[str, Any] = {"ulps": 12.0, "ratio": 1.5, "explained_by": explained_by}
    return Verdict(status="broken", finding=Finding(claim="so", kind="error", tensor="dq", **fields))


class TestSubject:
    @pytest.fixture
    def recorded(self, subject_of: SubjectOf, tmp_path: Path) -> Callable[..., tuple[Subject, Recorded]]:
        def make(*answers: Verdict) -> tuple[Subject, Recorded]:
            subject = subject_of("sound")
            child = Recorded(tmp_path / "journal.json", *answers)
            subject.runs.child = child  # type: ignore[assignment]  # what it uses of it
            return subject, child

        return make

    def test_a_case_is_journaled_before_it_is_launched(self, recorded: Any) -> None:
        subject, child = recorded(HELD, HELD)
        subject.uphold(law("forward"), CASE)
        subject.uphold(law("backward"), SMALL)
        assert [entry["done"] for entry in child.journaled] == [1, 2]
        assert [entry["law"] for entry in child.journaled] == ["forward", "backward"]
        assert child.journaled[1]["case"] == json.loads(to_json(SMALL))

    def test_rule_2_is_wider_in_the_investigation_of_a_failure(self, recorded: Any) -> None:
        subject, child = recorded(BROKEN)
        finding_of(subject, "forward", CASE)
        assert child.requests[0]["safety"] < child.requests[1]["safety"]

    def test_a_call_that_a_claim_explains_is_remembered_and_not_investigated(self, recorded: Any) -> None:
        subject, child = recorded(imprecise("k_prescaled=true", "tf32=true"), imprecise("k_prescaled=true"))
        for case in (CASE, SMALL):
            subject.uphold(law("forward"), case)
        assert len(child.requests) == 2
        assert subject.failures == {}
        (line,) = subject.messages()
        assert (
            "less precise than FlashAttention-2 (float32), as k_prescaled=true or tf32=true would have"
            in line
        )
        told = Imprecise.from_dict(json.loads(json.dumps(subject.results()))["imprecise"])
        assert (told.total, told.common) == (2, ["k_prescaled=true"])

    def test_calls_that_no_one_claim_explains_are_a_bug(self, recorded: Any) -> None:
        subject, child = recorded(imprecise("k_prescaled=true"))
        subject.uphold(law("forward"), CASE)
        child.answers = [imprecise("l_from_rounded_p=true")] * 3
        assert finding_of(subject, "forward", SMALL).explained_by == ("l_from_rounded_p=true",)

    def test_what_other_processes_remember_counts_too(self, recorded: Any) -> None:
        subject, child = recorded()
        record = Imprecise()
        record.add(Call("forward", replace(CASE, dtype="float16"), "out", ("tf32=true",), 3.0, 2.0))
        subject.ledger.append({"imprecise": "toys.sound", **record.to_dict()})
        child.answers = [imprecise("k_prescaled=true")] * 3
        assert finding_of(subject, "forward", CASE).explained_by == ("k_prescaled=true",)

    def test_a_failure_waits_for_the_investigation_of_another_process(self, recorded: Any) -> None:
        subject, child = recorded(BROKEN)
        other = {"process": -1, "begins": "toys.sound", "time": time.time()}
        subject.ledger.append(other)
        subject.uphold(law("forward"), CASE)
        assert (subject.failures, len(subject.waiting)) == ({}, 1)
        found = report.Failure("toys.py:sound", "toys.sound", (), "backward", SMALL, WRONG, ENVIRONMENT)
        subject.ledger.append(Bug(found, tensors=("out",)).to_dict())
        subject.ledger.append({"process": -1, "ends": "toys.sound"})
        subject.finish()
        assert (subject.failures, subject.waiting, len(child.requests)) == ({}, [], 1)
        (message,) = subject.messages()
        assert "by a bug that is reported already" in message
        assert subject.seen[str(found.folder)].total == 1

    def test_tensors_that_are_always_wrong_are_not_judged_and_counted(self, recorded: Any) -> None:
        subject, child = recorded(Verdict(status="held", beside=("lse",)))
        wrong_lse = replace(WRONG, tensor="lse")
        found = report.Failure("toys.py:sound", "toys.sound", (), "forward", SMALL, wrong_lse, ENVIRONMENT)
        everywhere = Bug(found, tensors=("lse",), severity=Severity(20, 20))
        subject.ledger.append(everywhere.to_dict())
        subject.uphold(law("forward"), CASE)
        assert child.requests[0]["ignored"] == ["lse"]
        assert subject.seen[str(found.folder)].total == 1

    def test_a_report_stands_without_a_script(self, recorded: Any, tmp_path: Path) -> None:
        subject, _ = recorded(BROKEN)
        finding_of(subject, "forward", CASE)
        (failure,) = subject.failures.values()
        written = {path.name for path in (tmp_path / "reports" / failure.folder).iterdir()}
        assert written == {"case.json", "report.md"}

    def test_a_device_lost_on_the_way_to_a_script_is_as_a_crash(
        self, subject_of: SubjectOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = subject_of("wrong")
        ask = subject.runs.child.ask

        def lost(request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
            if request["do"] == "repro" and request["finding"]["kind"] == "error":
                raise DeviceLost("CUDA error: misaligned address")
            return ask(request, seconds)

        monkeypatch.setattr(subject.runs.child, "ask", lost)
        finding_of(subject, "forward", CASE)
        (failure,) = subject.failures.values()
        assert "--inside" in (tmp_path / "reports" / failure.folder / "repro.py").read_text()

    def test_a_full_disk_leaves_what_was_there_and_is_told(
        self, recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject, child = recorded(BROKEN)
        finding_of(subject, "forward", CASE)
        (failure,) = subject.failures.values()
        folder = tmp_path / "reports" / failure.folder
        before = {path.name: path.read_bytes() for path in folder.iterdir()}

        def full(path: Path, text: str) -> int:
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        subject.learn()
        subject.bugs.clear()  # so that it is found, and written, once more
        child.answers = [BROKEN]
        subject.uphold(law("forward"), CASE)
        assert f"report not written: {folder}: No space left on device" in subject.messages()
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    @pytest.mark.usefixtures("unscripted")
    def test_what_a_known_failure_meets_is_left_out(self, subject_of: SubjectOf) -> None:
        subject = subject_of("KNOWN")
        assert [known.what for known in subject.info.known_failures] == [
            "a row is half as large again",
            "nothing at all without keys",
            "now and then",
        ]
        subject.uphold(law("forward"), replace(CASE, seqlen_q=1, seqlen_k=0))
        assert (subject.tally.known, subject.tally.moved, subject.tally.examples) == (1, 1, 1)
        assert finding_of(subject, "forward", replace(CASE, seqlen_k=3)).kind == "error"
        subject.uphold(law("backward"), CASE)
        (seen,) = subject.seen.values()
        assert seen.names(0) == ("backward", "forward")

    def test_a_known_failure_that_is_gone_is_a_complaint(self, subject_of: SubjectOf) -> None:
        subject = subject_of("KNOWN")
        (complaint,) = subject.known_that_hold(law("forward"))
        assert complaint.startswith("known: a known failure is gone: nothing at all without keys\n")
        assert "seqlen_k=0" in complaint
        assert subject.tally.examples == 0
        assert subject.known_that_hold(law("backward")) == []

    def test_a_known_failure_that_finds_no_memory_is_not_gone(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = subject_of("KNOWN")
        monkeypatch.setattr(
            subject.runs.child, "run", lambda *_: Verdict(status="skipped", reason="no memory")
        )
        assert subject.known_that_hold(law("forward")) == []

    def test_refusals_are_counted(self, subject_of: SubjectOf) -> None:
        subject = subject_of("refusing_some")
        for causal in (False, True, True):
            subject.uphold(law("forward"), Case(causal=causal))
        assert (subject.tally.examples, subject.tally.refusals) == (1, 2)
        assert subject.tally.reasons == {"no mask": 2}
        assert subject.complaint() == ""

    def test_refusing_everything_is_a_complaint(self, subject_of: SubjectOf) -> None:
        subject = subject_of("refusing_all")
        for seed in range(3):
            subject.uphold(law("forward"), Case(seed=seed))
        assert subject.complaint() == "toys.refusing_all refused nearly all cases"

    def test_hypothesis_prints_it_in_one_word(self, subject_of: SubjectOf) -> None:
        assert repr(subject_of("sound")) == "<toys.sound float32>"


SCRIPTS = [
    ("wrong", "forward"),
    ("nonfinite", "forward"),
    ("raising", "forward"),
    ("misshapen", "forward"),
    ("writing", "memory"),
    ("unwritten", "memory"),
    ("ACCEPTING", "rejection"),
    ("REFUSING", "forward"),
    ("FORGETFUL", "determinism"),
    ("wrong_gradient", "identities"),
    ("WRONG_THROUGHOUT", "backward"),
    ("crashing", "forward"),
    ("hanging", "forward"),
    ("MASKED", "forward"),
]
CASES = {"MASKED": replace(CASE, seqlen_k=9, key_padding="scattered", dropout_p=0.5, seed=6)}


@pytest.mark.parametrize(("name", "law_name"), SCRIPTS)
def test_a_stand_alone_script_exits_1_until_the_kernel_is_mended(
    subject_of: SubjectOf, child: Child, tmp_path: Path, name: str, law_name: str
) -> None:
    toys = tmp_path / "toys.py"
    toys.write_text(TOYS.read_text())
    patient = child.run_seconds
    subject = subject_of(name, toys)
    if name == "hanging":
        child.run_seconds = 5.0
        # On a busy machine a case that holds may take that long in a new process: no other than CASE is to be reported.
        subject.shrinking = ShrinkBudget(seconds=0.0)
    try:
        finding_of(subject, law_name, CASES.get(name, CASE))
    finally:
        child.run_seconds = patient
    (failure,) = subject.failures.values()
    script = tmp_path / "reports" / failure.folder / "repro.py"
    assert exit_status(script, tmp_path) == 1
    toys.write_text(TOYS.read_text().replace("MENDED = False", "MENDED = True"))
    assert exit_status(script, tmp_path) == 0


def test_a_script_that_holds_is_left_out_and_the_report_says_so(
    subject_of: SubjectOf, tmp_path: Path
) -> None:
    subject = subject_of("wrong_in_company")
    finding_of(subject, "forward", CASE)
    (failure,) = subject.failures.values()
    folder = tmp_path / "reports" / failure.folder
    assert not (folder / "repro.py").exists()
    assert HOLDS_ALONE in (folder / "report.md").read_text()


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie, which has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def exit_status(script: Path, folder: Path) -> int:
    """Of the script in a process of its own, forked from one that has imported what takes the time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    process = context.Process(target=run_in, args=(empty, script))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_in(folder: Path, script: Path) -> None:
    os.chdir(folder)
    runpy.run_path(str(script), run_name="__main__")


class Witness(Trial):
    """A trial that works out each check's two sides once more, by the expressions that a script gets."""

    def _call(self, problem: Problem, **how: Any) -> Outputs:
        outputs = super()._call(problem, **how)
        inputs = {"q": problem.q, "k": problem.k, "v": problem.v, "dout": problem.dout}
        results.append(inputs | outputs.named())
        assert len(results) == len(self.calls)
        return outputs

    def settle(self, checks: list[Check]) -> dict[str, float]:
        for c in checks:
            self.compare(c.expression or c.tensor, c.call, c.actual)
            if c.other is not None:
                self.compare(c.other_expression or c.tensor, c.other, c.expected)
                seen.add((c.claim, c.tensor))
        return super().settle(checks)

    @staticmethod
    def compare(expression: str, call: int, side: torch.Tensor) -> None:
        value = eval(expression, {"torch": torch, "results": results}, results[call]).double()
        # A part of the rows, with the same indices, is a side too. Sums of float64 differ by their order.
        torch.testing.assert_close(value[tuple(map(slice, side.shape))], side.double(), rtol=1e-9, atol=1e-9)


results: list[dict[str, torch.Tensor]] = []
seen: set[tuple[str, str]] = set()


def test_a_script_compares_what_the_law_compared() -> None:
    seen.clear()
    kernel = AttentionKernel(name="sound", forward=sound, capabilities=CLAIMS)
    for causal, shape in itertools.product((False, True), ((5, 7), (7, 5))):
        case = Case(
            batch=2,
            heads_kv=3,
            group=2,
            seqlen_q=shape[0],
            seqlen_k=shape[1],
            causal=causal,
            q_layout="gap",
            seed=9,
        )
        for name in ("identities", "invariance", "composition", "determinism", "memory"):
            results.clear()
            law(name)(Witness(kernel, case, "cpu", SAFETY))
    # both sides of each of these come from the kernel, and a mended one gives another number for both
    assert len({claim for claim, _ in seen}) >= 14, sorted(seen)


@pytest.mark.parametrize(
    ("name", "depends"), [("unwritten", True), ("unwritten_with_wrong_lse", True), ("wrong", False)]
)
def test_a_script_brings_its_memory_where_the_failure_depends_on_it(name: str, depends: bool) -> None:
    """Of a row that nobody has written, fresh memory of zeros says what it should."""
    case = replace(CASE, v_values="zeros" if depends else "normal")
    request = {"law": "forward", "case": json.loads(to_json(case)), "safety": SAFETY}
    kernel = load(f"{TOYS}:{name}", ())
    assert Worker("cpu").depends_on_memory(request, kernel, "out") == depends


@pytest.mark.parametrize(("actual", "right"), [(-math.inf, True), (0.0, False), (math.nan, False)])
def test_a_script_knows_an_lse_of_minus_infinity(actual: float, right: bool) -> None:
    finding = Finding(claim="", kind="error", tensor="lse", expected="-inf", actual="0.0", allowed=0.0)
    values = {"a": actual, "e": -math.inf, "allowed": 0.0, "inf": math.inf, "math": math}
    assert bool(eval(_right(finding, "float16"), values)) == right


@pytest.mark.usefixtures("unscripted")
def test_tensors_of_a_script_have_the_layout_of_the_case(subject_of: SubjectOf, tmp_path: Path) -> None:
    subject = subject_of("wrong")
    subject.shrinking = ShrinkBudget(seconds=0.0)  # the layouts do not matter, and would go
    case = replace(CASE, q_layout="offset", k_layout="gap", v_layout="expanded_rows", dtype="float32")
    finding_of(subject, "forward", case)
    (failure,) = subject.failures.values()
    text = (tmp_path / "reports" / failure.folder / "repro.py").read_text()
    windows = re.findall(r"^(\w+)0 = window\(torch.float32, (\(.*?\)), (\(.*?\)), (\d+)", text, re.MULTILINE)
    assert [(name, stride) for name, _, stride, _ in windows] == [
        ("q", "(48, 48, 16, 1)"),
        ("k", "(50, 43, 19, 1)"),
        ("v", "(0, 0, 0, 1)"),
        ("dout", "(48, 48, 16, 1)"),
    ]
    assert int(windows[0][3]) % 64 == 1


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([1.0, -0.0, math.inf], "[1.0, -0.0, inf]"),
        ([0.0] * 100, "{}"),
        ([0.0] * 98 + [-0.0, 2.0], "{98: -0.0, 99: 2.0}"),
        ([0.5] * 100, "'eJ"),
    ],
    ids=["few", "zeros", "sparse", "many"],
)
def test_the_numbers_of_a_tensor_come_back(values: list[float], written: str) -> None:
    x = torch.tensor(values, dtype=torch.bfloat16)
    line = _window(x.reshape(1, 1, -1, 1), None)
    assert f", {written}" in line
    scope: dict[str, Any] = {"__file__": __file__}
    functions = PROGRAM[PROGRAM.index("watched = []") : PROGRAM.index("def call(")]
    exec(
        "import base64, torch, zlib\nfrom math import inf, nan\nDEVICE = 'cpu'\n"
        + functions.format(margin=8, filled=1024),
        scope,
    )
    made = eval(line, scope)
    assert made.flatten().view(torch.int16).tolist() == x.view(torch.int16).tolist()


class TestReport:
    FINDING = Finding(
        claim="out is right",
        kind="error",
        tensor="out",
        index=(0, 1, 2, 3),
        expected=1.0,
        actual="nan",
        allowed=1e-3,
        ratio="inf",
        wrong=2,
        total=7,
        nan=3,
        posinf=4,
        neginf=5,
    )

    @pytest.fixture
    def failure(self) -> report.Failure:
        return report.Failure(
            "toys.py:f", "toys.f", ("lse=false",), "forward", CASE, self.FINDING, ENVIRONMENT
        )

    def test_the_message_has_everything_a_maintainer_asks_for(self, failure: report.Failure) -> None:
        path = f"reports/toys.f/forward-{failure.digest}"
        assert report.message(failure, Path("reports")).splitlines() == [
            "toys.f: law `forward` is broken, out is wrong (float32)",
            "  claim            out is right",
            "  where            out[0, 1, 2, 3]",
            "  expected         1.0",
            "  actual           nan",
            "  allowed error    0.001",
            "  error / allowed  inf",
            "  wrong elements   2 of 7; in out: 3 NaN, 4 +inf, 5 -inf",
            f"  smallest case    {CASE!r}",
            "  versions         torch 2.0",
            "  device           cpu (abacus)",
            f"  report           {path}/report.md",
            f"  replay           python -m pytest tests/properties --device cpu --replay {path}/case.json",
        ]

    def test_markdown_cannot_be_broken_by_what_a_kernel_says(self, failure: report.Failure) -> None:
        nasty = replace(failure, finding=replace(self.FINDING, claim="a | b\n`c`", detail="```\n# title"))
        text = report.markdown(nasty, Path("reports"), has_script=False)
        assert "| claim | `a \\| b 'c'` |" in text
        assert "    ```\n    # title\n" in text

    def test_what_is_written_is_read(self, failure: report.Failure, tmp_path: Path) -> None:
        report.write(failure, tmp_path)
        replay = report.read(tmp_path / failure.folder / "case.json")
        assert replay == report.Replay("toys.py:f", ("lse=false",), "forward", CASE)

    def test_a_smaller_case_of_the_same_bug_takes_the_place_of_a_larger(
        self, failure: report.Failure, tmp_path: Path
    ) -> None:
        report.write(failure, tmp_path, "script of the larger case")
        report.write(replace(failure, case=SMALL), tmp_path)
        (folder,) = (tmp_path / "toys.f").iterdir()
        assert report.read(folder / "case.json").case == SMALL
        assert not (folder / "repro.py").exists()

    def test_the_folder_stays_inside(self, failure: report.Failure) -> None:
        assert replace(failure, kernel="../../up").folder.parts[0] == "_.._up"

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            (lambda text: text[:100], "is not JSON"),
            (lambda text: "[" * 100_000, "is not JSON"),
            (lambda text: "[]", "expected the case.json of a report, got other JSON"),
            (lambda text: '{"case": {}}', "expected the case.json of a report, got other JSON"),
            (
                lambda text: text.replace('"flashproof": 1', '"flashproof": 2'),
                "flashproof: got 2, expected format 1",
            ),
            (
                lambda text: text.replace('"version": 3', '"version": 0'),
                "case.version: got 0, expected 1 to 3",
            ),
            (
                lambda text: text.replace('"law": "forward"', '"law": "murphy"'),
                "law: got 'murphy', expected one of",
            ),
            (
                lambda text: text.replace('"kernel": "toys.py:f"', '"kernel": 3'),
                "kernel: got 3, expected a str",
            ),
            (
                lambda text: text.replace('"lse=false"', "7"),
                r"claims: got \(7,\), expected key=value strings",
            ),
            (lambda text: text.replace('"seed": 0', '"seed": -1'), "case.seed: got -1, expected an integer"),
            (
                lambda text: text.replace('"seed": 0', f'"seed": {2**32}'),
                "case.seed: got .*, expected a number",
            ),
            (
                lambda text: text.replace('"k_layout": "contiguous"', '"k_layout": "bhdn"'),
                "case.k_layout: got 'bhdn', expected one of contiguous, ",
            ),
            (
                lambda text: text.replace('"batch": 1', '"batch": 1000000000000'),
                r"case: got q of shape \(1000000000000, .*\), expected at most",
            ),
        ],
    )
    def test_what_was_not_written_by_us_is_refused_in_one_line(
        self, failure: report.Failure, tmp_path: Path, change: Callable[[str], str], complaint: str
    ) -> None:
        report.write(failure, tmp_path)
        path = tmp_path / failure.folder / "case.json"
        path.write_text(change(path.read_text()))
        with pytest.raises(ValueError, match=complaint) as refused:
            report.read(path)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("path", ["missing.json", "."])
    def test_what_cannot_be_read_is_refused(self, tmp_path: Path, path: str) -> None:
        with pytest.raises(ValueError, match="can't be read"):
            report.read(tmp_path / path)


class TestJournal:
    RECORD = report.record("toys.py:f", (), "forward", CASE)

    def test_a_case_that_was_not_finished_can_be_replayed(self, tmp_path: Path) -> None:
        folder = tmp_path / "journals"
        folder.mkdir()
        journal = Journal(folder / "gw0.json")
        journal.note(self.RECORD | {"kernel": "a much longer name than that of the last one"})
        journal.note(self.RECORD)
        journal.sync()
        finished = Journal(folder / "gw1.json")
        finished.note(self.RECORD)
        finished.close()
        assert examples_done(folder) == 3
        (path,) = set_aside_unfinished(folder)
        assert path == tmp_path / "unfinished-gw0.json"
        assert report.read(path).case == CASE
        assert list(folder.iterdir()) == []

    def test_half_a_line_is_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "gw0.json").write_text('{"done": 3, "ke')
        assert examples_done(tmp_path) == 0


class TestTally:
    def test_counts_merge_over_processes(self) -> None:
        one, two, both = Tally(), Tally(), Tally()
        verdicts = [
            Verdict(status="held", worst={"out": 0.25, "lse": 0.125}, seconds={"kernel": 1.0}),
            Verdict(status="held", worst={"out": 0.5}, seconds={"kernel": 2.0}),
            Verdict(status="broken", finding=TestReport.FINDING),
            Verdict(status="refused", reason="no"),
            Verdict(status="skipped", reason="no memory"),
        ]
        for number, verdict in enumerate(verdicts):
            both.add(verdict, Case(seed=number))
            (one, two)[number % 2].add(verdict, Case(seed=number))
        one.merge(Tally.from_dict(json.loads(json.dumps(two.to_dict()))))
        assert one == both
        assert (one.examples, one.broken, one.refusals, one.skipped) == (3, 1, 1, 1)
        assert (one.worst, one.worst_tensor, one.worst_case) == (0.5, "out", repr(Case(seed=1)))
        assert one.seconds == {"kernel": 3.0}

    def test_quantiles_are_upper_edges_of_bins(self) -> None:
        tally = Tally()
        for ratio in (0.1, 0.2, 0.3, 0.9):
            tally.add(Verdict(status="held", worst={"out": ratio}), CASE)
        assert tally.quantile("out", 0.5) == pytest.approx(0.201)  # the bin that 0.2 is in, a thousandth wide
        assert tally.quantile("out", 1.0) == pytest.approx(0.901)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1.0, 200, math.inf), "0 of 200 examples"),
        ((50, 10.0, 200, math.inf), "50 of 200 examples, 5.0 examples/s, 0:30 left"),
        ((50, 10.0, 200, 20.0), "50 of 200 examples, 5.0 examples/s, 0:20 left"),
        ((300, 10.0, 200, math.inf), "300 of 200 examples, 30.0 examples/s, 0:00 left"),
        ((50, 10.0, None, 590.0), "50 examples, 5.0 examples/s, 9:50 left"),
    ],
)
def test_the_live_line(arguments: tuple[Any, ...], text: str) -> None:
    assert progress(*arguments) == text


class TestUsageErrors:
    @pytest.fixture
    def plan_of(self, child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        """Makes the plan for some options, the others being what they are by default."""
        monkeypatch.setattr(planning, "Child", lambda device: child)
        defaults = {"device": "cpu", "claims": [], "report_dir": str(tmp_path / "reports")}

        def make(**options: Any) -> planning.Plan:
            given = defaults | options
            config = SimpleNamespace(getoption=lambda name: given.get(name.strip("-").replace("-", "_")))
            return planning.make_plan(config)  # type: ignore[arg-type]  # what it uses of it

        return make

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kernel": ["nonsense"]}, "kernel 'nonsense': expected flash_v1, flash_v2, .*"),
            ({"kernel": [f"{TOYS}:nothing"]}, "kernel '.*toys.py:nothing': no 'nothing' in .*; it has .*"),
            ({"kernel": ["sdpa_cudnn"]}, "kernel 'sdpa_cudnn': runs on CUDA only"),
            ({"kernel": [f"{TOYS}:sound"] * 2}, "--kernel .*: got a second kernel called toys.sound, .*"),
            ({"claims": ["head_dims=0"]}, "claim head_dims: got '0', expected integers .*"),
            ({"examples": 0}, "--examples: got 0, expected a positive number"),
            ({"minutes": math.nan}, "--minutes: got nan, expected a positive number"),
            ({"time_limit": -1.0}, "--time-limit: got -1.0, expected a positive number"),
            ({"time_limit": 4.0, "minutes": 4.0}, "--time-limit: got 4.0, expected none with --minutes"),
            ({"max_seqlen": -1}, "--max-seqlen: got -1, expected a positive number"),
            ({"replay": "missing.json"}, "--replay missing.json: can't be read .*"),
        ],
    )
    def test_each_is_one_line_and_writes_nothing(
        self, plan_of: Callable[..., Any], tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(pytest.UsageError) as refused:
            plan_of(**options)
        assert re.fullmatch(message, str(refused.value)), refused.value
        assert not (tmp_path / "reports").exists()

    def test_a_report_folder_that_cannot_be_made(self, plan_of: Callable[..., Any], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(
            pytest.UsageError, match=r"--report-dir: got .*, expected a folder .*\(Not a directory\)"
        ):
            plan_of(kernel=[f"{TOYS}:sound"], report_dir=str(tmp_path / "file" / "reports"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self, plan_of: Callable[..., Any]) -> None:
        with pytest.raises(pytest.UsageError, match="--device: got cuda, expected cpu or auto"):
            plan_of(device="cuda")

    def test_a_replay_of_what_is_not_claimed(self, plan_of: Callable[..., Any], tmp_path: Path) -> None:
        path = tmp_path / "case.json"
        for case in (
            replace(CASE, dropout_p=0.1),
            replace(CASE, key_padding="left"),
            replace(CASE, head_dim=17),
            replace(CASE, launch=(("block_q", 16),)),
        ):
            path.write_text(json.dumps(report.record(f"{TOYS}:sound", (), "forward", case)))
            with pytest.raises(pytest.UsageError) as refused:
                plan_of(replay=str(path))
            assert f"--replay: got {case!r}, but {TOYS}:sound claims dtypes=" in str(refused.value)
        path.write_text(json.dumps(report.record(f"{TOYS}:sound", (), "forward", CASE)))
        with pytest.raises(pytest.UsageError, match=r"got Case\(.*\), but .* claims dtypes=float16; "):
            plan_of(replay=str(path), claims=["dtypes=float16"])

    def test_an_empty_path_is_no_path(self, plan_of: Callable[..., Any]) -> None:
        for option in ("replay", "corpus"):
            with pytest.raises(pytest.UsageError, match=f"--{option}.* expected "):
                plan_of(**{option: ""})

    def test_kernels_that_cannot_run_here_are_named(self, plan_of: Callable[..., Any]) -> None:
        plan = plan_of()
        assert "kernel 'sdpa_cudnn': runs on CUDA only" in plan.unavailable
        assert "sdpa_math" in [info.name for info in plan.kernels]


def pytest_run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on the property tests as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", str(ROOT / "tests/properties"), "--device", "cpu", *arguments],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


class TestCommandLine:
    def test_a_usage_error_with_workers_is_status_4_and_one_line(self, tmp_path: Path) -> None:
        run = pytest_run(tmp_path, "-n2", "--examples", "0", "-p", "no:cacheprovider")
        assert run.returncode == pytest.ExitCode.USAGE_ERROR
        assert (run.stdout + run.stderr).strip() == "ERROR: --examples: got 0, expected a positive number"
        assert list(tmp_path.iterdir()) == []

    def test_a_run_that_is_killed_while_shrinking_has_a_whole_report(self, tmp_path: Path) -> None:
        (tmp_path / "toys.py").write_text(TOYS.read_text())
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests/properties/test_forward.py")]
        options = ["--device=cpu", "--kernel=toys.py:wrong", "--shrink-seconds=600"]
        run = subprocess.Popen([*command, *options], cwd=tmp_path, stdout=subprocess.DEVNULL)
        while not (found := list(tmp_path.glob("reports/toys.wrong/*/case.json"))):
            assert run.poll() is None, "it ended without a report"
            time.sleep(0.05)  # no time is asserted: it waits for the first report, however long that takes
        run.kill()
        run.wait()
        kept = report.read(found[0])
        assert (kept.kernel, kept.law) == ("toys.py:wrong", "forward")
        assert kept.case.seqlen_q >= ROWS

    def test_a_run_its_report_and_its_replay(self, tmp_path: Path) -> None:
        toys = tmp_path / "toys.py"
        toys.write_text(TOYS.read_text())
        kernels = ["--kernel", "toys.py:sound", "--kernel", "toys.py:wrong", "-k", "test_forward and float32"]
        options = ["--time-limit=10", "--examples=20", "-n2", "--hypothesis-seed=1", "--junitxml=junit.xml"]
        run = pytest_run(tmp_path, *kernels, *options, CI="1", GITHUB_ACTIONS="true")
        assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
        text = run.stdout
        assert re.search(r"flashproof: cpu \(.*\), torch .*, triton .*, hypothesis ", text)
        assert "profile: dev, 20 examples, seed: 1, at most 10 minutes (--time-limit)" in text
        assert "kernel toys.wrong: dtypes=float16, bfloat16, float32; " in text
        assert re.search(r"toys.sound +forward +float32 +20 +0 +\d\.\d+ \w+ +held", text)
        assert re.search(r"toys.wrong +forward +float32 +\d+ +0 .* broken", text)
        bug = "toys.wrong: law `forward` is broken, out is wrong (float32)"
        assert f"\n1. {bug}\n" in text
        assert re.search(r"^   only with seqlen_q$", text, re.MULTILINE)
        (annotation,) = re.findall(
            r"^::error title=(.*?)::\d+ failures; matters: seqlen_q", text, re.MULTILINE
        )
        assert annotation == bug.replace(":", "%3A").replace(",", "%2C")
        assert not re.search(r"^\S+\.py:\d+: ", text, re.MULTILINE), "a frame of a traceback"

        # Both workers have met it, and one of them has shrunk it.
        smallest, *others = set(re.findall("smallest case +(.*)", text))
        assert others == []
        assert eval(smallest, {"Case": Case, "Spike": Spike}).seqlen_q == ROWS
        assert smallest in (tmp_path / "junit.xml").read_text()
        summary = json.loads((tmp_path / "reports/summary.json").read_text())
        assert summary["environment"]["device"] == "cpu"
        assert summary["kernels"]["toys.sound"]["claims"]["lse"] == "yes"
        rows = {row["kernel"]: row for row in summary["results"]}
        assert {name: row["verdict"] for name, row in rows.items()} == {
            "toys.sound": "held",
            "toys.wrong": "broken",
        }
        assert rows["toys.wrong"]["examples"] > rows["toys.wrong"]["broken"] > 0
        assert rows["toys.sound"]["worst_case"].startswith("Case(")

        (report_folder,) = rows["toys.wrong"]["reports"]
        folder = tmp_path / "reports" / report_folder
        assert {path.name for path in folder.iterdir()} - {"error.png"} == {
            "case.json",
            "report.md",
            "repro.py",
        }
        assert "seqlen_q: fails with 3, 4" in (folder / "report.md").read_text()
        (line,) = set(re.findall("replay +python -m pytest tests/properties (.*)", text))
        replay = pytest_run(tmp_path, *line.split(), "-q")
        assert replay.returncode == pytest.ExitCode.TESTS_FAILED
        assert smallest in replay.stdout
        corpus = ["--corpus", "reports", "--examples=1", "-q", *kernels[2:]]
        again = pytest_run(tmp_path, *corpus)
        assert again.returncode == pytest.ExitCode.TESTS_FAILED
        assert smallest in again.stdout
        toys.write_text(TOYS.read_text().replace("MENDED = False", "MENDED = True"))
        replay = pytest_run(tmp_path, *line.split(), "-q")
        assert replay.returncode == pytest.ExitCode.OK, replay.stdout
        assert "1 passed" in replay.stdout
        assert pytest_run(tmp_path, *corpus).returncode == pytest.ExitCode.OK

    def test_a_run_by_the_clock_tries_everything_and_ends(self, tmp_path: Path) -> None:
        kernels = [
            "--kernel",
            f"{TOYS}:sound",
            "--kernel",
            f"{TOYS}:wrong",
            "-k",
            "test_forward or test_exact",
        ]
        text = pytest_run(tmp_path, *kernels, "--minutes=0.1", "-n2", "--shrink-seconds=0.1").stdout
        assert re.search(r"profile: fuzz, .*, for 0.1 minutes", text)
        rows = json.loads((tmp_path / "reports/summary.json").read_text())["results"]
        assert len(rows) == 2 * 2 * 3
        tried = {row["verdict"] for row in rows}
        assert "held" in tried
        assert tried <= {"held", "broken"} or "the time of the run was up" in text

    def test_what_the_time_was_up_for_is_told(self, tmp_path: Path) -> None:
        options = ["--kernel", f"{TOYS}:sound", "-k", "test_forward", "--examples=9000", "--time-limit=0.05"]
        run = pytest_run(tmp_path, *options)
        assert run.returncode == pytest.ExitCode.OK, run.stdout
        rows = json.loads((tmp_path / "reports/summary.json").read_text())["results"]
        for row in rows:
            assert row["examples"] + row["undrawn"] == 9000
            assert row["verdict"] == ("held" if row["examples"] else "not tried")
            assert f"(+{row['undrawn']} time up)" in run.stdout

    def test_every_case_of_a_corpus_is_run(self, tmp_path: Path) -> None:
        spec = f"{TOYS}:raising_on_one_key"
        (tmp_path / "cases").mkdir()
        for i, case in enumerate((CASE, replace(CASE, seqlen_k=1))):
            (tmp_path / f"cases/{i}.json").write_text(json.dumps(report.record(spec, (), "forward", case)))
        options = ["--kernel", spec, "-k", "forward and float32", "--examples=1", "--hypothesis-seed=1"]
        text = pytest_run(tmp_path, "--corpus=cases", *options).stdout
        assert re.findall(r"^\S+ law `forward` is broken, (.*) \(float32\)$", text, re.MULTILINE) == [
            "out is wrong",
            "exception",
        ]
        summary = json.loads((tmp_path / "reports/summary.json").read_text())
        # Where one bug raises, nothing is known of the other: with one key no number comes back.
        matters = {bug["tensor"]: bug["matters"] for bug in summary["bugs"]}
        assert matters == {"out": ["seqlen_q"], "": ["seqlen_q", "seqlen_k"]}

    def test_a_corpus_that_cannot_be_read_is_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "cases").mkdir()
        empty = pytest_run(tmp_path, "--corpus", "cases")
        assert empty.returncode == pytest.ExitCode.USAGE_ERROR
        assert "--corpus: got 'cases', expected a folder with the case.json of reports" in empty.stderr
        (tmp_path / "cases" / "case.json").write_text("{")
        truncated = pytest_run(tmp_path, "--corpus", "cases")
        assert truncated.returncode == pytest.ExitCode.USAGE_ERROR
        assert "--corpus cases/case.json: is not JSON" in truncated.stderr

    def test_three_bugs_are_three_reports(self, tmp_path: Path) -> None:
        """Without attribution each of three bugs has a report for every law, dtype and tensor that it breaks."""
        options = ["--kernel", f"{SEVERAL}:three", "--examples=20", "-n2", "--shrink-seconds=20"]
        chosen = ["-k", "forward or backward"]
        run = pytest_run(tmp_path, *options, *chosen, "--hypothesis-seed=2")
        assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
        summary = json.loads((tmp_path / "reports/summary.json").read_text())
        needs = {tuple(sorted(bug["matters"])) for bug in summary["bugs"] if bug["rank"] == "numbers"}
        assert needs == {("causal",), ("group", "heads_kv"), ("seqlen_k",)}
        assert len(summary["bugs"]) == 3
        for bug in summary["bugs"]:
            text = (tmp_path / "reports" / bug["folder"] / "report.md").read_text()
            assert "### How bad, and where else" in text
            assert f"{bug['failures']} failing example" in text
        folders = {f"several.three/{path.name}" for path in (tmp_path / "reports/several.three").iterdir()}
        assert folders == {bug["folder"] for bug in summary["bugs"]}
        broken = [row for row in summary["results"] if row["verdict"] == "broken"]
        assert all(row["reports"] for row in broken)

    def test_the_claim_that_would_be_true_is_offered(self, tmp_path: Path) -> None:
        options = ["--kernel", f"{SEVERAL}:top_left", "--examples=10", "-k", "forward and float32"]
        text = pytest_run(tmp_path, *options, "--hypothesis-seed=1").stdout
        assert "\nbugs, the worst first: 1\n" in text
        assert re.search(r"--claims causal_alignment=top_left: all \d+ failing cases hold", text)
        again = pytest_run(tmp_path, *options, "--claims=causal_alignment=top_left")
        assert again.returncode == pytest.ExitCode.OK, again.stdout
