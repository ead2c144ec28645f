"""The output during a run: one live line, and above it a line for each bug and, after a minute, a first matrix."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.harness.bugs.bug import Bug
from tests.harness.bugs.failure import in_short
from tests.harness.files import JOURNALS
from tests.harness.law import PROPERTIES
from tests.harness.report.ledger import BEGUN, LEDGER, Ledger
from tests.harness.report.screen import verdicts
from tests.harness.report.wording import conditions_of
from tests.harness.running.journal import examples_done
from tests.harness.session.plan import Plan
from tests.harness.session.summary import Summary

LIVE_SECONDS = 0.5
"""Seconds between two updates of the live line, and between two looks for new bugs."""

LOG_SECONDS = 30.0
"""Seconds between two lines of progress if the output is no terminal, such as a log."""

TABLE_SECONDS = 60.0
"""Seconds after the first example until the first matrix is shown."""

ERASE = "\r\x1b[K"
"""The characters that clear the current line of a terminal."""


def progress(done: int, elapsed: float, total: int | None, seconds: float, bugs: int = 0) -> str:
    """Return the text of the live line.

    ``done`` examples have run in ``elapsed`` seconds. The run ends after ``total`` examples, or if that is None by the
    clock alone; ``seconds`` are left of its time. ``bugs`` is the number of bugs found so far.
    """
    found = f", {bugs} bug{'s' * (bugs > 1)}" if bugs else ""
    if total is not None and not done:
        return f"{done} of {total} examples{found}"
    of_all = "" if total is None else f" of {total}"
    left = seconds if total is None else min(seconds, elapsed * (total / done - 1))
    minutes, rest = divmod(max(0, int(left)), 60)
    return f"{done}{of_all} examples, {done / elapsed:.1f} examples/s, {minutes}:{rest:02d} left{found}"


class Found:
    """Reads what the processes of a run have written into the ledger, and tells each finding in one line."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.bugs: set[str] = set()
        self.failing: set[str] = set()
        self.less_precise: set[str] = set()

    def news(self) -> Iterator[str]:
        """Yield a line for what was found since the last call: each bug, and each kernel less precise than claimed.

        The first failure of a kernel has a line at once, as it takes seconds to find out what bug it is.
        """
        for record in self.ledger.news():
            if (kernel := record.get(BEGUN, record).get("kernel")) and kernel not in self.failing:
                self.failing.add(kernel)
                if BEGUN in record:
                    f = Bug.from_dict(record[BEGUN]).failure
                    yield f"failing: {f.kernel}: {in_short(f)} ({f.law}, {f.case.dtype}), which is looked into"
            if "finding" in record and (bug := Bug.from_dict(record)).key not in self.bugs:
                self.bugs.add(bug.key)
                f, only = bug.failure, conditions_of(bug)
                only = f", {only}" if only else ""
                yield f"found: {f.kernel}: {in_short(f)} ({f.law}, {f.case.dtype}){only}"
            elif "imprecise" in record and record["imprecise"] not in self.less_precise:
                self.less_precise.add(record["imprecise"])
                yield f"found: {record['imprecise']}: less precise than FlashAttention-2"


class LiveLine:
    """The pytest plugin of the main process that reads the journals of all workers and draws the live line.

    It must be made before the first test runs, because it needs stdout before pytest captures it.
    """

    def __init__(self, plan: Plan, summary: Summary, reporter: pytest.TerminalReporter) -> None:
        self.plan = plan
        self.summary = summary
        self.journals = plan.report_dir / JOURNALS
        self.found = Found(Ledger(self.journals / LEDGER))
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
        """Start the line: without pytest-xdist, the items are known at this point."""
        self._start([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Start the line: with pytest-xdist, the items are known as soon as one worker has collected them."""
        self._start(ids)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Keep pytest from printing a letter for an item of ours, which would break the live line."""
        if self.live and hasattr(report, "flashproof"):
            return report.outcome, "", report.outcome.upper()
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a line for a failure that ``found`` does not tell of and, after a minute, the first matrix."""
        if self.live and report.failed and not getattr(report, "is_told", False):
            self._tell(f"FAILED {report.nodeid}")
        counted = self.started and self.summary.results.tallies
        if counted and not self.shown and time.monotonic() - self.started >= TABLE_SECONDS:
            self.shown = True
            self._tell("so far:", *verdicts(self.summary.results, self.writer.markup))

    def pytest_sessionfinish(self) -> None:
        """Erase the live line, and write what was found last."""
        self.stopped.set()
        if self.thread.is_alive():
            self.thread.join()
        self._tell(*self.found.news())
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
        logged = self.started
        while not self.stopped.wait(LIVE_SECONDS):
            self._tell(*self.found.news())
            now = time.monotonic()
            if not self.live and now - logged < LOG_SECONDS:
                continue
            logged, bugs = now, len(self.found.bugs)
            done, elapsed = examples_done(self.journals), now - self.started
            line = progress(done, elapsed, total, self.plan.clock.left, bugs)
            if self.live:
                self._write(f"{ERASE}{line[: shutil.get_terminal_size().columns - 1]}")
            elif done:  # before the first example, pytest runs other tests
                self._tell(line)
        if self.live:
            self._write(ERASE)

    def _tell(self, *lines: str) -> None:
        """Write lines that stay: on a terminal in place of the live line, in a log on lines of their own."""
        if lines:
            above = ERASE if self.live else "\n" * bool(self.writer.width_of_current_line)
            self._write("\n".join((above + lines[0], *lines[1:], "")))

    def _write(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()
