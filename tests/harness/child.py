"""The parent's end of a replaceable child process in which kernels run.

A wild pointer, a sticky device error or an endless loop ends only the child. The parent notes what was running, and
starts another child.
"""

import atexit
import json
import math
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.harness.budget import BudgetSpent
from tests.harness.device import OVERRAN, WAIT_SECONDS
from tests.harness.home import python_path
from tests.harness.run import Run
from tests.harness.verdict import Finding, Verdict

START_SECONDS = 300.0
"""Time limit of everything but a case: imports of torch and Triton take long, if many processes make them at once."""

RUN_SECONDS = {"cpu": 120.0, "cuda": 1800.0, "none": 300.0}
"""Time limit of one case, by device type; "none" is that of a child that compiles and runs nothing.

Interpreted, a case takes seconds. On a GPU this is time to compile, which for FlexAttention in float32 takes over five
minutes a case when many processes compile at once. A kernel that hangs on the device is ended sooner by the child.
"""

STDERR_TAIL = 4000
"""Characters that are kept of a dead child's stderr, from its end."""


class ChildDied(Exception):
    """The child ended by itself, or was ended because it overran its time, which ``hung`` says."""

    def __init__(self, message: str, *, hung: bool, stderr: str) -> None:
        super().__init__(message)
        self.hung = hung
        self.stderr = stderr


class OutOfTime(BudgetSpent):
    """A case was ended because there was no more time for it, although it was within the limit of a case."""


class HarnessError(Exception):
    """Flashproof itself failed in the child; the text is the traceback from there."""


class DeviceLost(HarnessError):
    """Flashproof failed because the device does not answer, as after the fault of a kernel that ran there before."""


class Child:
    """A child process for one device ("cpu", "cuda:0"), started at the first request and again after it died.

    ``run_seconds`` limits a case, by default to ``RUN_SECONDS`` of the device type, and ``start_seconds`` everything
    else. ``worker`` is the module that the child runs; its argument is the device.
    """

    def __init__(
        self,
        device: str,
        *,
        run_seconds: float | None = None,
        start_seconds: float = START_SECONDS,
        worker: str = "tests.harness.worker",
    ) -> None:
        self.device = device
        self.worker = worker
        self.run_seconds = RUN_SECONDS[device.partition(":")[0]] if run_seconds is None else run_seconds
        self.start_seconds = start_seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.buffer = b""
        atexit.register(self.close)

    def run(self, run: Run, meanwhile: Callable[[], None], seconds: float = math.inf) -> Verdict:
        """Try a law on a case, doing ``meanwhile`` beside it. A child that dies or hangs is a verdict, not an error.

        Raises OutOfTime after ``seconds``, if these are fewer than the limit of a case. Raises HarnessError if
        Flashproof itself fails, and fails again in a new process: in the old one, any kernel that ran there may have
        spoiled the memory.
        """
        until = time.perf_counter() + seconds
        try:
            try:
                answer = self._answer_to(run, meanwhile, seconds)
            except HarnessError:
                self.close()
                answer = self._answer_to(run, meanwhile, until - time.perf_counter())
        except ChildDied as death:
            if death.hung and seconds < self.run_seconds and time.perf_counter() >= until:
                raise OutOfTime from None
            kind = "hung" if death.hung else "died"
            claim = f"a claimed case runs to its end, but {death}"
            return Verdict(status="broken", finding=Finding(claim=claim, kind=kind, detail=death.stderr))
        return Verdict.from_dict(answer)

    def _answer_to(self, run: Run, meanwhile: Callable[[], None], seconds: float) -> dict[str, Any]:
        self._send(run.request("run"))
        meanwhile()
        return self._receive(min(seconds, self.run_seconds))

    def ask(self, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises ChildDied, and HarnessError."""
        self._send(request)
        return self._receive(self.start_seconds if seconds is None else seconds)

    def close(self) -> None:
        """End the child; a later request starts a new one."""
        if self.process is not None:
            self._stop()

    def _start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        if self.device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the child
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", self.worker, self.device],
            env=environment | {"PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
        )
        self.buffer = b""
        self.ask({"do": "environment"})

    def _send(self, request: dict[str, Any]) -> None:
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # reading the answer tells how it ended
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def _receive(self, seconds: float) -> dict[str, Any]:
        process = self.process
        assert process is not None
        try:
            answer = json.loads(self._read_line(seconds))
        except TimeoutError:
            stderr = self._stop()
            raise ChildDied(f"it was still running after {seconds:.3g} s", hung=True, stderr=stderr) from None
        except EOFError:
            code = process.wait()
            stderr = self._stop()
            if code == OVERRAN:
                claim = f"the device was still running {WAIT_SECONDS:.3g} s after the launch"
                raise ChildDied(claim, hung=True, stderr=stderr) from None
            how = f"signal {-code}" if code < 0 else f"status {code}"
            raise ChildDied(f"the process ended with {how}", hung=False, stderr=stderr) from None
        is_lost = answer.pop("fatal")
        if is_lost:
            self.close()
        if "raised" in answer:
            raise (DeviceLost if is_lost else HarnessError)(answer["raised"])
        return answer

    def _read_line(self, seconds: float) -> bytes:
        """Return the next line of the child. Raises TimeoutError, and EOFError if the child has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                if not selector.select(seconds):
                    raise TimeoutError
                piece = os.read(self.process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise EOFError
                self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def _stop(self) -> str:
        """Kill the child and return the end of its stderr."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # the unsent half of a request to a child that is gone
                    pipe.close()
        self.process = None
        self.stderr.seek(0)
        text = self.stderr.read().decode(errors="replace")
        self.stderr.close()
        return text[-STDERR_TAIL:]
