"""The plugin that collects the results of all processes, writes ``summary.json``, and prints the end of a run."""

import json
import math
import os
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.harness.attribute import is_same
from tests.harness.budget import BudgetSpent, meter
from tests.harness.bugs import Bug
from tests.harness.conclude import merged, replaced, with_offers
from tests.harness.detail import print_detail
from tests.harness.ledger import LEDGER, Ledger
from tests.harness.matrix import Paint, matrix
from tests.harness.plan import JOURNALS, SUMMARY, UNTIL, Plan
from tests.harness.report import add_to_report, replay_line, write_whole
from tests.harness.results import Results
from tests.harness.runs import Runs
from tests.harness.screen import MOST_LINES, bug_lines, notes, repeats
from tests.harness.telling import annotation

WRITING_SECONDS = 1.0
"""Seconds that must have passed since summary.json was written before the end of an item writes it again."""
CONCLUDING_SECONDS = 6.0
"""The most seconds, after a run, for telling its bugs apart and for trying other claims on their failing cases."""


class Summary:
    """The pytest plugin of the main process that collects what the items counted, and prints it at the end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.results = Results(plan.kernels)
        self.path = plan.report_dir / SUMMARY
        self.unwritten = ""
        self.written = -math.inf

    def pytest_runtest_logstart(self) -> None:
        """Start the clock of the run with its first item, whichever process runs that."""
        self.plan.clock.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of pytest-xdist when the run ends, if it has begun already."""
        node.workerinput[UNTIL] = self.plan.clock.until

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the counts that an item's report carries, and write summary.json unless that was done just before."""
        if not hasattr(report, "flashproof"):
            return
        self.results.add(json.loads(report.flashproof))
        if time.monotonic() - self.written >= WRITING_SECONDS:
            self._write()
            self.written = time.monotonic()

    def _write(self) -> None:
        """Write summary.json anew."""
        content = self.results.to_dict(self.plan.environment, self.plan.unavailable)
        try:
            write_whole(self.path, json.dumps(content, indent=1) + "\n")
            self.unwritten = ""
        except OSError as e:
            self.unwritten = f", not written: {e.strerror}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Conclude the run. It fails, even if every item has passed, if a kernel refuses or cannot run too much."""
        self._conclude(session)
        if session.exitstatus == pytest.ExitCode.OK and self.results.complaints():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _conclude(self, session: pytest.Session) -> None:
        """Find which bugs of different processes are the same, and add to each report what the whole run has seen."""
        spend = meter(self.plan.clock.cut(CONCLUDING_SECONDS))
        runs = {
            name: Runs(info, self.plan.child, self.plan.journal, clock=self.plan.clock)
            for name, info in self.results.infos.items()
        }

        def one_and_the_same(known: Bug, bug: Bug) -> bool:
            with suppress(BudgetSpent):
                spend()
                of_kernel = runs[bug.failure.kernel]
                beside = [x for x in self.results.bugs.values() if x.failure.kernel == bug.failure.kernel]
                run = partial(of_kernel.hard, explained=True)
                return is_same(known, bug, run, of_kernel.info.capabilities, beside)
            return known.is_like(bug)

        for record in Ledger(self.plan.report_dir / JOURNALS / LEDGER).news():
            if "finding" in record:
                self.results.add_unseen(Bug.from_dict(record))
        distinct = merged(self.results.bugs, self.results.seen, one_and_the_same)
        self.results.conclude([with_offers(one, runs[one.bug.failure.kernel], spend) for one in distinct])
        concluded = self.results.concluded
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            self._revise_failures(reporter)
        if not self.results.tallies:
            return
        with suppress(OSError):
            for one in concluded:
                for twin in one.twins:
                    shutil.rmtree(self.plan.report_dir / twin, ignore_errors=True)
                add_to_report(self.plan.report_dir / one.bug.key, one.lines())
        self._write()

    def _revise_failures(self, reporter: pytest.TerminalReporter) -> None:
        """Name reports in the texts of failures as the screen does; without -v, hide texts that the screen repeats.

        A failure that pytest's debugger has shown is left out of FAILURES, and is listed and counted all the same. What
        the screen shows is marked likewise.
        """
        for failed in reporter.stats.get("failed", ()):
            text = str(failed.longrepr)
            if (changed := replaced(text, self.results.concluded)) != text:
                failed.longrepr = changed
            is_shown = hasattr(failed, "flashproof") and repeats(self.results.concluded, changed)
            if is_shown and reporter.verbosity <= 0:
                failed._pdbshown = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, None, None]:
        """Print the results below those of pytest and of other plugins, because people look at the end first."""
        yield
        if self.results.tallies:
            terminalreporter.write_sep("=", "flashproof")
            self._print(terminalreporter)

    def _print(self, reporter: pytest.TerminalReporter) -> None:
        """Print each section, an empty line between any two; with -v, first the tables of all counts."""
        writer, verbose = reporter.config.get_terminal_writer(), reporter.verbosity > 0
        if verbose:
            print_detail(reporter, self.results)
        is_below = verbose
        for markup, (first, *rest) in self._sections(writer.fullwidth, writer.markup, verbose):
            reporter.write_line("\n" * is_below + first, **markup)
            for line in rest:
                reporter.write_line(line)
            is_below = True

    def _sections(
        self, width: int, paint: Paint, verbose: bool
    ) -> Iterator[tuple[dict[str, bool], list[str]]]:
        """Yield the matrix, notes, bugs, and the paths of what is written: lines, and how the first one is marked."""
        results, concluded = self.results, self.results.concluded
        yield {}, self.verdicts(paint)
        if found := list(notes(results, width)):
            yield {}, found
        for line in results.complaints():
            yield {"red": True}, [line]
        if concluded and os.environ.get("GITHUB_ACTIONS") == "true":
            yield {}, [annotation(one.bug, one.seen) for one in concluded]
        if concluded:
            yield {"bold": True}, [f"bugs, the worst first: {len(concluded)}"]
        most = None if verbose else MOST_LINES
        for number, one in enumerate(concluded, 1):
            yield {"red": True}, bug_lines(number, one, self.plan.report_dir, width, most)
        for kernel, told in results.less_precise_told().items():
            yield {}, [f"{kernel}: {told}"]
        replay = [f"replay: {replay_line(one.bug.failure, self.plan.report_dir)}" for one in concluded[:1]]
        yield {}, [*replay, f"summary: {self.path}{self.unwritten}{'' if verbose else ' (every count: -v)'}"]

    def verdicts(self, paint: Paint) -> list[str]:
        """Return the lines of the matrix of what is known so far; ``paint`` colours a mark."""
        results = self.results
        return matrix(results.kernels, results.laws, results.dtypes, results.mark, paint)
