"""``index.html``: the results of a run as one page that needs neither a network nor a script to be read."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.contract import DTYPES, OUTPUTS
from strategies.case import TENSORS
from strategies.features import LENGTHS
from tests.harness.files import write_whole
from tests.harness.law import by_place
from tests.harness.report.changes import Row, Summary, changes
from tests.harness.report.folder import PICTURE
from tests.harness.report.screen import LEFT_OUT, MARKS
from tests.harness.running.exits import SCRIPT

if TYPE_CHECKING:
    from jinja2 import Template

PAGE = "index.html"
"""The file, within the report directory."""
LINKED = ("report.md", SCRIPT, "case.json")
"""The files of a report that the page links to."""
EMPTIEST = 8
"""The most cells with the fewest examples that are named, beside those that were never drawn."""
WIDTH, HEIGHT = 100, 20
"""The size of a histogram, in units of its own."""

FEW = 1 / 4
"""A cell with less than this share of the mean of its field's cells is one of few examples."""
LAST = "tile - 1"
"""The column of lengths that lack one row to whole tiles."""

Cells = Mapping[str, tuple[int, str]]
"""For each value of a field its examples, and whether these are "some", "few", or "never" any."""


def write_page(report_dir: Path, now: Summary, before: Summary | None) -> None:
    """Write the page beside summary.json. Raises OSError."""
    write_whole(report_dir / PAGE, page(now, report_dir, before))


def page(now: Summary, report_dir: Path, before: Summary | None = None) -> str:
    """Return the page as HTML, in ASCII so that it can be written and read in any encoding.

    Args:
        now: the content of summary.json.
        report_dir: the folder of the reports, whose pictures are put into the page.
        before: the content of summary.json of the night before, to compare with; None if there is none.
    """
    text = template().render(
        now=now,
        before=before,
        verdict=verdict(now),
        changes=changes(now, before) if before else None,
        kernels=[kernel(name, now, before) for name in now["coverage"]],
        files=[files(report_dir / row["folder"]) for row in now["bugs"]],
        marks=MARKS,
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()


@cache
def template() -> "Template":
    """Return the template, which escapes all that is put into it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here, as most processes write no page

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def verdict(now: Summary) -> tuple[str, str]:
    """Return how the run ended, "good", "bad" or "unclear", and that in words."""
    bugs, status = len(now["bugs"]), now["run"]["exit"]
    if bugs:
        return "bad", f"{bugs} bug{'s' * (bugs > 1)}"
    if now["complaints"] or now["less_precise"]:
        return "bad", "No bug, but claims that do not hold"
    if status is None:
        return "unclear", "No bug so far: the run has not ended"
    if not total(now):
        return "unclear", "Nothing was tried"
    if now["unjudged"]:
        return "unclear", "No bug, but what matters most was not tried"
    if status:
        return "unclear", f"No bug, but exit status {status}: the log of the run says why"
    if now["not_tried"]:
        return "unclear", "No bug, but laws that were not tried"
    return "good", "Every law held"


def total(summary: Summary | None, **names: str) -> int | None:
    """Return the examples of all rows of a summary that have these names; None if it has no such row."""
    rows = [row for row in (summary or {"results": []})["results"] if names.items() <= row.items()]
    return sum(row["examples"] for row in rows) if rows else None


def kernel(name: str, now: Summary, before: Summary | None) -> dict[str, Any]:
    """Return what the page shows of a kernel."""
    rows = [row for row in now["results"] if row["kernel"] == name]
    coverage = now["coverage"][name]
    counts = {f"{field}={value}": n for field, values in coverage.items() for value, n in values.items()}
    return {
        "name": name,
        **now["kernels"][name],
        "examples": total(now, kernel=name),
        "before": total(before, kernel=name),
        **marked(name, rows, now),
        "bugs": sum(bug["kernel"] == name for bug in now["bugs"]),
        "dtypes": [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)],
        "laws": {
            law: laws(rows, law)
            for law in sorted(dict.fromkeys(row["property"] for row in rows), key=by_place)
        },
        "notes": list(notes(name, rows, now)),
        "cells": len(counts),
        "never": [cell for cell, n in counts.items() if not n],
        "emptiest": sorted((n, cell) for cell, n in counts.items() if n)[:EMPTIEST],
        "tables": list(tables(coverage)),
        "errors": [{**row, "bars": bars(row["histogram"])} for row in errors(name, now)],
    }


def marked(name: str, rows: Sequence[Row], now: Summary) -> dict[str, str]:
    """Return the worst mark of a kernel and its verdict in words: it has plainly held if each law was tried."""
    mark = min((row["mark"] for row in rows), key=list(MARKS).index)
    if mark != "held":
        return {"mark": mark, "verdict": mark}
    if now["run"]["exit"] is None:
        return {"mark": "not tried", "verdict": "held so far"}
    is_partial = name in now["not_tried"]
    return (
        {"mark": "not tried", "verdict": "held, not all tried"}
        if is_partial
        else {"mark": mark, "verdict": mark}
    )


def errors(name: str, now: Summary) -> list[Row]:
    """Return the rows on error over bound of a kernel, in the order of dtypes and tensors that the rest of it has."""
    rows = [row for row in now["error_over_bound"] if row["kernel"] == name]
    return sorted(rows, key=lambda row: (DTYPES.index(row["dtype"]), OUTPUTS.index(row["tensor"])))


def notes(name: str, rows: Sequence[Row], now: Summary) -> Iterator[str]:
    """Yield what is told of a kernel in words: what does not hold, designs, what was not tried, cases left out."""
    if name in now["less_precise"]:
        yield now["less_precise"][name]
    if name in now["consistent_with"]:
        yield f"consistent with: {now['consistent_with'][name]}"
    if name in now["not_tried"]:
        yield f"not tried: {now['not_tried'][name]}"
    yield from (f"known failure: {known}" for known in now["kernels"][name]["known_failures"])
    for label, field in LEFT_OUT.items():
        if cases := sum(row[field] for row in rows):
            yield f"{label}: {cases} cases"


def laws(rows: Sequence[Row], law: str) -> dict[str, Row]:
    """Return the rows of a law by dtype."""
    return {row["dtype"]: row for row in rows if row["property"] == law}


def bars(histogram: Sequence[int]) -> str:
    """Return a histogram as the path of an SVG of ``WIDTH`` by ``HEIGHT``; any bar that is not empty can be seen."""
    width, highest = WIDTH / len(histogram), max(histogram)
    return "".join(
        f"M{at * width:g} {HEIGHT}h{width:g}v{-max(1.0, HEIGHT * count / highest):.2f}h{-width:g}z"
        for at, count in enumerate(histogram)
        if count
    )


def files(folder: Path) -> dict[str, Any]:
    """Return the files of a report that are there to be linked to, and its picture as a data URL."""
    picture = folder / PICTURE
    encoded = b64encode(picture.read_bytes()).decode() if picture.is_file() else ""
    return {
        "linked": [name for name in LINKED if (folder / name).is_file()],
        "picture": f"data:image/png;base64,{encoded}" if encoded else "",
    }


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and the cells of each row by column; not every column has one."""

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Cells]


def tables(coverage: Mapping[str, Mapping[str, int]]) -> Iterator[Table]:
    """Yield the tables of a kernel: remainders of lengths, then what each tensor has, then a row for any other field.

    ``coverage`` has the examples of each value by field, as summary.json has them for a kernel.
    """
    left = {field: compared(examples) for field, examples in coverage.items()}
    for length in LENGTHS:
        tiles = [field for field in left if field.startswith(f"{length} mod ")]
        yield Table(
            f"{length} modulo tile", ("0", "1", LAST, "other"), dict(of_tile(x, left.pop(x)) for x in tiles)
        )
    for what in ("layout", "values"):
        of_tensor = {x: left.pop(f"{x}_{what}") for x in TENSORS if f"{x}_{what}" in left}
        names = dict.fromkeys(name for cells in of_tensor.values() for name in cells)
        rows = {name: {x: cells[name] for x, cells in of_tensor.items() if name in cells} for name in names}
        yield Table(what, list(of_tensor), rows)
    for field, cells in left.items():
        yield Table(field, list(cells), {"": cells})


def of_tile(field: str, cells: Cells) -> tuple[str, Cells]:
    """Return a field of remainders as a row: the length of the tile, and the cells by column."""
    tile = field.rpartition(" ")[2]
    return tile, {LAST if left == str(int(tile) - 1) else left: cell for left, cell in cells.items()}


def compared(examples: Mapping[str, int]) -> Cells:
    """Say of the examples of each value of a field how they compare with those of the others."""
    few = FEW * sum(examples.values()) / len(examples)
    return {value: (n, "never" if not n else "few" if n < few else "some") for value, n in examples.items()}
