"""Tables as lines of text without borders, which can be copied into an issue."""

from collections.abc import Iterable, Sequence

import pytest

Row = Sequence[str]


def table(columns: Row, rows: Iterable[Row]) -> list[str]:
    """The names of the columns and, below them, each row as one line, with the columns aligned to the left."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return [
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def print_table(reporter: pytest.TerminalReporter, columns: Row, rows: Iterable[Row]) -> None:
    """Write a table to pytest's terminal, an empty line below what is there."""
    head, *body = table(columns, rows)
    reporter.write_line("")
    reporter.write_line(head, bold=True)
    for line in body:
        reporter.write_line(line)
