"""The plugin that collects the results of all processes, writes them as files, and prints the end of a run."""

import json
import math
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

from strategies.case import Case
from tests.harness.bugs.bug import Bug, Occurrences
from tests.harness.bugs.duplicates import OF_RECORDS, are_one_read, is_duplicate
from tests.harness.certificates.same import explains, why_duplicates
from tests.harness.clock import BudgetSpent, meter
from tests.harness.files import JOURNALS, SUMMARY, VERDICT, write_whole
from tests.harness.programs.github import annotations
from tests.harness.programs.verdict import text_of, verdict_of
from tests.harness.report.changes import read_night
from tests.harness.report.conclusion import DistinctBug, merged, replaced, with_offers
from tests.harness.report.folder import add_to_report
from tests.harness.report.ledger import LEDGER, Ledger
from tests.harness.report.page import PAGE, write_page
from tests.harness.report.record import RECORD, Recorder, first_line, last_line
from tests.harness.report.results import Results
from tests.harness.report.screen import print_ending, repeats
from tests.harness.running.runs import Runs
from tests.harness.session.advice import advised, kinds_taken
from tests.harness.session.header import time_told
from tests.harness.session.item import names_of
from tests.harness.session.plan import UNTIL, Plan
from tests.harness.verdict import Finding

WRITING_SECONDS, PAGE_SECONDS = 1.0, 60.0
"""Seconds that must have passed since summary.json, or the page, was written before an item's end writes it again."""
CONCLUDING_SECONDS, LEAST_CONCLUDING_SECONDS = 20.0, 6.0
"""The most seconds that the end of a run takes to find which bugs are the same and which other claims would hold.

A run that is late takes as many fewer as it is late, but no fewer than the second number. Workers may be busy for
``budget.GRACE_SECONDS`` before that, and the whole run has to end within half a minute.
"""

ADVISING_SECONDS = {True: 8.0, False: 30.0}
"""The most seconds in which claims are looked for that would be true of kernels that refuse much.

They are those of all kernels of a run that has a time limit, and of each kernel of one that has none.
"""


class Summary:
    """The pytest plugin of the main process that collects what the items counted, and prints it at the end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.results = Results(plan.kernels)
        self.ledger = Ledger(plan.report_dir / JOURNALS / LEDGER)
        self.path = plan.report_dir / SUMMARY
        self.before = read_night(self.path)
        self.started = datetime.now(UTC)
        self.exit_status: int | None = None
        self.unwritten = ""
        self.page_unwritten = ""
        self.written = self.page_written = -math.inf
        self.has_workers = False
        first = first_line(
            self._run(),
            shard=plan.shard,
            report_dir=plan.report_dir,
            environment=plan.environment,
            kernels=plan.kernels,
            not_run=plan.unavailable,
        )
        self.recorder = Recorder(plan.report_dir / JOURNALS / RECORD, first)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember what is to be tried: without pytest-xdist, the items are known at this point."""
        if not session.config.option.collectonly:
            self._select([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Remember what is to be tried: with pytest-xdist, the items are known as a worker has collected them."""
        self._select(ids)

    def _select(self, ids: Sequence[str]) -> None:
        """Remember what is to be tried, and write it, so that a run that is killed does not leave the page of another.

        A worker of pytest-xdist that replaces another one has collected the same items.
        """
        selected = {key for nodeid in ids if (key := names_of(nodeid)) and key[0] in self.results.infos}
        if selected <= self.results.selected:
            return
        self.results.selected |= selected
        self.recorder.add({"selected": sorted(selected)})
        self._write()

    def pytest_runtest_logstart(self) -> None:
        """Start the clock of the run with its first item, whichever process runs that."""
        self.plan.clock.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of pytest-xdist when the run ends, if it has begun already."""
        node.workerinput[UNTIL] = self.plan.clock.until
        self.has_workers = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the counts that an item's report carries, and write summary.json unless that was done just before."""
        if report.failed:
            self.recorder.add({"failed": report.nodeid, "told": str(report.longrepr)})
        if not hasattr(report, "flashproof"):
            return
        counts = json.loads(report.flashproof)
        self.results.add(counts)
        self.recorder.add({"item": counts})
        if time.monotonic() - self.written >= WRITING_SECONDS:
            self._write()
            self.written = time.monotonic()

    def content(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        results = self.results.to_dict(self.plan.environment, self.plan.unavailable)
        return {**results, "run": self._run()}

    def _write_files(self, content: dict[str, Any]) -> None:
        write_whole(self.path, json.dumps(content, indent=1) + "\n")
        write_whole(self.plan.report_dir / VERDICT, text_of(verdict_of(content, self.plan.report_dir)))

    def _write(self) -> None:
        """Write summary.json and verdict.json anew, and now and then the page.

        A replay leaves the page of the last night as it is.
        """
        self.results.add_unreported(self.ledger, is_over=self.exit_status is not None)
        content = self.content()
        self.unwritten = unwritten(lambda: self._write_files(content))
        is_due = self.exit_status is not None or time.monotonic() - self.page_written >= PAGE_SECONDS
        if self.plan.replay is None and is_due:
            self.page_written = time.monotonic()
            self.page_unwritten = unwritten(lambda: write_page(self.plan.report_dir, content, self.before))

    def _run(self) -> dict[str, Any]:
        """Return what summary.json tells of the run as such; its exit status is None until it ends."""
        plan = self.plan
        return {
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round(self._seconds(), 1),
            "exit": self.exit_status,
            "time": time_told(plan),
            "profile": settings.get_current_profile_name(),
            "seed": plan.seed,
            "replay": plan.replay is not None,
        }

    def _seconds(self) -> float:
        """Return how long the run has taken so far."""
        return (datetime.now(UTC) - self.started).total_seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Conclude the run. It fails, even if every item has passed, if a kernel refuses or cannot run too much.

        If what matters of a kernel was not tried, the run ends like one of pytest that has collected no test.
        """
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = self.results.exit_status
        self.exit_status = int(session.exitstatus)
        self._conclude(session)
        self.recorder.add(last_line(self.exit_status, self._run()["seconds"], self.results.concluded))

    def _conclude(self, session: pytest.Session) -> None:
        """Find which bugs of different processes are the same, and add to each report what the whole run has seen."""
        refusing, late = self.results.counts("refusals"), self._seconds() - self.plan.clock.seconds
        spend = meter(self._concluding(late))
        runs = {
            name: Runs(
                info,
                self.plan.children.of(info.spec),
                self.plan.journal,
                clock=self.plan.clock,
                has_general=self.plan.has_general,
                unanswered=name in refusing,
            )
            for name, info in self.results.infos.items()
        }

        def why_one(known: Bug, bug: Bug) -> str:
            f, seen = bug.failure, self.results.seen
            of_kernel = runs[f.kernel]
            beside = [x for x in self.results.bugs.values() if x.failure.kernel == f.kernel]
            capabilities = of_kernel.claims_of(f.law)

            asked = of_kernel.oracle(is_precise=f.kernel not in self.results.imprecise)

            def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
                spend()
                return asked(law, case, ignored)

            if known.needs_other_calls or bug.needs_other_calls:
                of_kernel.child.close()  # what holds in a new process is told by the first case that it runs
                of_kernel.forget()
            with suppress(BudgetSpent):
                spend()
                with of_kernel.asked_of_general(f.law, f.case, f.finding, f.ignored):
                    both = ((known, bug), (bug, known))
                    if any(explains(one, other, run, of_kernel) for one, other in both):
                        return "the smallest case of one holds, judged against what the other computes"
                    if why := why_duplicates(known, bug, run, of_kernel, beside):
                        return why
                    if are_one_read(known, bug, run, capabilities):
                        return "one reads outside of a tensor what the other's wrong numbers are made of"
                    for one, other in both:
                        if is_duplicate(
                            one, other, seen.get(one.key, Occurrences()), run, capabilities, beside
                        ):
                            return "each known failing case of one is explained by the other"
                    return ""
            return f"{OF_RECORDS}, and there was no time for more" if known.is_like(bug) else ""

        self.results.add_unreported(self.ledger, is_over=True)
        distinct = merged(self.results.bugs, self.results.seen, why_one)
        answered = {name: self.results.answered(name) for name in runs}

        def offered(one: DistinctBug) -> DistinctBug:
            kernel = one.bug.failure.kernel
            return with_offers(one, runs[kernel], answered[kernel], spend)

        self.results.conclude(list(map(offered, distinct)))
        self._advise(runs)
        self.plan.finds.forget(self.results.gone)
        self.results.notice([*self.plan.finds.notices, *self.results.drawn_within()])
        concluded = self.results.concluded
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            self._revise_failures(reporter)
        if not self.results.keys:
            return
        with suppress(OSError):
            for one in concluded:
                for twin in one.twins:
                    shutil.rmtree(self.plan.report_dir / twin, ignore_errors=True)
                add_to_report(self.plan.report_dir / one.bug.key, one.lines())
        self._write()

    def _concluding(self, late: float) -> float:
        """Return the seconds for which bugs are the same and which claims would hold, if the run is so late."""
        if self.plan.budget:
            return self.plan.budget.concluding
        return max(LEAST_CONCLUDING_SECONDS, CONCLUDING_SECONDS - max(0.0, late))

    def _advise(self, runs: Mapping[str, Runs]) -> None:
        """Look for claims that are true of the kernels that refuse much, and try them."""
        refusing = {} if self.plan.replay else self.results.to_be_advised()
        is_limited = math.isfinite(self.plan.clock.seconds)
        most = self.plan.budget.concluding if self.plan.budget else math.inf
        seconds = min(most, ADVISING_SECONDS[is_limited]) / (len(refusing) or 1 if is_limited else 1)
        for name, seen in refusing.items():
            kinds = partial(kinds_taken, runs[name])
            self.results.advice[name] = advised(runs[name], seen, meter(seconds), kinds)

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
        if self.results.keys:
            terminalreporter.write_sep("=", "flashproof")
            self._print(terminalreporter)

    def _print(self, reporter: pytest.TerminalReporter) -> None:
        """Print the end of the run, with the paths of what was written."""
        page = "" if self.plan.replay else f"{self.plan.report_dir / PAGE}{self.page_unwritten}"
        print_ending(
            reporter.config.get_terminal_writer(),
            self.results,
            self.plan.report_dir,
            verbose=reporter.verbosity > 0,
            written=f"{self.path}{self.unwritten}",
            page=page,
            annotations=annotations(verdict_of(self.content(), self.plan.report_dir)),
        )


def unwritten(write: Callable[[], None]) -> str:
    """Write a file, and return what follows its name on the screen: "", or why it was not written."""
    try:
        write()
    except OSError as e:
        return f", not written: {e.strerror}"
    return ""
