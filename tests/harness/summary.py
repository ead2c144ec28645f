"""The results of a run: ``summary.json`` as it grows, and the table at the end."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tests.harness.attribute import is_same
from tests.harness.budget import BudgetSpent, meter
from tests.harness.bugs import Bug, Sightings, annotation, with_tensors
from tests.harness.bugs import row as row_of
from tests.harness.conclude import Concluded, merged, replaced, with_offers
from tests.harness.imprecise import Imprecise, sentence
from tests.harness.plan import SUMMARY, Plan
from tests.harness.refusals import complaint
from tests.harness.report import add_to_report, write_whole
from tests.harness.runs import Runs
from tests.harness.tally import Tally

FORMAT = 1
CONCLUDING_SECONDS = 6.0
"""For other claims, tried on the failing cases of a whole run when it is over."""
WIDTH = 130
"""Columns of the tables, a terminal or not: logs are read side by side."""


class Summary:
    """A pytest plugin of the main process: collects what the items counted."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tallies: dict[tuple[str, str, str], Tally] = {}
        self.bugs: dict[str, Bug] = {}
        self.seen: dict[str, Sightings] = {}
        self.broken: dict[tuple[str, str, str], set[str]] = {}
        self.imprecise: dict[str, Imprecise] = {}
        self.less_precise: set[tuple[str, str, str]] = set()
        self.concluded: list[Concluded] = []
        self.path = plan.report_dir / SUMMARY
        self.unwritten = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the counts that an item's report carries, and write the file anew."""
        if not hasattr(report, "flashproof"):
            return
        counts = json.loads(report.flashproof)
        key = (counts["kernel"], counts["law"], counts["dtype"])
        self.tallies.setdefault(key, Tally()).merge(Tally.from_dict(counts["tally"]))
        self._learn(key, counts)
        self._write()

    def _write(self) -> None:
        """Write summary.json anew."""
        try:
            write_whole(self.path, json.dumps(self.to_dict(), indent=1) + "\n")
            self.unwritten = ""
        except OSError as e:
            self.unwritten = f", not written: {e.strerror}"

    def _learn(self, key: tuple[str, str, str], counts: dict[str, Any]) -> None:
        """Take in the bugs that an item has shown."""
        for bug in map(Bug.from_dict, counts["bugs"]):
            known = self.bugs.get(bug.key, bug)
            self.bugs[bug.key] = with_tensors(bug, known.tensors)
        for folder, seen in counts["seen"].items():
            sightings = Sightings.from_dict(seen)
            self.seen.setdefault(folder, Sightings()).merge(sightings)
            for law, dtype, _ in sightings.counts:  # of an item before, if it had to wait
                self.broken.setdefault((key[0], law, dtype), set()).add(folder)
        imprecise = Imprecise.from_dict(counts["imprecise"])
        if imprecise.total:
            self.imprecise.setdefault(counts["kernel"], Imprecise()).merge(imprecise)
            self.less_precise.add(key)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End with what the whole run knows. A run in which a kernel answers too little is not green."""
        self._conclude(session)
        if session.exitstatus == pytest.ExitCode.OK and self.complaints():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _conclude(self, session: pytest.Session) -> None:
        """Tell apart the bugs of all processes, and write what the whole run knows of each into its report."""
        infos = {info.name: info for info in self.plan.kernels}
        spend = meter(self.plan.clock.cut(CONCLUDING_SECONDS))
        runs = {name: Runs(info, self.plan.child, self.plan.journal) for name, info in infos.items()}

        def one_and_the_same(known: Bug, bug: Bug) -> bool:
            with suppress(BudgetSpent):
                spend()
                of_kernel = runs[bug.failure.kernel]
                run = partial(of_kernel.hard, explained=True)
                return is_same(known, bug, run, of_kernel.info.capabilities)
            return False

        for one in merged(self.bugs, self.seen, one_and_the_same):
            self.concluded.append(with_offers(one, runs[one.bug.failure.kernel], spend))
        bugs = [one.bug for one in self.concluded]
        self.imprecise = {
            kernel: calls
            for kernel, calls in self.imprecise.items()
            if not calls.are_of([bug for bug in bugs if bug.failure.kernel == kernel])
        }
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for failed in reporter.stats.get("failed", ()) if reporter else ():
            failed.longrepr = replaced(str(failed.longrepr), self.concluded)
        if not self.tallies:
            return
        with suppress(OSError):
            for one in self.concluded:
                for twin in one.twins:
                    shutil.rmtree(self.plan.report_dir / twin, ignore_errors=True)
                add_to_report(self.plan.report_dir / one.bug.key, one.lines()[1:])
        self._write()

    def complaints(self) -> list[str]:
        """One line for each kernel that answers too little of what it claims."""
        told = []
        for info in self.plan.kernels:
            tallies = {key[1:]: tally for key, tally in self.tallies.items() if key[0] == info.name}
            told.append(complaint(info.name, tallies, info.capabilities))
        return [line for line in told if line is not None]

    def to_dict(self) -> dict[str, Any]:
        """The content of summary.json."""
        return {
            "flashproof": FORMAT,
            "environment": self.plan.environment,
            "kernels": {
                info.name: {
                    "spec": info.spec,
                    "claims": info.printed,
                    "known_failures": list(map(str, info.known_failures)),
                }
                for info in self.plan.kernels
            },
            "not_run": self.plan.unavailable,
            "results": [self._row(key) for key in sorted(self.tallies)],
            "bugs": [
                {**row_of(one.bug, one.seen), "offers": one.offers}
                for one in self.concluded or merged(self.bugs, self.seen)
            ],
            "complaints": self.complaints(),
            "consistent_with": self.designs(),
            "less_precise": {kernel: self._sentence(kernel) for kernel in sorted(self.imprecise)},
            "error_over_bound": self.distribution(),
        }

    def _row(self, key: tuple[str, str, str]) -> dict[str, Any]:
        kernel, law, dtype = key
        fields = asdict(self.tallies[key])
        for name in ("histogram", "refused_cases", "answered_cases"):
            del fields[name]
        twins = {twin: one.bug.key for one in self.concluded for twin in one.twins}
        reports = sorted({twins.get(folder, folder) for folder in self.broken.get(key, ())})
        names = {"kernel": kernel, "property": law, "dtype": dtype}
        return {**names, "verdict": self._verdict(key), "reports": reports, **fields}

    def _verdict(self, key: tuple[str, str, str]) -> str:
        """Broken, less precise than claimed, held, known (a known failure meets all that was drawn), or not tried."""
        tally = self.tallies[key]
        if key in self.broken:
            return "broken"
        if key in self.less_precise:
            return "less precise"
        if tally.examples:
            return "held"
        return "known" if tally.known else "not tried"

    def distribution(self) -> list[dict[str, Any]]:
        """Largest error over bound of an example: its median, 99.9th percentile and maximum, by tensor."""
        merged: dict[tuple[str, str, str], Tally] = {}
        for (kernel, law, dtype), tally in self.tallies.items():
            for tensor, bins in tally.histogram.items():
                if law in ("forward", "backward"):
                    part = Tally(histogram={tensor: bins}, largest={tensor: tally.largest[tensor]})
                    part.judged = {tensor: tally.judged.get(tensor, 0)}
                    part.idle = {tensor: tally.idle.get(tensor, 0)}
                    merged.setdefault((kernel, dtype, tensor), Tally()).merge(part)
        return [
            {
                "kernel": kernel,
                "dtype": dtype,
                "tensor": tensor,
                "examples": sum(tally.histogram[tensor].values()),
                "median": tally.quantile(tensor, 0.5),
                "p99.9": tally.quantile(tensor, 0.999),
                "maximum": tally.largest[tensor],
                "tests_nothing": tally.idle[tensor] / max(1, tally.judged[tensor]),
            }
            for (kernel, dtype, tensor), tally in sorted(merged.items())
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables: results, distribution, where the time went."""
        if not self.tallies:
            return
        for table in (self._results(), self._distribution(), self._times()):
            if not table.row_count:
                continue
            print_table(terminalreporter, table)
        for info in self.plan.kernels:
            for known in info.known_failures:
                terminalreporter.write_line(f"known failure of {info.name}: {known}")
        for kernel, told in self.designs().items():
            terminalreporter.write_line(f"{kernel} is consistent with: {told}")
        for line in self.complaints():
            terminalreporter.write_line(f"\n{line}", red=True)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for one in self.concluded:
                terminalreporter.write_line(annotation(one.bug, one.seen))
        for line in self._bugs():
            terminalreporter.write_line(line)
        terminalreporter.write_line("")
        terminalreporter.write_line(f"summary: {self.path}{self.unwritten}")

    def so_far(self) -> Table:
        """A line for each kernel, a column for each law: the examples that held over all dtypes, or broken."""
        laws = sorted({law for _, law, _ in self.tallies})
        names = sorted({kernel for kernel, _, _ in self.tallies})
        rows = [(kernel, *(self._state(kernel, law) for law in laws)) for kernel in names]
        return make_table(("kernel", *laws), rows)

    def _state(self, kernel: str, law: str) -> str:
        keys = [key for key in self.tallies if key[:2] == (kernel, law)]
        if any(key in self.broken for key in keys):
            return "broken"
        return str(sum(self.tallies[key].examples for key in keys) or "-")

    def _results(self) -> Table:
        columns = ("kernel", "property", "dtype", "examples", "refused", "worst err/bound", "verdict")
        rows = []
        for key in sorted(self.tallies):
            tally = self.tallies[key]
            worst = f"{tally.worst:.3f} {tally.worst_tensor}" if tally.worst_tensor else "-"
            left_out = {
                "not run": tally.skipped,
                "known": tally.known,
                "set aside": tally.set_aside,
                "of these run elsewhere": tally.moved,
                "time up": tally.undrawn,
            }
            refused = " ".join(
                [str(tally.refusals), *(f"(+{count} {what})" for what, count in left_out.items() if count)]
            )
            rows.append((*key, str(tally.examples), refused, worst, self._verdict(key)))
        return make_table(columns, rows)

    def _bugs(self) -> Iterator[str]:
        """Each bug in a few lines, the worst first; what is but less precise comes last."""
        if self.concluded:
            yield ""
            yield f"bugs, the worst first: {len(self.concluded)}"
        for number, one in enumerate(self.concluded, 1):
            first, *rest = one.lines()
            yield f"{number}. {first}"
            yield from (f"   {line}" for line in (*rest, f"report: {self.plan.report_dir / one.bug.key}"))
        for kernel in sorted(self.imprecise):
            yield f"{kernel}: {self._sentence(kernel)}"

    def _sentence(self, kernel: str) -> str:
        """What is told of a kernel that is less precise."""
        dtypes = {key[2] for key, tally in self.tallies.items() if key[0] == kernel and tally.examples}
        return sentence(self.imprecise[kernel], dtypes)

    def _distribution(self) -> Table:
        rows = [
            (
                *(str(r[name]) for name in ("kernel", "dtype", "tensor", "examples")),
                f"{r['median']:.3f}",
                f"{r['p99.9']:.3f}",
                f"{r['maximum']:.4f}",
                f"{100 * r['tests_nothing']:.0f} %",
            )
            for r in self.distribution()
        ]
        columns = ("kernel", "dtype", "tensor", "examples", "median err/bound", "99.9 %", "maximum")
        return make_table((*columns, "tests nothing"), rows)

    def designs(self) -> dict[str, str]:
        """For each kernel that declares no arithmetic, the designs that explain it, the most frequent first."""
        counts: dict[str, Tally] = {}
        for (kernel, _, _), tally in self.tallies.items():
            counts.setdefault(kernel, Tally()).merge(Tally(designs=tally.designs))
        ordered = {
            kernel: sorted(x.designs, key=x.designs.__getitem__, reverse=True) for kernel, x in counts.items()
        }
        return {
            kernel: "; ".join(f"{name} ({counts[kernel].designs[name]} examples)" for name in names)
            for kernel, names in ordered.items()
            if names
        }

    def _times(self) -> Table:
        rows = []
        for kernel in sorted({key[0] for key in self.tallies}):
            total = Tally()
            for key, tally in self.tallies.items():
                if key[0] == kernel:
                    total.add_seconds(tally.seconds)
            s = total.seconds
            work = s.get("kernel", 0.0) + s.get("check", 0.0)
            harness = s["total"] - work
            shares = f"{100 * harness / work:.0f} %" if work else "-"
            parts = (f"{s.get(name, 0.0):.1f} s" for name in ("kernel", "check", "tensors", "total"))
            rows.append((kernel, *parts, shares))
        return make_table(
            ("kernel", "launches", "references", "tensors", "total", "harness over launches + references"),
            rows,
        )


def print_table(reporter: pytest.TerminalReporter, table: Table) -> None:
    """Write a table to pytest's terminal, a line apart from what is above."""
    reporter.write_line("")
    reporter.write_line(rendered(table, colour=reporter.hasmarkup))


def rendered(table: Table, *, colour: bool) -> str:
    """The lines of a table."""
    console = Console(width=WIDTH, no_color=not colour)
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip()


def make_table(columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    """A table without lines: it can be copied into an issue."""
    table = Table(*columns, box=None, header_style="bold", padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table
