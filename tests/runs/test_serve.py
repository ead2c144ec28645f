"""``flashproof serve`` answers over stdin and over a socket."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.api.running import environment
from tests.harness.interpreter.installation import INTERPRET
from tests.unit.support.running import TOYS

SERVE = [sys.executable, "-P", "-m", "tests.harness.commands.command", "serve"]
REQUEST = {"id": 1, "minutes": 0.1, "device": "cpu", "options": ["-k", "forward and float32"]}


def test_a_kernel_for_each_line_of_stdin(tmp_path: Path) -> None:
    lines = [{**REQUEST, "kernel": f"{TOYS}:{name}"} for name in ("wrong", "sound", "absent")]
    run = subprocess.run(
        SERVE,
        input="\n".join(map(json.dumps, lines)),
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    wrong, sound, absent = map(json.loads, run.stdout.splitlines())
    assert (wrong["status"], wrong["bugs"][0]["law"]) == ("broken", "forward")
    assert (sound["status"], sound["id"]) == ("held", 1)
    assert absent["error"].startswith(f"kernel '{TOYS}:absent': no 'absent' in ")
    assert run.stderr == ""


MARKED = """
import sys
from tests.harness.commands import warm
from tests.harness.running import fork_server

started, start = [], fork_server.Origin.__init__

def noted(self, module, environment):
    started.append(module)
    start(self, module, environment)

fork_server.Origin.__init__ = noted
warm.prepare()
before = [*started]
warm.run_pytest("properties", sys.argv[1:])
print(before, started[len(before):], file=sys.stderr)
"""


def test_a_run_uses_the_processes_that_are_warm(tmp_path: Path) -> None:
    words = ["--kernel", f"{TOYS}:wrong", "-k", "forward and float32", "--device", "cpu", "--budget", "6s"]
    # The suite's own process has set variables that a server's has not.
    bare = {name: x for name, x in environment().items() if name not in ("OPENBLAS_NUM_THREADS", INTERPRET)}
    run = subprocess.run(
        [sys.executable, "-P", "-c", MARKED, *words, "--report-dir", str(tmp_path)],
        env=bare,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [*tmp_path.glob("*/forward-*/repro.py")]  # a script has been tried, by the second process
    assert run.stderr.splitlines()[-1] == "['tests.harness.worker.main', 'torch'] []"


@pytest.mark.nightly
def test_a_socket(tmp_path: Path) -> None:
    command = [*SERVE, "--socket", "s"]
    server = subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "s").exists():
        assert server.poll() is None
        time.sleep(0.05)  # no event tells that it listens
    second = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert second.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        second.stderr
        == "ERROR: flashproof: serve: --socket: got 's', expected one that no other server uses\n"
    )
    assert told_by(tmp_path / "s", {**REQUEST, "kernel": f"{TOYS}:sound"})["status"] == "held"
    server.send_signal(2)
    assert server.wait() == 0
    assert not (tmp_path / "s").exists()


def told_by(path: Path, request: dict[str, Any]) -> Any:
    """Return the answer of the server at a socket."""
    with socket.socket(socket.AF_UNIX) as client, client.makefile("rw") as lines:
        client.connect(str(path))
        lines.write(json.dumps(request) + "\n")
        lines.flush()
        return json.loads(lines.readline())
