"""How a process has ended, where the kernel was then, what it printed last, and the exit status of a script."""

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
"""What every script imports, which takes over a second: its process is a copy of one that has imported it."""

STACK = " (most recent call first):"
"""The end of the line above the frames that faulthandler prints."""
OURS = ("/harness/trial/trial.py", "/kernels/registry.py")
"""The ends of the paths of files of ours that call a kernel: frames from there on are not the kernel's."""
AT_FENCE = " in run_fenced"
"""The end of the frame in which memory ends where a tensor ends."""

KEPT_BYTES = 1 << 14
"""Bytes that are kept, from the end."""
PIECE_BYTES = 1 << 20
"""The most bytes that are read at once."""
CLOSE_SECONDS = 2.0
"""Seconds to wait for the end of the output. It has none where a process that the kernel has started lives on."""


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
    """Whether memory outside of a tensor is touched: a process has ended there, or the access is told."""
    return found.claim.startswith((PAST_THE_END, BEFORE_THE_BEGINNING))


def place(printed: str) -> str:
    """Return what a process printed, with the frames of the kernel alone, the last one being where it was."""
    before, stack, after = printed.rpartition(STACK)
    if not stack:
        return printed
    told = before.splitlines()[:-1]  # without the name of the thread
    frames = [line for line in after.splitlines() if line.strip().startswith("File ")]
    ends = (at for at, frame in enumerate(frames) if any(f'{ours}"' in frame for ours in OURS))
    return "\n".join([*filter(None, told), *reversed(frames[: next(ends, len(frames))])])


class Tail:
    """The last ``KEPT_BYTES`` that come through a pipe, whose writer never waits longer than a thread takes to read."""

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
    """Begin to import what scripts import, so that the first one does not have to wait for that."""
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
