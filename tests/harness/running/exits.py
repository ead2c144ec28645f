"""How a process ended, where the kernel was then, what it printed last, and the exit status of a script."""

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO

from tests.harness.device.gpus import pinned
from tests.harness.running.fork_server import new_copy, origin_of
from tests.harness.verdict import BEFORE_THE_BEGINNING, PAST_THE_END, Finding

SCRIPT = "repro.py"
IMPORTED = "torch"
"""What every script imports, which takes over a second: a script runs in a copy of a process that has imported it."""

STACK = " (most recent call first):"
"""faulthandler's heading line ends so; stack frames follow."""
OURS = ("/harness/trial/trial.py", "/kernels/registry.py")
"""The ends of the paths of our files that call a kernel: frames from there on are not of the kernel."""
IN_KERNEL = " in run_kernel"
"""The end of the frame from which a kernel is called."""
OF_JUDGE = (
    '/harness/law.py"',
    '/strategies/tensors.py"',
    '/trial/compare.py"',
    '/trial/judge.py"',
    "/reference/bounds/",
)
"""Parts of the paths of files by which tensors are made and laws checked: a kernel may be called from the first two.

The others are named because a busy machine may not print a stack to its end.
"""
AT_FENCE = " in run_fenced"
"""The end of the frame in which a kernel runs on tensors that end where accessible memory ends."""

KEPT_BYTES = 1 << 14
"""How many bytes of the output's end are kept."""
PIECE_BYTES = 1 << 20
"""The most bytes that are read at once."""
CLOSE_SECONDS = 2.0
"""Seconds to wait for the end of the output, which does not come while a process that the kernel started is alive."""


def how_it_ended(code: int) -> str:
    """Return words for the exit status of a process; negative ones are signals."""
    if code >= 0:
        return f"the process ended with status {code}"
    return f"the process ended with signal {-code} ({signal.strsignal(-code)})"


def finding(what: str, kind: str, printed: str) -> Finding:
    """Return the finding that a case has ended its process.

    Args:
        what: how it ended, in words.
        kind: "died" or "hung".
        printed: the end of what the process printed to stderr.
    """
    claim = f"a claimed case runs to its end, but {what}"
    if AT_FENCE in printed:
        claim = f"{PAST_THE_END}, but there {what}"
    return Finding(claim=claim, kind=kind, detail=place(printed))


def is_outside(found: Finding) -> bool:
    """Whether a finding is an access to memory outside of a tensor, which ended the process or was reported."""
    return found.claim.startswith((PAST_THE_END, BEFORE_THE_BEGINNING))


def was_judging(printed: str) -> bool:
    """Whether a process made tensors or checked what a kernel had returned, by the stack that it printed, if any."""
    _, _, after = printed.rpartition(STACK)
    return IN_KERNEL not in after and any(path in after for path in OF_JUDGE)


def place(printed: str) -> str:
    """Return what a process printed, with the kernel's frames alone, the last of which is where the kernel was."""
    before, stack, after = printed.rpartition(STACK)
    if not stack:
        return printed
    told = before.splitlines()[:-1]  # without the name of the thread
    frames = [line for line in after.splitlines() if line.strip().startswith("File ")]
    ends = (at for at, frame in enumerate(frames) if any(f'{ours}"' in frame for ours in OURS))
    return "\n".join([*filter(None, told), *reversed(frames[: next(ends, len(frames))])])


class Tail:
    """The last ``KEPT_BYTES`` that come through a pipe. A thread reads them, so that the writer hardly has to wait."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        self.kept = b""
        self.thread = Thread(target=self._read, daemon=True)
        self.thread.start()

    def text(self) -> str:
        """Return what is kept, once the writer has ended."""
        self.thread.join(CLOSE_SECONDS)
        return self.kept.decode(errors="replace")

    def _read(self) -> None:
        with self.pipe:
            while piece := os.read(self.pipe.fileno(), PIECE_BYTES):
                self.kept = (self.kept + piece)[-KEPT_BYTES:]


def prepare(device: str = "cpu") -> None:
    """Begin to import what scripts import, so that the first script does not have to wait for it."""
    with suppress(OSError):  # if no process can be started, the first script is not run either
        origin_of(IMPORTED, pinned(device))


def exit_status(script: str, seconds: float, device: str = "cpu") -> int:
    """Return the exit status of a script. If ``device`` is a GPU, the script sees no other.

    Raises subprocess.TimeoutExpired if it takes longer than ``seconds``, and OSError if no process can be started.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SCRIPT).write_text(script)
        process = new_copy(IMPORTED, [SCRIPT], pinned(device), folder, seconds, silent=True)
        return process.wait(seconds)
