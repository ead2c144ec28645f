"""``flashproof serve``: kernels are verified one after the other by processes that have imported everything already.

A request is a line of JSON with the arguments of ``flashproof.verify``, where ``kernel`` is a SPEC; ``id`` may be
anything, and is in the answer. An answer is a line of JSON: the verdict. Both are described in ``docs/verdict.md``.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.harness.api.running import arguments_of, environment
from tests.harness.commands.arguments import OneLine
from tests.harness.programs.verdict import no_verdict

WARM = "tests.harness.commands.warm"
"""The module of a process that waits for a kernel."""
KEYS = ("id", "kernel", "claims", "minutes", "device", "seed", "report_dir", "options")
"""What a request may have."""


def main(arguments: Sequence[str]) -> int:
    """Answer requests until there are no more, and return the exit status. Raises ValueError, in one line."""
    parser = OneLine(
        "flashproof serve", description="Verify kernels by processes that are warm: a line of JSON for each."
    )
    parser.add_argument("--socket", metavar="PATH", help="listen on a Unix socket instead of stdin")
    given = parser.parse_args(arguments)
    if given.socket is None:
        with Pool() as pool:
            answer(pool, sys.stdin, sys.stdout)
        return 0
    with listening(given.socket) as server, Pool() as pool:
        try:
            while True:
                connection, _ = server.accept()
                threading.Thread(target=converse, args=(pool, connection), daemon=True).start()
        except KeyboardInterrupt:
            return 0
        finally:
            Path(given.socket).unlink(missing_ok=True)


def listening(path: str) -> socket.socket:
    """Return a socket that listens at a path. Raises ValueError, in one line, if that is not possible.

    A socket that a server has left behind, on which nobody listens, is replaced.
    """
    server = socket.socket(socket.AF_UNIX)
    with suppress(OSError), socket.socket(socket.AF_UNIX) as other:
        other.connect(path)
        server.close()
        raise ValueError(f"--socket: got {path!r}, expected one that no other server uses")
    if Path(path).is_socket():
        Path(path).unlink()
    try:
        server.bind(path)
        server.listen()
    except OSError as e:
        server.close()
        raise ValueError(
            f"--socket: got {path!r}, expected a path for a new socket ({e.strerror or e})"
        ) from None
    return server


def converse(pool: "Pool", connection: socket.socket) -> None:
    """Answer the requests of one connection."""
    with connection, connection.makefile("r") as requests, connection.makefile("w") as answers:
        answer(pool, requests, answers)


def answer(pool: "Pool", requests: Iterable[str], answers: TextIO) -> None:
    """Answer each request by a line, in their order, until there are no more or the reader goes away."""
    for line in filter(str.strip, requests):
        told = verdict_on(pool, line)
        try:
            answers.write(json.dumps(told) + "\n")
            answers.flush()
        except (BrokenPipeError, ConnectionResetError):
            with suppress(OSError):  # what is left to be written would fail again at the end of the process
                os.dup2(os.open(os.devnull, os.O_WRONLY), answers.fileno())
            return


def verdict_on(pool: "Pool", line: str) -> dict[str, Any]:
    """Return the verdict that answers a request, with the request's ``id`` if it has one."""
    named: dict[str, Any] = {}
    try:
        request = read(line)
        named = {"id": request["id"]} if "id" in request else {}
        words, folder = words_of(request)
        return named | pool.verify(words, folder)
    except ValueError as e:
        return named | no_verdict(str(e), int(pytest.ExitCode.USAGE_ERROR), Path())


def read(line: str) -> dict[str, Any]:
    """Return a request. Raises ValueError, in one line, if it is none."""
    try:
        request = json.loads(line)
    except ValueError:
        raise ValueError(
            f"request: got {line.strip()!r:.80}, expected an object of JSON in one line"
        ) from None
    if not isinstance(request, dict) or not isinstance(request.get("kernel"), str):
        raise ValueError(f"request: got {line.strip()!r:.80}, expected an object with the text kernel")
    if unknown := [name for name in request if name not in KEYS]:
        raise ValueError(f"request: got {unknown[0]!r}, expected some of {', '.join(KEYS)}")
    return request


def words_of(request: Mapping[str, Any]) -> tuple[list[str], Path]:
    """Return the options of pytest for a request, and the folder of its reports. Raises ValueError, in one line."""
    given = {name: value for name, value in request.items() if name not in ("id", "kernel")}
    spec, words, folder = arguments_of(request["kernel"], **given)
    return ["--kernel", spec, *words], folder


class Pool:
    """A process that waits for a kernel, and is replaced by a new one as soon as it has got one."""

    def __enter__(self) -> "Pool":
        self.lock = threading.Lock()
        self.waiting = start()
        return self

    def __exit__(self, *_: object) -> None:
        self.waiting.communicate()  # without a kernel, it ends

    def verify(self, words: Sequence[str], folder: Path) -> dict[str, Any]:
        """Verify a kernel, and return the verdict. Raises ValueError, in one line, if there is none."""
        with self.lock:
            process = self.waiting
            asked = json.dumps({"folder": str(Path.cwd()), "words": list(words)})
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            with suppress(BrokenPipeError):  # it was killed: it has no answer either
                process.stdin.write(asked + "\n")
                process.stdin.flush()
            stdout = process.stdout.read()
            process.wait()
            self.waiting = start()
        try:
            found: dict[str, Any] = json.loads(stdout)
        except ValueError:
            raise ValueError(
                f"the run ended with status {process.returncode} and without a verdict"
            ) from None
        return found


def start() -> "subprocess.Popen[str]":
    """Start a process that waits for a kernel."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", WARM],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
