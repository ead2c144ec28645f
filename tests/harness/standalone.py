"""Run a stand-alone script as its reader will: in a new process, in an empty folder."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.harness.gpus import pinned

SCRIPT = "repro.py"


def exit_status(script: str, seconds: float, device: str = "cpu") -> int:
    """Return the exit status of a script. If ``device`` is a GPU, the script sees no other.

    Raises subprocess.TimeoutExpired if it takes longer than ``seconds``.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SCRIPT).write_text(script)
        return subprocess.run(
            [sys.executable, SCRIPT],
            cwd=folder,
            env=pinned(device),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        ).returncode
