"""Runs of public kernels become a table of a page.

The command is ``python -m tests.harness.commands.package_table DIR ... --page PATH``. A row is a kernel on a device, a
column a law. A run replaces the rows of its kernels on its device and keeps others, so that runs on several machines
make one table.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.registry import PUBLIC
from tests.harness.commands.arguments import OneLine
from tests.harness.files import SUMMARY, write_whole
from tests.harness.law import LAWS, by_place
from tests.harness.report.screen import MARKS

BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"
"""The lines of the page between which the table stands."""
NOT_RUN = "not run"
"""The device of a kernel that has been run nowhere; what it needs follows in the same cell."""

Cells = tuple[str, ...]
"""The cells of a row; the first two are the kernel and the device."""
Rows = dict[tuple[str, str], Cells]
"""The rows of a table by their first two cells."""


def main(arguments: Sequence[str]) -> int:
    """Write the table into the page, and return the exit status. Raises ValueError, in one line."""
    parser = OneLine(prog="python -m tests.harness.commands.package_table")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="the report folder of a run")
    parser.add_argument("--page", type=Path, default=Path("docs/findings.md"), help="(default: %(default)s)")
    given = parser.parse_args(arguments)
    summaries = [read(folder / SUMMARY) for folder in given.folders]
    write_whole(given.page, with_table(given.page.read_text(), summaries))
    return 0


def read(path: Path) -> dict[str, Any]:
    """Return the content of a summary. Raises ValueError, in one line."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"got {str(path)!r}, expected the summary of a run ({e})") from None
    return found


def with_table(page: str, summaries: Iterable[Mapping[str, Any]]) -> str:
    """Return the page with the rows of these runs in its table. Raises ValueError if it has no place for one."""
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected a page with the lines {BEGIN} and {END}")
    rows = rows_of(table)
    for summary in summaries:
        rows |= rows_run(summary)
        for kernel, reason in reasons(summary).items():
            rows[kernel, NOT_RUN] = (kernel, f"{NOT_RUN}: {reason}")
    return f"{before}{BEGIN}\n\n{told(rows)}\n\n{END}{after}"


def rows_of(table: str) -> Rows:
    """Return the rows of a table that was written before; a law that it has no column of was not tried then."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    written = [tuple(cell.strip().strip("`") for cell in line.strip("|").split("|")) for line in lines]
    rows = {}
    for cells in written[2:]:
        named = dict(zip(written[0], cells, strict=True))
        key = (cells[0], cells[1].partition(":")[0])
        unknown = "" if key[1] == NOT_RUN else MARKS["not tried"].character
        rows[key] = tuple(named.get(name, unknown) for name in head())
    return rows


def rows_run(summary: Mapping[str, Any]) -> Rows:
    """Return a row for each public kernel that a run has tried."""
    environment = summary["environment"]
    device = "CPU" if environment["device"] == "cpu" else environment["device_name"]
    rows = {}
    for kernel in summary["kernels"]:
        tried = [row for row in summary["results"] if row["kernel"] == kernel]
        if kernel not in PUBLIC or not tried:
            continue
        package, day = PUBLIC[kernel], summary["run"]["started"][:10]
        examples = sum(row["examples"] for row in tried)
        facts = (kernel, device, f"{package} {environment[package]}", day, f"{examples:,}")
        rows[kernel, device] = (*facts, *(worst(tried, law) for law in laws()))
    return rows


def worst(rows: Iterable[Mapping[str, Any]], law: str) -> str:
    """Return the mark of the worst verdict on a law at any dtype; a law that does not apply is not claimed."""
    marks = [row["mark"] for row in rows if row["property"] == law]
    return MARKS[min(marks, key=list(MARKS).index, default="not claimed")].character


def reasons(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return why public kernels were not run, by the name of the kernel; what is said in brackets is left out."""
    found = (line.removeprefix("kernel ").partition(": ") for line in summary["not_run"])
    told = {name.strip("'"): reason.partition(" (")[0] for name, _, reason in found}
    return {name: reason for name, reason in told.items() if name in PUBLIC}


def laws() -> list[str]:
    """Return the names of the laws in the order of the columns."""
    return sorted(LAWS, key=by_place)


def head() -> tuple[str, ...]:
    """Return the names of the columns."""
    return ("kernel", "device", "package", "date", "examples", *laws())


def told(rows: Rows) -> str:
    """Return the table and its legend. A kernel that ran somewhere has no row that says it did not."""
    ran = {kernel for kernel, device in rows if device != NOT_RUN}
    shown = [rows[key] for key in sorted(rows, key=_place) if key[1] != NOT_RUN or key[0] not in ran]
    columns = head()
    lines = [columns, ("---",) * len(columns), *((f"`{row[0]}`", *row[1:]) for row in shown)]
    filled = ((*line, *("",) * (len(columns) - len(line))) for line in lines)
    legend = ", ".join(f"`{mark.character}` {mark.meaning}" for mark in MARKS.values())
    return "\n".join([*(f"| {' | '.join(line)} |" for line in filled), "", f"{legend}."])


def _place(key: tuple[str, str]) -> tuple[int, str]:
    """Return what rows are sorted by: the place of the kernel among all public ones, then the device."""
    kernel, device = key
    return list(PUBLIC).index(kernel) if kernel in PUBLIC else len(PUBLIC), device


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as e:
        sys.exit(f"ERROR: {e}")
