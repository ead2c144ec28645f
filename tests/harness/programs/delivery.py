"""How a verdict reaches a program: as a file, or on stdout, which then has nothing else."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.harness.files import VERDICT, write_whole
from tests.harness.programs.verdict import no_verdict, text_of, verdict_of

STDOUT = "-"
"""The place that stands for stdout."""


class Capture(Protocol):
    """What is used of pytest's capture manager: it holds stdout, and gives it back in between."""

    def stop_global_capturing(self) -> None:
        """Give stdout back, and forget it."""

    def start_global_capturing(self) -> None:
        """Hold the stdout that there is."""

    def suspend_global_capture(self) -> None:
        """Give stdout back until capturing goes on."""


class Delivery:
    """Where the verdict of a run goes, and what is known of it.

    Attributes:
        place: a path, or ``STDOUT``.
        option: the option of the command line that asks for it.
        form: makes the text that is written of a verdict.
        report_dir: the folder of the reports.
        stdout: the descriptor of stdout, which the process itself has no more; None if ``place`` is a path.
        content: returns the content of summary.json; None until the run has a plan.
        error: why there is no plan, in one line.
    """

    def __init__(
        self,
        place: str,
        report_dir: Path,
        capture: Capture | None,
        option: str = "--json",
        form: Callable[[Mapping[str, Any]], str] = text_of,
    ) -> None:
        """Check the place. Raises pytest.UsageError, in one line, for a path whose folder can't be written."""
        self.place, self.report_dir, self.option, self.form = place, report_dir, option, form
        self.content: Callable[[], Mapping[str, Any]] | None = None
        self.error = "the command line can't be run: stderr says why"
        expected = f"{'- or ' * (form is text_of)}a file that can be written"
        if place == STDOUT and form is not text_of:
            raise pytest.UsageError(f"{option}: got {place!r}, expected {expected}")
        self.stdout = taken(capture) if place == STDOUT else None
        if (self.stdout is None and not os.access(Path(place).parent, os.W_OK)) or Path(place).is_dir():
            raise pytest.UsageError(f"{option}: got {place!r}, expected {expected}")

    def deliver(self) -> None:
        """Write the verdict. If that fails, as when a reader has gone away, say so in one line on stderr.

        The exit status remains that of the run, since the kernel is as right as before.
        """
        if self.content is None:
            verdict = no_verdict(self.error, int(pytest.ExitCode.USAGE_ERROR), self.report_dir)
        else:
            verdict = verdict_of(self.content(), self.report_dir)
        try:
            self._write(self.form(verdict))
        except OSError as e:
            kept = "" if self.content is None else f"; {self.report_dir / VERDICT} has the verdict"
            what = "a reader that stays" if self.place == STDOUT else "a file that can be written"
            print(
                f"ERROR: {self.option}: got {self.place!r}, expected {what} ({e.strerror}){kept}",
                file=sys.stderr,
            )

    def _write(self, text: str) -> None:
        if self.stdout is None:
            write_whole(Path(self.place), text)
            return
        with os.fdopen(self.stdout, "w", encoding="ascii") as file:
            file.write(text)


def taken(capture: Capture | None) -> int:
    """Return a descriptor of stdout; what the process writes to stdout from here on goes to stderr."""
    if capture is not None:
        capture.stop_global_capturing()
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    if capture is not None:
        capture.start_global_capturing()
        capture.suspend_global_capture()
    return stdout
