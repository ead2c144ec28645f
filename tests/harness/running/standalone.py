"""Run a stand-alone script as its reader will: in a new process, in an empty folder."""

import tempfile
from contextlib import suppress
from pathlib import Path

from tests.harness.device.gpus import pinned
from tests.harness.running.fork_server import new_copy, origin_of

SCRIPT = "repro.py"
IMPORTED = "torch"
"""What every script imports, which takes over a second: its process is a copy of one that has imported it."""


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
