"""Run a stand-alone script as its reader will: in a new process, in an empty folder."""

import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = "repro.py"


def exit_status(script: str, seconds: float) -> int:
    """Return the exit status of a script. Raises subprocess.TimeoutExpired if it takes longer than ``seconds``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SCRIPT).write_text(script)
        return subprocess.run(
            [sys.executable, SCRIPT],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        ).returncode
