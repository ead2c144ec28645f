"""The tables of a mutation run: the cost of each planted bug and of all of them, and the mutants that survived."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.table import Row, print_table

Table = tuple[Row, Sequence[Row]]
"""The names of the columns, and the rows."""
PROPERTY = "flashproof mutation"
"""The user property that carries a record from an item, through xdist, to the main process."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The outcome of one planted bug under one seed; ``law`` is "" if the bug was missed.

    ``named`` is the cause that the bug's report points to, and ``diagnosis`` compares that with the catalogue's: right,
    none or wrong; "" if there is no report.
    """

    name: str
    seed: int
    law: str
    examples: int
    seconds: float
    shrink_seconds: float = math.nan
    entries: int = 0
    named: str = ""
    diagnosis: str = ""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The outcome of a mutant that an operator made; ``verdict`` is killed, survived, equivalent, invalid or argued."""

    name: str
    verdict: str
    law: str = ""
    examples: int = 0
    seconds: float = 0.0
    diff: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What another suite's rule said of the planted bug ``bug``, or of the kernel itself if that is ""."""

    rule: str
    tried: int
    bug: str = ""
    caught: bool = False
    alarms: int = 0


@dataclass(frozen=True, kw_only=True)
class Sound:
    """The number of examples of a seed on which the kernel without a bug kept every law."""

    seed: int
    examples: int


Record = Planted | Operator | Compared | Sound
RECORDS: dict[str, type[Record]] = {x.__name__: x for x in (Planted, Operator, Compared, Sound)}


class Recorder:
    """Attaches records to a test item."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item

    def add(self, record: Record) -> None:
        """Send a record along with the item's report."""
        value = json.dumps({"kind": type(record).__name__, **asdict(record)})
        self.item.user_properties.append((PROPERTY, value))


class MutationSummary:
    """A pytest plugin of the main process: collects the records, writes them to a file, and prints the tables."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.planted: list[Planted] = []
        self.operators: list[Operator] = []
        self.compared: list[Compared] = []
        self.sound: list[Sound] = []
        self.records: dict[type, list[Any]] = {
            Sound: self.sound,
            Planted: self.planted,
            Operator: self.operators,
            Compared: self.compared,
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the records that a report carries, and append them to the file."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == PROPERTY:
                # Each record is written at once, so that a run that is interrupted has lost nothing.
                with self.path.open("a") as file:
                    file.write(f"{value}\n")
                fields = json.loads(str(value))
                record = RECORDS[fields.pop("kind")](**fields)
                self.records[type(record)].append(record)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a table for each kind of record that there is."""
        if self.planted:
            print_table(terminalreporter, *self._each())
            print_table(terminalreporter, *self._all())
        if self.operators:
            self._print_operators(terminalreporter)
        if self.compared:
            print_table(terminalreporter, *self._comparison())

    def _each(self) -> Table:
        """Return a table with a row for each planted bug."""
        groups: dict[str, list[Planted]] = defaultdict(list)
        for record in self.planted:
            groups[record.name].append(record)
        rows = []
        for name, records in groups.items():
            caught = [r for r in records if r.law]
            examples, seconds = sorted(r.examples for r in records), sorted(r.seconds for r in records)
            laws = ", ".join(sorted({r.law for r in caught}))
            rows.append(
                (
                    name,
                    f"{len(caught)} of {len(records)}",
                    f"{statistics.median(examples):.0f}",
                    f"{quantile(examples, 0.95):.0f}",
                    f"{statistics.median(seconds):.1f}",
                    f"{quantile(seconds, 0.95):.1f}",
                    *_shrinking(records),
                    laws,
                )
            )
        columns = (
            "planted bug",
            "caught",
            "examples",
            "95 %",
            "seconds",
            "95 %",
            "to the smallest",
            "95 %",
            "by",
        )
        return columns, rows

    def _all(self) -> Table:
        """Return the table of what all planted bugs cost together."""
        examples, seconds = ([getattr(r, x) for r in self.planted] for x in ("examples", "seconds"))
        caught = sum(bool(r.law) for r in self.planted)
        rows = [
            ("caught", f"{caught} of {len(self.planted)}", ""),
            (
                "examples to the first failure",
                f"{statistics.median(examples):.0f}",
                f"{quantile(examples, 0.95):.0f}",
            ),
            (
                "seconds to the first failure",
                f"{statistics.median(seconds):.2f}",
                f"{quantile(seconds, 0.95):.1f}",
            ),
            ("seconds to the smallest case", *_shrinking(self.planted)),
            ("entries that are not 0 in it", *_entries(self.planted)),
            ("reports that name the cause", _diagnoses(self.planted, "right"), ""),
            ("reports that name a wrong one", _diagnoses(self.planted, "wrong"), ""),
            ("examples without an alarm on the kernel itself", str(sum(r.examples for r in self.sound)), ""),
        ]
        return ("all planted bugs", "median", "95 %"), rows

    def _comparison(self) -> Table:
        """Return a table with a row for each rule of another suite."""
        rows = []
        for rule in dict.fromkeys(r.rule for r in self.compared):
            on_bugs = [r for r in self.compared if r.rule == rule and r.bug]
            on_correct = [r for r in self.compared if r.rule == rule and not r.bug]
            needed = [r.tried for r in on_bugs if r.caught]
            rows.append(
                (
                    rule,
                    f"{len(needed)} of {len(on_bugs)}",
                    f"{statistics.median(needed):.0f}" if needed else "-",
                    f"{sum(r.alarms for r in on_correct)} of {sum(r.tried for r in on_correct)}",
                )
            )
        columns = ("rule of", "bugs caught", "examples needed", "false alarms on the kernel itself")
        return columns, rows

    def _print_operators(self, reporter: pytest.TerminalReporter) -> None:
        for record in self.operators:
            if record.verdict == "survived":
                reporter.write_line(f"\nsurvived: {record.name}. {record.reason}\n{record.diff}")
        counts = {
            verdict: sum(r.verdict == verdict for r in self.operators)
            for verdict in ("killed", "survived", "argued", "equivalent", "invalid")
        }
        real = counts["killed"] + counts["survived"]
        score = f"{100 * counts['killed'] / real:.1f} %" if real else "-"
        rows = [(name, str(count)) for name, count in counts.items()]
        print_table(reporter, ("operator mutants", ""), [*rows, ("killed of what is not equivalent", score)])


def _shrinking(records: list[Planted]) -> tuple[str, str]:
    seconds = sorted(r.shrink_seconds for r in records if not math.isnan(r.shrink_seconds))
    if not seconds:
        return "-", "-"
    return f"{statistics.median(seconds):.1f}", f"{quantile(seconds, 0.95):.1f}"


def _entries(records: list[Planted]) -> tuple[str, str]:
    entries = [r.entries for r in records if not math.isnan(r.shrink_seconds)]
    return (f"{statistics.median(entries):.0f}", f"{quantile(entries, 0.95):.0f}") if entries else ("-", "-")


def _diagnoses(records: list[Planted], diagnosis: str) -> str:
    found = [r.diagnosis for r in records if r.diagnosis]
    return f"{found.count(diagnosis)} of {len(found)}" if found else "-"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least a ``share`` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
