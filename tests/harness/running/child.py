"""The parent's end of a replaceable child process in which kernels run.

A wild pointer, a sticky device error or an endless loop ends only the child. The parent notes what was running, and
starts another child.
"""

import atexit
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from strategies.by_device import ByDevice
from tests.harness.accelerators.lookup import accelerator_of
from tests.harness.clock import BudgetSpent
from tests.harness.device.gpus import pinned
from tests.harness.device.memory import fills_the_machine
from tests.harness.device.sync import ASKS_WHERE, IMPATIENT_SECONDS, OVERRAN, WAIT_SECONDS
from tests.harness.files import python_path
from tests.harness.run import Run
from tests.harness.running.exits import Tail, finding, how_it_ended, was_judging
from tests.harness.running.fork_server import OF_PYTEST, Copy, new_copy
from tests.harness.verdict import Verdict

WORKER = "tests.harness.worker.main"
"""The program of a child that runs kernels."""

START_SECONDS = 300.0
"""Time limit of everything but a case: imports of torch and Triton take long, if many processes make them at once."""

RUN_SECONDS = ByDevice(cpu=100.0, accelerator=1800.0)
"""Time limit of one case, by device type.

Interpreted, a case takes seconds; the limit is less than half of the time of a default run, after which a case is cut
off, and a hang not told. On a GPU this is time to compile, which for FlexAttention in float32 takes over five minutes a
case when many processes compile at once. A kernel that hangs on the device is ended sooner by the child.
"""

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**28),
    "MALLOC_TOP_PAD_": str(2**24),
}
"""Variables in the environment of every child: one thread, since there are several children, and memory that is freed
stays in the process. Otherwise the C library gives the pages of each larger tensor back, and has to clear new ones for
the next, which takes a quarter of the time of a comparison.
"""

MOST_ALIVE = ByDevice(cpu=16, accelerator=6)
"""The most processes of a run that are alive in each of its workers, by device type.

On the CPU a process has 30 MB of its own, as it is a copy, and another copy is there within a tenth of a second. On a
GPU each holds half a GiB for its context and up to ``worker.CACHED_BYTES``, which so many may on the GPUs of today, but
another one takes seconds, in which it makes a context and loads what was compiled.
"""

CALLS_NOTHING = ("environment", "left_out", "describe", "compiled")
"""What is asked of a process without a call of a kernel, after which it is as new."""

FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit statuses of a process that others have ended, such as a system that is out of memory: no kernel ends so."""
LOOK_SECONDS = 0.5
"""Seconds between two looks at how much memory a child holds that does not answer."""
PRINT_SECONDS = 0.2
"""Seconds that a process that hangs is given to print where it is."""
KILLED = "out of memory: the process was ended from outside, or as it filled the machine, and so once more"
"""The reason for which a case counts as one that can't be run here."""


class ChildDied(Exception):
    """The child ended by itself, or was ended: because it overran its time (``hung``), or by others (``killed``).

    What others do to it tells nothing of a kernel.
    """

    def __init__(self, message: str, *, hung: bool = False, killed: bool = False, stderr: str) -> None:
        super().__init__(message)
        self.hung = hung
        self.killed = killed
        self.stderr = stderr


class NotStarted(ChildDied):
    """A new child ended before it called a kernel: it finds no memory, say, on a device that other processes fill."""

    def __init__(self, death: ChildDied) -> None:
        said = death.stderr.strip().splitlines()
        error = next((line.strip() for line in reversed(said) if "Error" in line), "")
        super().__init__(f"no process can be started: {error or death}", killed=True, stderr=death.stderr)


class Unjudged(ChildDied):
    """A process was ended as it judged what a kernel had returned, or made its tensors, for longer than it may take."""


class OutOfTime(BudgetSpent):
    """A case was ended because there was no more time for it, although it was within the limit of a case."""


class HarnessError(Exception):
    """Flashproof itself failed in the child; the text is the traceback from there."""


class DeviceLost(HarnessError):
    """Flashproof failed because the device does not answer, as after the fault of an earlier call."""


class Child:
    """A child process for one device ("cpu", "cuda:1"), started at the first request and again after it died.

    A GPU of CUDA is "cuda:0" to it.

    Each request for one of the kernels in ``stateful`` is answered by a process that has called no kernel: a copy of
    the child on a CPU, and else a new one, of which the next is started ahead as a ``spare``.
    For those that have ``hung`` before, the device is given ``IMPATIENT_SECONDS``.

    ``run_seconds`` limits a case, by default to ``RUN_SECONDS`` of the device type, and ``start_seconds`` everything
    else. ``worker`` is the module that the child runs; its argument is the device as the child sees it. Before a
    process is started ``make_room`` is called.
    """

    def __init__(
        self,
        device: str,
        *,
        run_seconds: float | None = None,
        start_seconds: float = START_SECONDS,
        worker: str = WORKER,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self.worker = worker
        self.run_seconds = RUN_SECONDS[device.partition(":")[0]] if run_seconds is None else run_seconds
        self.start_seconds = start_seconds
        self.make_room = make_room
        self.process: subprocess.Popen[bytes] | Copy | None = None
        self.spare: subprocess.Popen[bytes] | Copy | None = None
        self.buffer = b""
        self.held = self.held_first = 0
        self.used = -math.inf
        self.stateful = set[str]()
        self.hung = set[str]()
        self.patience = WAIT_SECONDS
        self.is_new = True
        atexit.register(self.close)

    def run(
        self, run: Run, meanwhile: Callable[[], None], seconds: float = math.inf, *, general: bool = False
    ) -> Verdict:
        """Try a law on a case, doing ``meanwhile`` beside it. A child that dies or hangs is a verdict, not an error.

        If it is ``general``, Triton kernels are compiled for any sizes and strides meanwhile: see ``specialisation``.

        Raises OutOfTime after ``seconds``, if these are fewer than the limit of a case. Raises HarnessError if
        Flashproof itself fails, and fails again in a new process: in the old one, earlier calls may have spoiled the
        memory. A child that is killed from outside, or ends before it calls the kernel, tells nothing of it, so the
        case is tried again.
        """
        until = time.perf_counter() + seconds
        patience = IMPATIENT_SECONDS if run.spec in self.hung else WAIT_SECONDS
        request = run.request("run", general=general, patience=patience)
        try:
            return self._verdict(request, meanwhile, until)
        except HarnessError:
            self.close()
        except Unjudged as death:
            return Verdict(status="skipped", reason=str(death))
        except ChildDied as death:
            if not death.killed:
                return _ended(death)
        try:
            return self._verdict(request, meanwhile, until)
        except (NotStarted, Unjudged) as death:
            return Verdict(status="skipped", reason=str(death))
        except ChildDied as death:
            return Verdict(status="skipped", reason=KILLED) if death.killed else _ended(death)

    def _verdict(self, request: dict[str, Any], meanwhile: Callable[[], None], until: float) -> Verdict:
        """Return the verdict of the child. Raises ChildDied, HarnessError, and OutOfTime at the time ``until``."""
        seconds = until - time.perf_counter()
        try:
            return Verdict.from_dict(self._answer_to(request, meanwhile, seconds))
        except ChildDied as death:
            is_late = death.hung or isinstance(death, Unjudged)
            if is_late and seconds < self.run_seconds and time.perf_counter() >= until:
                raise OutOfTime from None
            self.hung |= {request["kernel"]} if death.hung else set()
            raise

    def _answer_to(
        self, request: dict[str, Any], meanwhile: Callable[[], None], seconds: float
    ) -> dict[str, Any]:
        self._send(request)
        meanwhile()
        return self._receive(min(seconds, self.run_seconds))

    def ask(
        self, request: dict[str, Any], seconds: float | None = None, *, again: bool = True
    ) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises ChildDied, and HarnessError.

        If others kill the child, the request is sent once more, unless it depends on earlier ones (``again`` is False).
        """
        seconds = self.start_seconds if seconds is None else seconds
        try:
            self._send(request)
            return self._receive(seconds)
        except ChildDied as death:
            if not (death.killed and again):
                raise
        self._send(request)
        return self._receive(seconds)

    def environment(self) -> dict[str, str]:
        """Return the device, the name of its hardware, and the versions of the packages."""
        return {"device": self.device, **self.ask({"do": "environment"})}

    @property
    def grown(self) -> int:
        """The bytes by which the child's memory has grown since its start."""
        return self.held - self.held_first

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Give a case at most so many seconds, as where a kernel is known to hang."""
        usual, self.run_seconds = self.run_seconds, min(self.run_seconds, seconds)
        try:
            yield
        finally:
            self.run_seconds = usual

    def close(self) -> None:
        """End the child; a later request starts a new one."""
        if self.process is not None:
            self._stop()

    def _start(self) -> None:
        self.make_room()
        self.process, self.spare = self.spare or self._new_process(), None
        assert self.process.stderr is not None
        self.printed = Tail(self.process.stderr)
        self.buffer = b""
        self.held = self.held_first = 0
        self.is_new = True
        try:
            self.ask({"do": "environment"}, again=False)
        except ChildDied as death:
            raise NotStarted(death) from death

    def _new_process(self) -> "subprocess.Popen[bytes] | Copy":
        environment = environment_of(self.device)
        arguments = ["-m", self.worker, seen_by_child(self.device)]
        with suppress(OSError):  # where no copy can be made, what a process of its own prints tells why
            return new_copy(self.worker, arguments, environment, Path.cwd(), self.start_seconds)
        return subprocess.Popen(
            [sys.executable, "-P", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def _send(self, request: dict[str, Any]) -> None:
        is_apart = request.get("kernel") in self.stateful
        if is_apart and not self.is_new:
            self.close()
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        copied = is_apart and self.device == "cpu"  # a process that uses a GPU can't be copied
        self.is_new = self.is_new and (copied or request["do"] in CALLS_NOTHING)
        self.used = time.monotonic()
        self.patience = request.get("patience", WAIT_SECONDS)
        with suppress(BrokenPipeError):  # reading the answer tells how it ended
            self.process.stdin.write(json.dumps(request | {"copied": copied}).encode() + b"\n")
            self.process.stdin.flush()
        if is_apart and not copied and self.spare is None:
            with suppress(OSError):  # without one, the next process is started when it is needed
                self.spare = self._new_process()

    def _receive(self, seconds: float) -> dict[str, Any]:
        process = self.process
        assert process is not None
        try:
            answer = json.loads(self._read_line(seconds))
        except TimeoutError:
            process.send_signal(ASKS_WHERE)
            time.sleep(PRINT_SECONDS)
            stderr = self._stop()
            if was_judging(stderr):
                raise Unjudged(f"it was not judged within {seconds:.3g} s", stderr=stderr) from None
            raise ChildDied(f"it was still running after {seconds:.3g} s", hung=True, stderr=stderr) from None
        except EOFError:
            code = process.wait()
            stderr = self._stop()
            if code == OVERRAN:
                claim = f"the device was still running {self.patience:.3g} s after the launch"
                raise ChildDied(claim, hung=True, stderr=stderr) from None
            raise ChildDied(how_it_ended(code), killed=code in FROM_OUTSIDE, stderr=stderr) from None
        is_lost, self.held = answer.pop("fatal"), answer.pop("held", 0)
        self.held_first = self.held_first or self.held
        if is_lost:
            self.close()
        if "raised" in answer:
            raise (DeviceLost if is_lost else HarnessError)(answer["raised"])
        return answer

    def _read_line(self, seconds: float) -> bytes:
        """Return the next line of the child. Raises TimeoutError, and EOFError if the child has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        until = time.perf_counter() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                if not selector.select(min(LOOK_SECONDS, until - time.perf_counter())):
                    if time.perf_counter() >= until:
                        raise TimeoutError
                    if fills_the_machine(self.process.pid):
                        self.process.kill()
                    continue
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
        return self.printed.text()


class Children:
    """The children of a run, one for each kernel, so that nothing that a kernel leaves behind meets another one.

    At most ``most`` of their processes are alive: the one that was used longest ago ends, and its kernel gets another.
    """

    def __init__(self, device: str, most: int | None = None) -> None:
        self.device = device
        self.most = MOST_ALIVE[device.partition(":")[0]] if most is None else most
        self.children: dict[str, Child] = {}

    def of(self, spec: str) -> Child:
        """Return the child of the kernel that a SPEC names."""
        if spec not in self.children:
            self.children[spec] = Child(self.device, make_room=self._make_room)
        return self.children[spec]

    def close(self) -> None:
        """End all processes; later requests start new ones."""
        for child in self.children.values():
            child.close()

    def _make_room(self) -> None:
        """End processes until there is room for one more."""
        alive = [child for child in self.children.values() if child.process is not None]
        alive.sort(key=lambda child: child.used)
        for child in alive[: max(0, len(alive) - self.most + 1)]:
            child.close()


def environment_of(device: str) -> dict[str, str]:
    """Return the environment of a new process that runs kernels on a device, and sees its GPU first: see ``gpus``."""
    environment = pinned(device) | SETTINGS
    for name in ("TRITON_INTERPRET", *OF_PYTEST):
        environment.pop(name, None)
    interpreted = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    return environment | interpreted | {"PYTHONPATH": python_path()}


def seen_by_child(device: str) -> str:
    """Return what a device is called in a process whose environment is ``environment_of`` it."""
    return device.partition(":")[0] + ":0" if accelerator_of(device).visible else device


def _ended(death: ChildDied) -> Verdict:
    """Return the verdict on a case that has ended its process."""
    return Verdict(
        status="broken", finding=finding(str(death), "hung" if death.hung else "died", death.stderr)
    )
