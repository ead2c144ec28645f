"""Kill processes of a run without warning, as a machine does that fails: no failure may be lost, and none invented.

``python -m tests.faults.killing [--minutes M] [--every S] [--whole N] [--report-dir DIR]`` runs kernels with planted
bugs for M minutes and kills a random process of the run every S seconds, N times the whole run, which is then begun
anew in the same folder. It prints what is found, and exits 1 if anything is lost or invented.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests.harness.files import ROOT

KERNELS = {"corrupting": "memory", "racing": "intermittent", "aborting": "died"}
"""The planted kernels of a run, each with the only kind of finding that is true of it. A sound one is beside them."""
SOUND = "tests.panel.eager:float32"


def start(folder: Path, minutes: float, kernels: Sequence[str], *arguments: str) -> subprocess.Popen[str]:
    """Start a run of planted kernels and a sound one, in a session of its own, with its reports in ``folder``."""
    specs = [f"tests.faults.planted:{name}" for name in kernels]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", str(ROOT / "tests/properties"), "--device", "cpu"]
        + [word for spec in (*specs, SOUND) for word in ("--kernel", spec)]
        + ["-p", "no:cacheprovider", "--minutes", str(minutes), "--report-dir", str(folder), *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def below(process: int) -> Iterator[int]:
    """Yield the ids of all processes that a process has started, and of those that these have started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == process:
                yield int(path.parent.name)
                yield from below(int(path.parent.name))


def kill_one(process: int) -> None:
    """Kill one of the processes below another, chosen at random."""
    found = [*below(process)]
    if found:
        with suppress(ProcessLookupError):
            os.kill(random.choice(found), signal.SIGKILL)


def kill_all(run: subprocess.Popen[str]) -> None:
    """Kill a whole run at once."""
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.communicate()


def reported(folder: Path) -> set[tuple[str, str]]:
    """Return the kernel and the kind of the finding of each report that is whole.

    Two workers can report one bug at once, of which the run keeps one report: the bug counts, not the folder.
    """
    records = [json.loads(path.read_text()) for path in folder.glob("*/*/case.json")]
    return {(record["kernel"].rpartition(":")[2], record["finding"]["kind"]) for record in records}


def invented(folder: Path) -> list[tuple[str, str]]:
    """Return the findings that are not true of their kernels."""
    return [(name, kind) for name, kind in reported(folder) if KERNELS.get(name) != kind]


def main() -> int:
    """Kill random processes of runs, and say what became of the failures. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--whole", type=int, default=10)
    parser.add_argument("--report-dir", type=Path, default=Path("reports"))
    options = parser.parse_args()
    seconds, seen = 60 * options.minutes / (options.whole + 1), set[tuple[str, str]]()
    for number in range(options.whole + 1):
        run = start(options.report_dir, seconds / 60, [*KERNELS], "-n", "2")
        until = time.monotonic() + seconds
        while run.poll() is None and (number == options.whole or time.monotonic() < until):
            time.sleep(min(options.every, max(0.1, until - time.monotonic())))
            kill_one(run.pid)
        kill_all(run)
        found = reported(options.report_dir)
        print(f"run {number}: {len(found)} bugs, {len(seen - found)} lost", flush=True)
        seen |= found
    lost = seen - reported(options.report_dir)
    print(f"lost: {sorted(lost)}; invented: {invented(options.report_dir)}")
    return 1 if lost or invented(options.report_dir) else 0


if __name__ == "__main__":
    sys.exit(main())
