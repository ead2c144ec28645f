"""The live line: examples so far, examples per second, time left; and above it, after a minute, a first table."""

import os
import sys
import threading
import time

import pytest
from hypothesis import settings

from tests.harness.journal import examples_done
from tests.harness.law import PROPERTIES
from tests.harness.plan import JOURNALS, Plan
from tests.harness.summary import Summary, rendered

LIVE_SECONDS = 0.5
"""How often the line is drawn anew on a terminal."""

LOG_SECONDS = 30.0
"""How often a log that is no terminal gets a line of its own."""

TABLE_SECONDS = 60.0
"""When the first table is shown."""

ERASE = "\r\x1b[K"


def progress(done: int, elapsed: float, total: int | None, seconds: float) -> str:
    """The text of the line. ``total`` examples end the run, None where only the clock does, in so many ``seconds``."""
    if total is not None and not done:
        return f"{done} of {total} examples"
    of_all = "" if total is None else f" of {total}"
    left = seconds if total is None else min(seconds, elapsed * (total / done - 1))
    minutes, rest = divmod(max(0, int(left)), 60)
    return f"{done}{of_all} examples, {done / elapsed:.1f} examples/s, {minutes}:{rest:02d} left"


class LiveLine:
    """A pytest plugin of the main process: watches the journals of all workers.

    Made before the first test runs, while stdout is not captured yet.
    """

    def __init__(self, plan: Plan, summary: Summary, reporter: pytest.TerminalReporter) -> None:
        self.plan = plan
        self.summary = summary
        self.journals = plan.report_dir / JOURNALS
        self.writer = reporter.config.get_terminal_writer()
        self.stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        self.items = 0
        self.started = 0.0
        self.shown = False
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        # pytest -v has lines of its own, which a live one would be drawn over.
        self.live = reporter.isatty and reporter.verbosity <= 0
        if self.live:
            reporter.showfspath = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without pytest-xdist: the items are known."""
        self._start([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """With pytest-xdist: as soon as one worker knows them."""
        self._start(ids)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letters through the live line."""
        if self.live and hasattr(report, "flashproof"):
            return report.outcome, "", report.outcome.upper()
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What failed gets a line above the live one; the first table has all that was known after a minute."""
        if self.live and report.failed:
            self._write(f"{ERASE}FAILED {report.nodeid}\n")
        if self.started and not self.shown and time.monotonic() - self.started >= TABLE_SECONDS:
            self.shown = True
            table = rendered(self.summary.so_far(), colour=bool(self.live))
            self._write(f"{ERASE if self.live else chr(10)}so far, examples that held:\n{table}\n")

    def pytest_sessionfinish(self) -> None:
        """Take the line away."""
        self.stopped.set()
        if self.thread.is_alive():
            self.thread.join()
        self.stdout.close()

    def _start(self, ids: list[str]) -> None:
        properties = sum(PROPERTIES.name in nodeid for nodeid in ids)
        if properties and not self.items:
            self.items = properties
            self.started = time.monotonic()
            self.plan.clock.start()
            self.thread.start()

    def _watch(self) -> None:
        by_clock = self.plan.minutes is not None
        total = None if by_clock else self.items * settings().max_examples // len(self.plan.turns)
        while not self.stopped.wait(LIVE_SECONDS if self.live else LOG_SECONDS):
            done = examples_done(self.journals)
            line = progress(done, time.monotonic() - self.started, total, self.plan.clock.left)
            if self.live:
                self._write(f"{ERASE}{line}")
            else:
                self._write(f"\n{line}\n" if self.writer.width_of_current_line else f"{line}\n")
        if self.live:
            self._write(ERASE)

    def _write(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()
