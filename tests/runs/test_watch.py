"""Cases that held are run once more under a sanitizer, and what that reports is a failure with a smallest case."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.case import Case
from tests.harness.bugs.bug import Bug
from tests.harness.diagnosis.reruns import DONE, LOG, TOGETHER, Watch, watched
from tests.harness.report.database import Kept
from tests.harness.run import Run, read
from tests.harness.running.sanitizers import failure
from tests.harness.session.subject import Subject
from tests.unit.harness.running.test_sanitizers import CLEAN, OLDER, UNSUPPORTED
from tests.unit.support.running import CASE, TOYS, SubjectOf, pytest_run, report_of, summary_in

Reports = Callable[[Sequence[Case]], bool]
WatchedOf = Callable[[Reports], Subject]
CAUSAL = replace(CASE, causal=True, batch=2)
PROGRAM = """\
#!{python}
import json, pathlib, subprocess, sys
log, asked = sys.argv[sys.argv.index("--log-file") + 1], sys.stdin.read()
ended = subprocess.run(sys.argv[sys.argv.index("-P") - 1:], input=asked, text=True)
wrong = any(run["case"]["causal"] for run in json.loads(asked)["runs"])
pathlib.Path(log).write_text({wrong!r} if wrong else {clean!r})
sys.exit(ended.returncode)
"""


@pytest.fixture
def watched_of(subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch) -> WatchedOf:
    """Return a function that makes a subject with a tool that reports an error of the cases that it is told."""

    def make(is_reported: Reports) -> Subject:
        def watched(name: str, runs: Sequence[Run], device: str, seconds: float, folder: Path) -> str:
            (folder / LOG).write_text(OLDER if is_reported([run.case for run in runs]) else CLEAN)
            (folder / DONE).write_text("." * len(runs))
            return ""

        monkeypatch.setattr("tests.harness.diagnosis.reruns.watched", watched)
        subject = subject_of("sound")
        subject.triage.watches = [Watch("memcheck", subject.runs)]
        return subject

    return make


def any_causal(cases: Sequence[Case]) -> bool:
    return any(case.causal for case in cases)


def test_what_is_reported_is_a_bug_with_a_smallest_case(watched_of: WatchedOf) -> None:
    subject = watched_of(any_causal)
    subject.runs.held.extend([("forward", CASE), ("forward", CAUSAL), ("backward", CASE)])
    subject.triage.watch("backward", shrink=True)
    assert not subject.known.bugs
    subject.triage.watch("forward", shrink=True)
    (bug,) = subject.known.bugs.values()
    assert (bug.failure.case.causal, bug.failure.case.batch) == (True, 1)
    assert [need.name for need in bug.needs] == ["causal"]
    assert subject.runs.tally.watched == {"memcheck": 3}
    assert "law `forward` is broken, memcheck reports an error" in subject.known.messages()[0]
    told = (report_of(subject) / "report.md").read_text()
    assert "fused_moe_kernel (fused_moe.py:175)" in told
    assert "by thread (96,0,0) in block (44,0,0)" in told
    assert not (report_of(subject) / "repro.py").exists()
    kept = read(report_of(subject) / "case.json")
    assert (kept.sanitizer, kept.law, kept.case) == ("memcheck", "forward", bug.failure.case)
    assert not Kept.of(bug).is_gone_if_it_holds


def test_the_same_error_under_another_law_is_the_same_bug(watched_of: WatchedOf) -> None:
    subject = watched_of(any_causal)
    for law in ("forward", "backward"):
        subject.runs.held.append((law, CAUSAL))
        subject.triage.watch(law, shrink=False)
    (key,) = subject.known.bugs
    assert subject.known.bugs[key].failure.case == CAUSAL
    assert subject.known.seen[key].total == 2
    assert not subject.known.closed("forward")


def test_two_errors_are_two_bugs(watched_of: WatchedOf, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = watched_of(any_causal)
    subject.runs.held.append(("forward", CAUSAL))
    for log in (OLDER, OLDER.replace("fused_moe_kernel", "another_kernel")):
        monkeypatch.setattr("tests.runs.test_watch.OLDER", log)
        subject.triage.watch("forward", shrink=False)
    assert len(subject.known.bugs) == 2
    one, other = subject.known.bugs.values()
    assert not one.is_like(other)
    again = Bug.from_dict(json.loads(json.dumps(one.to_dict())))
    assert (again.key, again.failure.sanitizer) == (one.key, "memcheck")
    assert again.is_like(one)


def test_what_is_reported_of_no_case_alone_is_told_so(watched_of: WatchedOf) -> None:
    subject = watched_of(lambda cases: len(cases) > 1)
    subject.runs.held.extend([("forward", CASE), ("forward", CAUSAL)])
    subject.triage.watch("forward", shrink=True)
    (bug,) = subject.known.bugs.values()
    assert bug.failure.case == CAUSAL
    assert bug.failure.explanation.sentences == (TOGETHER,)


def test_a_tool_that_fails_is_told_once_and_not_used_again(
    watched_of: WatchedOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = watched_of(any_causal)
    monkeypatch.setattr("tests.runs.test_watch.CLEAN", UNSUPPORTED)
    for _ in range(2):
        subject.runs.held.append(("forward", CASE))
        subject.triage.watch("forward", shrink=True)
    (notice,) = subject.results()["notices"]
    assert "Device not supported" in notice
    assert subject.runs.tally.watched["memcheck"] == 1
    assert not subject.known.bugs


@pytest.mark.nightly
def test_a_program_is_run_under_the_tool(
    subject_of: SubjectOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, wrong=OLDER, clean=CLEAN))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    watch = Watch("memcheck", subject_of("sound").runs)
    assert watch.reported("forward", [CASE, replace(CASE, seqlen_k=0)]) == []
    assert (watch.done, watch.told) == (2, [])
    assert ["fused_moe_kernel" in report.what for report in watch.reported("forward", [CAUSAL])] == [True]


def test_a_process_that_hangs_is_ended_and_told(tmp_path: Path) -> None:
    assert watched("triton", [Run(f"{TOYS}:hanging", (), "forward", CASE)], "cpu", 1.0, tmp_path) == ""
    told = failure("triton", (tmp_path / LOG).read_text())
    assert told == "sanitizer triton did not come to its end: it was still running after 2 s"
    assert not (tmp_path / DONE).exists()


def test_on_a_cpu_it_is_told_and_no_failure(tmp_path: Path) -> None:
    arguments = ["--kernel", f"{TOYS}:sound", "-k", "forward and float32", "--examples", "3"]
    run = pytest_run(tmp_path, *arguments, "--sanitize", "memcheck,triton")
    assert "not run: sanitizer memcheck: needs a GPU" in run.stdout
    assert "sanitizer triton: needs a GPU with CUDA" in summary_in(tmp_path)["not_run"]
