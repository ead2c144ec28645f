"""Children that crash, hang, print or lose their device: the verdict on the case, and the case after it."""

import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies.case import Case
from tests.harness.clock import GRACE_SECONDS, Clock, ShrinkBudget
from tests.harness.device.sync import IMPATIENT_SECONDS, OVERRAN, WAIT_SECONDS
from tests.harness.files import ROOT
from tests.harness.law import law_named
from tests.harness.run import Run, read
from tests.harness.running.child import KILLED, Child, HarnessError, environment_of
from tests.harness.running.exits import KEPT_BYTES, Tail
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.session.subject import Subject, TimeUp
from tests.harness.verdict import Finding
from tests.unit.support.running import (
    CASE,
    SEVERAL,
    SMALL,
    TOYS,
    SubjectOf,
    exit_status,
    finding_of,
    has_ended,
    report_of,
    runs,
)
from tests.unit.support.toys import ROWS


class TestChild:
    def test_a_sound_kernel_holds(self, subject_of: SubjectOf) -> None:
        subject = subject_of("sound")
        subject.check(law_named("forward"), CASE)
        assert subject.tally.examples == 1
        assert subject.tally.broken == 0
        assert 0 < subject.tally.worst < 1
        assert {"kernel", "tensors", "check"} <= subject.tally.seconds.keys()

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="a device that hangs is a GPU")
    def test_a_process_whose_device_hangs_is_ended(self) -> None:
        program = (
            "import torch; from tests.harness.device.sync import wait_for_device; "
            "torch.cuda._sleep(1 << 36); wait_for_device('cuda', seconds=0.5)"
        )
        assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == OVERRAN

    def test_a_child_whose_device_no_longer_answers_is_replaced(
        self, child: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = child.ask({"do": "environment"})
        monkeypatch.setattr(child, "_read_line", lambda seconds: b'{"status": "broken", "fatal": true}')
        assert child.ask({"do": "environment"}) == {"status": "broken"}
        assert child.process is None
        monkeypatch.undo()
        assert child.ask({"do": "environment"}) == before

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="a device fault needs a GPU")
    def test_a_device_fault_is_a_finding_and_the_child_is_replaced(
        self, subject_of: SubjectOf, tmp_path: Path
    ) -> None:
        on_gpu = Child("cuda:0")
        subject = subject_of("faulting", child=on_gpu)
        assert finding_of(subject, "forward", CASE).kind == "fault"
        assert on_gpu.process is None
        assert exit_status(report_of(subject) / "repro.py", tmp_path) == 1

    @pytest.mark.parametrize("kind", ["fault", "died"])
    def test_a_script_is_written_without_a_call_that_ends_the_process(self, child: Child, kind: str) -> None:
        finding = asdict(Finding(claim="it runs", kind=kind))
        run = Run(f"{TOYS}:crashing", (), "forward", CASE)
        request = run.request("repro", finding=finding, title="", seconds=9.0)
        assert "--inside" in child.ask(request)["text"]

    def test_an_error_of_ours_in_an_old_process_is_tried_in_a_new_one(
        self, child: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        child.ask({"do": "environment"})
        before, receive = child.process, child._receive
        spoiled = iter([HarnessError("TypeError: unsupported operand type(s) for &: 'Tensor' and 'Tensor'")])

        def spoiled_once(seconds: float) -> dict[str, Any]:
            answer = receive(seconds)
            for error in spoiled:
                raise error
            return answer

        monkeypatch.setattr(child, "_receive", spoiled_once)
        run = Run(f"{TOYS}:sound", (), "forward", CASE)
        assert child.run(run, lambda: None).status == "held"
        assert child.process is not before

    def test_what_is_found_is_kept_where_we_fail_ourselves(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(*_: Any) -> None:
            raise HarnessError("TypeError: of ours")

        subject = subject_of("wrong")
        monkeypatch.setattr(subject.runs, "script", failing)
        assert finding_of(subject, "forward", CASE).tensor == "out"
        assert len(subject.known.bugs) == 1
        assert any("TypeError: of ours" in message for message in subject.known.messages())

    @pytest.mark.usefixtures("without_ordinary_crashes")
    def test_a_crash_is_a_finding_and_the_child_is_replaced(self, subject_of: SubjectOf) -> None:
        subject = subject_of("crashing", shrink=False)
        finding = finding_of(subject, "forward", CASE)
        assert finding.kind == "died"
        assert "signal 11" in finding.claim
        subject.check(law_named("forward"), SMALL)
        assert subject.tally.examples == 2

    def test_a_child_that_others_have_killed_says_nothing_against_the_kernel(self, child: Child) -> None:
        child.ask({"do": "environment"})
        assert child.process is not None
        child.process.kill()
        assert child.run(Run(f"{TOYS}:sound", (), "forward", CASE), lambda: None).status == "held"

    def test_a_case_whose_child_is_killed_again_counts_as_not_run(self, child: Child) -> None:
        def kill() -> None:
            assert child.process is not None
            child.process.kill()

        verdict = child.run(Run(f"{TOYS}:hanging", (), "forward", CASE), kill)
        assert (verdict.status, verdict.reason) == ("skipped", KILLED)

    def test_a_process_that_cannot_start_says_nothing_against_the_kernel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others may have filled the device's memory, so that a new process finds none for itself."""
        full = [sys.executable, "-c", "raise MemoryError('no memory is left')"]
        started: list[subprocess.Popen[bytes]] = []

        def start(self: Child) -> subprocess.Popen[bytes]:
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(full, stdin=pipe, stdout=pipe, stderr=pipe))
            return started[-1]

        monkeypatch.setattr(Child, "_new_process", start)
        verdict = Child("cpu").run(Run(f"{TOYS}:sound", (), "forward", CASE), lambda: None)
        told = "no process can be started: MemoryError: no memory is left"
        assert (verdict.status, verdict.reason, len(started)) == ("skipped", told, 2)

    def test_where_a_process_can_not_be_copied_the_next_one_is_started_ahead(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.harness.running.child.seen_by_child", lambda device: "cpu")
        monkeypatch.setattr(
            "tests.harness.running.child.environment_of", lambda device: environment_of("cpu")
        )
        child, spec = Child("cuda:0"), f"{TOYS}:keeping_the_longest"
        short, long = (replace(CASE, seqlen_k=x, causal=True) for x in (5, 9))

        def statuses() -> list[str]:
            return [
                child.run(Run(spec, (), "forward", case), lambda: None).status
                for case in (long, short, short)
            ]

        assert (statuses(), child.spare) == (["held", "broken", "broken"], None)
        child.stateful.add(spec)
        assert statuses() == ["held", "held", "held"]
        ahead = child.spare
        assert ahead is not None
        child.run(Run(spec, (), "forward", long), lambda: None)
        assert child.process is ahead
        assert child.spare is not None
        child.spare.kill()
        child.close()

    def test_a_crash_tells_where_the_kernel_was(self, child: Child) -> None:
        finding = child.run(Run(f"{TOYS}:crashing", (), "forward", CASE), lambda: None).finding
        assert finding is not None
        assert [line.rpartition(" in ")[2] for line in finding.detail.splitlines()[1:]] == [
            "crashing",
            "string_at",
        ]

    def test_a_crash_at_the_fence_is_told_as_an_access_past_the_end(self, child: Child) -> None:
        case = Case(seqlen_q=0, seqlen_k=17)
        run = Run("tests.faults.planted:reading_outside", (), "memory", case)
        finding = child.run(run, lambda: None).finding
        assert finding is not None
        assert finding.claim.startswith("nothing is read or written past the end of a tensor")

    def test_of_much_output_the_end_is_kept(self) -> None:
        program = "import os; [os.write(2, b'a' * 2**20) for _ in range(64)]; os.write(2, b'the end')"
        with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            tail = Tail(process.stderr)
            process.wait()
            assert tail.text() == "a" * (KEPT_BYTES - 7) + "the end"

    @pytest.mark.usefixtures("unscripted")
    def test_what_is_not_written_is_nan_on_every_run(self, subject_of: SubjectOf) -> None:
        assert finding_of(subject_of("unwritten"), "forward", CASE).actual == "nan"

    @pytest.mark.usefixtures("unscripted")
    def test_a_crash_while_shrinking_leaves_what_was_smallest(self, subject_of: SubjectOf) -> None:
        subject = subject_of("crashing_on_one_key")
        finding_of(subject, "forward", replace(CASE, batch=2, seqlen_k=5))
        (failure,) = subject.known.failures.values()
        assert failure.finding.kind == "error"
        assert (failure.case.batch, failure.case.seqlen_q, failure.case.seqlen_k) == (1, ROWS, 2)
        assert read(report_of(subject) / "case.json").case == failure.case

    @pytest.mark.usefixtures("unscripted")
    def test_what_a_crash_needs_is_found_in_few_runs_and_the_rest_is_run_without(
        self, subject_of: SubjectOf
    ) -> None:
        subject = subject_of("behind_a_crash", SEVERAL)
        # Each run starts a process, which takes seconds on a busy machine.
        subject.triage.shrinking = ShrinkBudget(seconds=100.0)
        case = replace(CASE, batch=2, heads_kv=3, causal=True, q_layout="bnhd", v_layout="gap", sm_scale=-1.0)
        assert finding_of(subject, "forward", case).kind == "died"
        (bug,) = subject.known.bugs.values()
        assert [need.name for need in bug.needs] == ["v_layout"]
        assert subject.runs.journal.done < 20
        assert finding_of(subject, "forward", case).kind == "error"
        assert (subject.tally.set_aside, subject.tally.moved, subject.tally.broken) == (1, 1, 2)

    @pytest.mark.usefixtures("without_ordinary_crashes")
    def test_a_hang_is_a_finding(self, subject_of: SubjectOf) -> None:
        impatient = Child("cpu", run_seconds=1.0)
        subject, process = subject_of("hanging", child=impatient, shrink=False), impatient.process
        finding = finding_of(subject, "forward", CASE)
        assert finding.kind == "hung"
        assert "still running after 1 s" in finding.claim
        assert process is not None
        assert process.returncode == -signal.SIGKILL

    def test_a_case_that_outlasts_the_run_is_ended_and_is_no_hang(self, subject_of: SubjectOf) -> None:
        slow = Child("cpu")
        subject = in_little_time(subject_of("hanging", child=slow))
        with pytest.raises(TimeUp):
            subject.check(law_named("forward"), CASE)
        assert subject.runs.clock.remaining > -GRACE_SECONDS
        assert not subject.known.seen
        assert slow.process is None

    @pytest.mark.usefixtures("unscripted")
    def test_an_investigation_that_outlasts_the_run_is_ended_and_its_bug_is_kept(
        self, subject_of: SubjectOf
    ) -> None:
        slow = subject_of("slower_from_call_to_call", child=Child("cpu"))
        subject = in_little_time(slow)
        assert finding_of(subject, "forward", CASE).kind == "error"
        assert subject.runs.clock.remaining > -2 * GRACE_SECONDS

    def test_a_child_that_hangs_ends_with_its_parent(self) -> None:
        program = (
            "from strategies.case import Case\nfrom tests.harness.run import Run\n"
            "from tests.harness.running.child import Child; child = Child('cpu')\n"
            "def meanwhile(): print(child.process.pid, flush=True)\n"
            f"child.run({Run(f'{TOYS}:hanging', (), 'forward', CASE)!r}, meanwhile)"
        )
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert runs(pid)
            parent.kill()
        assert has_ended(pid)

    @pytest.mark.usefixtures("without_ordinary_crashes")
    def test_a_hang_of_the_device_is_a_finding(self, subject_of: SubjectOf) -> None:
        finding = finding_of(subject_of("hanging_on_the_device", shrink=False), "forward", CASE)
        assert finding.kind == "hung"
        assert "the device was still running" in finding.claim

    def test_a_kernel_that_has_hung_gets_less_time(
        self, subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        child, asked = subject_of("hanging_on_the_device").runs.child, list[float]()
        send = child._send

        def noted(request: dict[str, Any]) -> None:
            asked.extend([request["patience"]] if "patience" in request else [])
            send(request)

        monkeypatch.setattr(child, "_send", noted)
        child.hung.clear()
        for name in ("hanging_on_the_device", "hanging_on_the_device", "sound"):
            child.run(Run(f"{TOYS}:{name}", (), "forward", CASE), lambda: None)
        assert asked == [WAIT_SECONDS, IMPATIENT_SECONDS, WAIT_SECONDS]

    def test_a_launcher_that_waits_for_a_device_that_hangs_is_ended(self) -> None:
        # A device that never finishes is put in the place of a real one, so that the test needs no GPU.
        program = (
            "import time; from tests.harness.device import sync; "
            "from tests.harness.accelerators.cuda import Cuda; Cuda.wait_for_launched = lambda _: time.sleep(60); "
            "context = sync.watched('cuda', seconds=0.5, look=0.1); context.__enter__(); time.sleep(60)"
        )
        assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == OVERRAN

    def test_a_launcher_that_compiles_long_beside_an_idle_device_goes_on(self) -> None:
        program = (
            "import time; from tests.harness.device import sync; "
            "from tests.harness.accelerators.cuda import Cuda; Cuda.wait_for_launched = lambda _: None; "
            "context = sync.watched('cuda', seconds=0.2, look=0.05); context.__enter__(); time.sleep(1)"
        )
        assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0

    def test_output_and_input_of_a_kernel_do_not_mix_with_answers(self, subject_of: SubjectOf) -> None:
        subject_of("talking").check(law_named("forward"), CASE)

    def test_an_error_of_the_harness_is_not_blamed_on_the_kernel(self, child: Child) -> None:
        with pytest.raises(HarnessError, match=r"law: got 'nonsense', expected one of "):
            child.run(Run(f"{TOYS}:sound", (), "nonsense", CASE), lambda: None)

    def test_a_folder_called_tests_does_not_hide_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "__init__.py").write_text("raise RuntimeError\n")
        (tmp_path / "kernel_of_a_user.py").write_text("def f(q, k, v, *, causal, sm_scale):\n    return q\n")
        monkeypatch.chdir(tmp_path)
        child = Child("cpu")
        assert KernelInfo.ask(child, "kernel_of_a_user:f", ()).name == "kernel_of_a_user.f"
        child.close()


def in_little_time(subject: Subject) -> Subject:
    """Return the subject in a run that ends in 2 s, and may be busy with a failure for 1 s more."""
    subject.runs.clock = Clock(seconds=2.0, grace=1.0)
    subject.runs.clock.start()
    return subject
