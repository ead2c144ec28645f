"""The tables of a mutation run: the cost of each planted bug and of all of them, and the mutants that survived."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.harness.report.screen import Table, print_table

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
Recorder = Callable[[Record], None]
"""The function by which an item notes what it found."""
RECORDS: dict[str, type[Record]] = {x.__name__: x for x in (Planted, Operator, Compared, Sound)}


def written(record: Record) -> str:
    """Return a record as a line of JSON."""
    return json.dumps({"kind": type(record).__name__, **asdict(record)})


class MutationSummary:
    """A pytest plugin of the main process: collects the records, writes them to a file, and prints the tables."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[type[Record], list[Any]] = {kind: [] for kind in RECORDS.values()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the records that a report carries, and append them to the file."""
        for line in (str(x) for name, x in report.user_properties if name == PROPERTY):
            if report.when == "call":
                # Each record is written at once, so that a run that is interrupted has lost nothing.
                with self.path.open("a") as file:
                    file.write(f"{line}\n")
                fields = json.loads(line)
                kind = RECORDS[fields.pop("kind")]
                self.records[kind].append(kind(**fields))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a table for each kind of record that there is."""
        planted, operators, compared, sound = (
            self.records[kind] for kind in (Planted, Operator, Compared, Sound)
        )
        for record in (x for x in operators if x.verdict == "survived"):
            terminalreporter.write_line(f"\nsurvived: {record.name}. {record.reason}\n{record.diff}")
        tables = [each_bug(planted), all_bugs(planted, sound)] if planted else []
        tables += [of_operators(operators)] if operators else []
        tables += [comparison(compared)] if compared else []
        for columns, rows in tables:
            print_table(terminalreporter.write_line, columns, rows)


def each_bug(planted: Sequence[Planted]) -> Table:
    """Return a table with a row for each planted bug."""
    groups: dict[str, list[Planted]] = defaultdict(list)
    for record in planted:
        groups[record.name].append(record)
    rows = [
        (
            *(name, f"{sum(bool(r.law) for r in records)} of {len(records)}"),
            *spread([r.examples for r in records], 0),
            *spread([r.seconds for r in records]),
            *spread(_shrinking(records)),
            ", ".join(sorted({r.law for r in records if r.law})),
        )
        for name, records in groups.items()
    ]
    measured = ("examples", "95 %", "seconds", "95 %", "to the smallest", "95 %")
    return ("planted bug", "caught", *measured, "by"), rows


def all_bugs(planted: Sequence[Planted], sound: Sequence[Sound]) -> Table:
    """Return the table of what all planted bugs cost together."""
    told = [r.diagnosis for r in planted if r.diagnosis]
    right, wrong = (f"{told.count(x)} of {len(told)}" if told else "-" for x in ("right", "wrong"))
    entries = [r.entries for r in planted if not math.isnan(r.shrink_seconds)]
    rows = [
        ("caught", f"{sum(bool(r.law) for r in planted)} of {len(planted)}", ""),
        ("examples to the first failure", *spread([r.examples for r in planted], 0)),
        ("seconds to the first failure", *spread([r.seconds for r in planted], 2)),
        ("seconds to the smallest case", *spread(_shrinking(planted))),
        ("entries that are not 0 in it", *spread(entries, 0)),
        ("reports that name the cause", right, ""),
        ("reports that name a wrong one", wrong, ""),
        ("examples without an alarm on the kernel itself", str(sum(r.examples for r in sound)), ""),
    ]
    return ("all planted bugs", "median", "95 %"), rows


def comparison(compared: Sequence[Compared]) -> Table:
    """Return a table with a row for each rule of another suite."""
    rows = []
    for rule in dict.fromkeys(r.rule for r in compared):
        on_bugs = [r for r in compared if r.rule == rule and r.bug]
        on_correct = [r for r in compared if r.rule == rule and not r.bug]
        needed = [r.tried for r in on_bugs if r.caught]
        alarms = f"{sum(r.alarms for r in on_correct)} of {sum(r.tried for r in on_correct)}"
        rows.append((rule, f"{len(needed)} of {len(on_bugs)}", spread(needed, 0)[0], alarms))
    return ("rule of", "bugs caught", "examples needed", "false alarms on the kernel itself"), rows


def of_operators(operators: Sequence[Operator]) -> Table:
    """Return a table with the number of mutants for each verdict."""
    verdicts = [r.verdict for r in operators]
    counts = {x: verdicts.count(x) for x in ("killed", "survived", "argued", "equivalent", "invalid")}
    real = counts["killed"] + counts["survived"]
    score = f"{100 * counts['killed'] / real:.1f} %" if real else "-"
    rows = [(name, str(count)) for name, count in counts.items()]
    return ("operator mutants", ""), [*rows, ("killed of what is not equivalent", score)]


def _shrinking(records: Sequence[Planted]) -> list[float]:
    return [r.shrink_seconds for r in records if not math.isnan(r.shrink_seconds)]


def spread(values: Sequence[float], digits: int = 1) -> tuple[str, str]:
    """Return the median and the 95 % quantile as text with so many digits after the point; "-" for no values."""
    if not values:
        return "-", "-"
    return f"{median(values):.{digits}f}", f"{quantile(values, 0.95):.{digits}f}"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least a ``share`` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
