"""The live line: examples so far, examples per second, time left."""

import os
import sys
import threading
import time

import pytest
from hypothesis import settings

from tests.harness.journal import examples_done
from tests.harness.plan import JOURNALS, Plan
from tests.harness.report import PROPERTIES

LIVE_SECONDS = 0.5
"""How often the line is drawn anew on a terminal."""

LOG_SECONDS = 30.0
"""How often a log that is no terminal gets a line of its own."""

ERASE = "\r\x1b[K"


def progress(done: int, elapsed: float, total: int, seconds: float | None) -> str:
    """The text of the line, ``seconds`` being those of a run that goes on until the time is up."""
    if seconds is not None:
        left = seconds - elapsed
    elif done:
        left = elapsed * (total / done - 1)
    else:
        return f"{done} of {total} examples"
    of_all = "" if seconds is not None else f" of {total}"
    minutes, rest = divmod(max(0, int(left)), 60)
    return f"{done}{of_all} examples, {done / elapsed:.1f} examples/s, {minutes}:{rest:02d} left"


class LiveLine:
    """A pytest plugin of the main process: watches the journals of all workers.

    Made before the first test runs, while stdout is not captured yet.
    """

    def __init__(self, plan: Plan, reporter: pytest.TerminalReporter) -> None:
        self.journals = plan.report_dir / JOURNALS
        self.seconds = None if plan.minutes is None else plan.minutes * 60
        self.writer = reporter.config.get_terminal_writer()
        self.stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        self.items = 0
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
        """What failed gets a line above the live one."""
        if self.live and report.failed:
            self._write(f"{ERASE}FAILED {report.nodeid}\n")

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
            self.thread.start()

    def _watch(self) -> None:
        start = time.monotonic()
        total = self.items * settings().max_examples
        while not self.stopped.wait(LIVE_SECONDS if self.live else LOG_SECONDS):
            done = examples_done(self.journals)
            line = progress(done, time.monotonic() - start, total, self.seconds)
            if self.live:
                self._write(f"{ERASE}{line}")
            else:
                self._write(f"\n{line}\n" if self.writer.width_of_current_line else f"{line}\n")
        if self.live:
            self._write(ERASE)

    def _write(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()
