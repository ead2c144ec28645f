"""The end of a run: ``summary.json`` as it grows, what all processes know taken together, and what is printed of it."""

import json
import math
import os
import shutil
import time
from collections.abc import Generator
from contextlib import suppress
from functools import partial

import pytest

from tests.harness.attribute import is_same
from tests.harness.budget import BudgetSpent, meter
from tests.harness.bugs import Bug, annotation
from tests.harness.conclude import merged, replaced, with_offers
from tests.harness.detail import print_detail
from tests.harness.matrix import Paint, matrix
from tests.harness.plan import SUMMARY, Plan
from tests.harness.report import add_to_report, replay_line, write_whole
from tests.harness.results import Results
from tests.harness.runs import Runs
from tests.harness.screen import MOST_LINES, bug_lines, notes

WRITING_SECONDS = 1.0
"""The file is written anew when an item ends, but no sooner than this after it was written last."""
CONCLUDING_SECONDS = 6.0
"""For other claims, tried on the failing cases of a whole run when it is over."""


class Summary:
    """A pytest plugin of the main process: collects what the items counted, and tells it at the end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.results = Results(plan.kernels)
        self.path = plan.report_dir / SUMMARY
        self.unwritten = ""
        self.written = -math.inf

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the counts that an item's report carries, and write the file anew unless that was done just before."""
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
        """End with what the whole run knows. A run in which a kernel answers too little is not green."""
        self._conclude(session)
        if session.exitstatus == pytest.ExitCode.OK and self.results.complaints():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _conclude(self, session: pytest.Session) -> None:
        """Tell apart the bugs of all processes, and write what the whole run knows of each into its report."""
        spend = meter(self.plan.clock.cut(CONCLUDING_SECONDS))
        runs = {
            name: Runs(info, self.plan.child, self.plan.journal) for name, info in self.results.infos.items()
        }

        def one_and_the_same(known: Bug, bug: Bug) -> bool:
            with suppress(BudgetSpent):
                spend()
                of_kernel = runs[bug.failure.kernel]
                run = partial(of_kernel.hard, explained=True)
                return is_same(known, bug, run, of_kernel.info.capabilities)
            return False

        distinct = merged(self.results.bugs, self.results.seen, one_and_the_same)
        self.results.conclude([with_offers(one, runs[one.bug.failure.kernel], spend) for one in distinct])
        concluded = self.results.concluded
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for failed in reporter.stats.get("failed", ()) if reporter else ():
            text = str(failed.longrepr)
            if (changed := replaced(text, concluded)) != text:
                failed.longrepr = changed
        if not self.results.tallies:
            return
        with suppress(OSError):
            for one in concluded:
                for twin in one.twins:
                    shutil.rmtree(self.plan.report_dir / twin, ignore_errors=True)
                add_to_report(self.plan.report_dir / one.bug.key, one.lines())
        self._write()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, None, None]:
        """Print what was found below all that pytest and other plugins tell: the bugs come last, where one looks."""
        yield
        if self.results.tallies:
            terminalreporter.write_sep("=", "flashproof")
            self._print(terminalreporter)

    def _print(self, reporter: pytest.TerminalReporter) -> None:
        """Print the matrix, what it does not show, the bugs, and where the rest is; before it all details with -v."""
        verbose, width = reporter.verbosity > 0, reporter.config.get_terminal_writer().fullwidth
        concluded = self.results.concluded
        if verbose:
            print_detail(reporter, self.results)
            reporter.write_line("")
        for line in (
            *self.verdicts(reporter.config.get_terminal_writer().markup),
            "",
            *notes(self.results, width),
        ):
            reporter.write_line(line)
        for line in self.results.complaints():
            reporter.write_line(f"\n{line}", red=True)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for one in concluded:
                reporter.write_line(annotation(one.bug, one.seen))
        if concluded:
            reporter.write_line(f"\nbugs, the worst first: {len(concluded)}", bold=True)
        for number, one in enumerate(concluded, 1):
            first, *rest = bug_lines(
                number, one, self.plan.report_dir, width, None if verbose else MOST_LINES
            )
            reporter.write_line(f"\n{first}", red=True)
            for line in rest:
                reporter.write_line(line)
        for kernel, told in self.results.less_precise_told().items():
            reporter.write_line(f"\n{kernel}: {told}")
        reporter.write_line("")
        if concluded:
            reporter.write_line(f"replay: {replay_line(concluded[0].bug.failure, self.plan.report_dir)}")
        reporter.write_line(f"summary: {self.path}{self.unwritten}{'' if verbose else ' (every count: -v)'}")

    def verdicts(self, paint: Paint) -> list[str]:
        """The matrix of what is known by now."""
        results = self.results
        return matrix(results.kernels, results.laws, results.dtypes, results.mark, paint)
