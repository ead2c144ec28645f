"""Cases run once more in a process that a sanitizer watches, and the smallest case of what it reports."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from strategies.case import Case
from tests.harness.bugs.bug import Need
from tests.harness.diagnosis.gentle import RUNS, smallest
from tests.harness.run import Run
from tests.harness.running.child import environment_of, seen_by_child
from tests.harness.running.runs import Runs
from tests.harness.running.sanitizers import Report, command, environment, failure, reports
from tests.harness.running.tail import Tail

SAMPLE = 8
"""How many of the cases that held are run under each sanitizer, for each law and dtype."""
SECONDS = 60.0
"""Seconds after which a watched process begins no further case. Its start takes eight, compilation more."""
LEAST_SECONDS = 12.0
"""A watched process is not begun if there are fewer seconds for it."""
PATIENCE = 2.0
"""A watched process is ended after this many times its seconds."""
REDUCING_SECONDS = 120.0
"""Seconds to find a smaller case."""

LOG, DONE = "log", "done"
"""The files of a watched process."""
TOGETHER = "it is reported in a process that runs several cases, and of none of them alone"


def sample(held: Sequence[tuple[str, Case]], law: str) -> list[Case]:
    """Return the first cases of a law that held, without huge strides, for which a device may lack memory."""
    cases = dict.fromkeys(case for name, case in held if name == law)
    return [case for case in cases if "huge" not in case.layouts][:SAMPLE]


@dataclass
class Watch:
    """What one sanitizer reports of a kernel; ``told`` says why it did not do its work, once.

    ``done`` is the number of cases to whose end the last process has come.
    """

    sanitizer: str
    runs: Runs
    told: list[str] = field(default_factory=list)
    done: int = 0

    def reported(self, law: str, cases: Sequence[Case]) -> list[Report]:
        """Return what is reported of some cases, all of which run in one process."""
        info, seconds, self.done = self.runs.info, self.runs.clock.share(SECONDS), 0
        if seconds < LEAST_SECONDS or self.told:
            return []
        runs = [Run(info.spec, info.claims, law, case) for case in cases]
        with TemporaryDirectory() as folder:
            printed = watched(self.sanitizer, runs, self.runs.child.device, seconds, Path(folder))
            log, done = (_text(Path(folder) / name) for name in (LOG, DONE))
        self.done = len(done)
        found = reports(self.sanitizer, log, printed)
        failed = None if found else failure(self.sanitizer, log)
        self.told += filter(None, [failed])
        return found

    def first(self, law: str, cases: Sequence[Case]) -> tuple[Case, Report, bool] | None:
        """Return a case of which something is reported, what is, and whether it is when the case runs alone.

        If in none of them alone, the case is the last one.
        """
        found = self.reported(law, cases) if cases else []
        self.runs.tally.watched[self.sanitizer] += self.done if cases else 0
        if not found:
            return None
        last = self.done  # memcheck ends the process in the case of which it reports something
        for case in [*cases[last:], *cases[:last]] if len(cases) > 1 else ():
            for report in self.reported(law, [case])[:1]:
                return case, report, True
        return cases[-1], found[0], len(cases) == 1

    def reduced(self, law: str, case: Case, report: Report) -> tuple[Case, tuple[Need, ...]]:
        """Return a small case of which the same is reported, with what it needs, as far as few runs tell."""

        def fails(smaller: Case) -> bool:
            return report.what in {each.what for each in self.reported(law, [smaller])}

        spend = self.runs.clock.meter(REDUCING_SECONDS, RUNS)
        return smallest(case, fails, self.runs.info.capabilities, spend)


def watched(sanitizer: str, runs: Sequence[Run], device: str, seconds: float, folder: Path) -> str:
    """Run cases in a process that a sanitizer watches, and return the end of what it prints.

    The tool writes the file LOG of the folder, and the process the file DONE. A process that takes too long is ended,
    and the last line of LOG says so.
    """
    program = [sys.executable, "-P", "-m", "tests.harness.worker.sanitized", seen_by_child(device)]
    records = [run.to_dict() for run in runs]
    asked = json.dumps({"seconds": seconds, "done": str(folder / DONE), "runs": records})
    process = subprocess.Popen(
        [*command(sanitizer, folder / LOG), *program],
        env={**environment_of(device), **environment(sanitizer)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    printed = Tail(process.stderr)
    with suppress(BrokenPipeError):
        process.stdin.write(asked.encode())
        process.stdin.close()
    try:
        process.wait(PATIENCE * seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        with (folder / LOG).open("a") as log:
            log.write(f"it was still running after {PATIENCE * seconds:.0f} s")
    return printed.text()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
