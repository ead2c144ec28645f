"""Processes that are copies of one that has imported torch: each is like a new one."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strategies.case import Case
from tests.harness.files import ROOT
from tests.harness.run import Run
from tests.harness.running import fork_server as origin
from tests.harness.running.child import START_SECONDS, WORKER, Child, environment_of
from tests.harness.running.exits import exit_status
from tests.harness.running.fork_server import LOST, OF_PYTEST, Copy, new_copy
from tests.harness.verdict import Verdict
from tests.unit.support.running import CASE, TOYS, has_ended


def copied(child: Child) -> Copy:
    """Return the process of a child, which must be a copy."""
    child.environment()
    assert isinstance(child.process, Copy)
    return child.process


def verdict(child: Child, name: str, case: Case = CASE) -> Verdict:
    return child.run(Run(f"{TOYS}:{name}", (), "forward", case), lambda: None)


def test_a_copy_knows_nothing_of_the_calls_of_another(child: Child) -> None:
    for _ in range(2):
        child.close()
        assert [verdict(child, "wrong_once").status for _ in range(2)] == ["broken", "held"]


def test_processes_are_copies_of_one_whatever_pytest_names_the_test(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = copied(child).origin
    child.close()
    monkeypatch.setenv(OF_PYTEST[0], "another")
    assert copied(child).origin is first


def test_a_process_has_the_environment_of_its_start(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    before = copied(child)
    monkeypatch.setenv("FLASHPROOF_MARK", "1")
    marked = new_copy(WORKER, ["-m", WORKER, "cpu"], environment_of("cpu"), Path.cwd(), START_SECONDS)
    environ = Path(f"/proc/{marked.pid}/environ").read_bytes()
    assert b"FLASHPROOF_MARK=1" in environ.split(b"\0")
    assert marked.origin is not before.origin
    marked.kill()
    assert marked.wait() == -signal.SIGKILL
    assert copied(child) is before  # which goes on although its origin is not the latest one


def test_the_end_of_a_copy_is_that_of_a_process(child: Child) -> None:
    process = copied(child)
    assert process.stdin is not None
    process.stdin.close()
    assert (process.wait(), process.wait()) == (0, 0)
    child.close()
    process = copied(child)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    child.close()


def test_copies_end_with_their_origin_and_there_is_another_one(child: Child) -> None:
    process = copied(child)
    os.kill(parent_of(process.pid), signal.SIGKILL)
    assert has_ended(process.pid)
    assert verdict(child, "sound").status == "held"
    assert process.wait() == LOST
    assert copied(child).origin is not process.origin


def test_where_no_copy_can_be_made_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(origin.Origin, "__init__", refuse)
    monkeypatch.setattr(origin, "_latest", {})
    child = Child("cpu")
    assert verdict(child, "sound").status == "held"
    assert not isinstance(child.process, Copy)
    child.close()


def test_an_origin_ends_with_its_user() -> None:
    program = (
        "import os; from tests.harness.running.child import Child; from tests.runs.test_fork_server import parent_of\n"
        "child = Child('cpu'); child.environment(); print(parent_of(child.process.pid), flush=True)\n"
        "os._exit(0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert has_ended(int(run.stdout))


def test_one_that_is_still_importing_is_asked_once_and_ends_with_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_long.py").write_text("import time; time.sleep(600)")
    started: list[origin.Origin] = []
    start = origin.Origin.__init__

    def noted(self: origin.Origin, *given: Any) -> None:
        start(self, *given)
        started.append(self)

    monkeypatch.setattr(origin.Origin, "__init__", noted)
    begun = time.perf_counter()
    with pytest.raises(TimeoutError):
        new_copy("imports_long", ["x.py"], os.environ | {"PYTHONPATH": str(tmp_path)}, tmp_path, 0.2)
    assert len(started) == 1
    started.clear()
    origin._latest.pop("imports_long")
    gc.collect()
    assert time.perf_counter() - begun < 60.0


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


def test_a_script_that_takes_too_long_is_ended() -> None:
    assert exit_status("", START_SECONDS) == 0  # the process that scripts are forked from is there now
    with pytest.raises(subprocess.TimeoutExpired):
        exit_status("import time; time.sleep(600)", 1.0)
    assert exit_status("", START_SECONDS) == 0


def parent_of(process: int) -> int:
    """Return the id of the process that has started another one."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
