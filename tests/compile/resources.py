"""The table of a compile run, and ``compile.json``: the resources that each function takes on each target."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.harness.files import write_whole
from tests.harness.report.screen import print_table

PROPERTY = "flashproof compile"
"""The user property that carries a record from an item, through xdist, to the main process."""


@dataclass(frozen=True)
class Record:
    """The result of one item: its words, and its compiled functions or why the kernel makes no claim to it."""

    item: dict[str, Any]
    unclaimed: str
    functions: list[dict[str, Any]]

    def attach(self, node: pytest.Item) -> None:
        """Send the record along with a test item's report."""
        node.user_properties.append((PROPERTY, json.dumps(asdict(self))))


class CompileSummary:
    """The pytest plugin of the main process that collects the records and prints the table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the record that a report carries."""
        if report.when == "call":
            self.records += [
                Record(**json.loads(str(value))) for name, value in report.user_properties if name == PROPERTY
            ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a row for each function and target, the largest of all its settings, and write the file."""
        if not self.records:
            return
        content = {"triton": triton.__version__, "items": [asdict(record) for record in self.records]}
        write_whole(self.path, json.dumps(content, indent=1) + "\n")
        functions: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
        unclaimed: dict[tuple[str, str], list[str]] = defaultdict(list)
        for record in self.records:
            kernel, target = record.item["kernel"], record.item["target"]
            if record.unclaimed:
                unclaimed[kernel, target].append(record.unclaimed)
            for function in record.functions:
                functions[kernel, function["name"], target].append(function)
        rows = [
            (
                *key,
                str(len(found)),
                *(str(max(f[name] for f in found)) for name in ("registers", "spills", "shared")),
                str(sum(f["spills"] > 0 for f in found)),
                str(sum(bool(f["problem"]) for f in found)),
            )
            for key, found in sorted(functions.items())
        ]
        columns = ("kernel", "function", "target", "compiled", "registers", "spilled bytes", "shared bytes")
        print_table(terminalreporter.write_line, (*columns, "that spill", "that fail"), rows)
        if unclaimed:
            counts = [
                (kernel, target, str(reasons.count(reason)), reason)
                for (kernel, target), reasons in sorted(unclaimed.items())
                for reason in dict.fromkeys(reasons)
            ]
            print_table(terminalreporter.write_line, ("kernel", "target", "not claimed", "because"), counts)
        terminalreporter.write_line(
            f"\nregisters, spills and shared memory are the largest; all: {self.path}"
        )
