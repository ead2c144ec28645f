"""Tables as lines of text without borders, which can be copied into an issue."""

from collections.abc import Iterable, Sequence

import pytest

Row = Sequence[str]
Table = tuple[Row, Sequence[Row]]
"""The names of the columns, and the rows."""


def table(columns: Row, rows: Iterable[Row]) -> list[str]:
    """Return the names of the columns as a line and then each row as a line, with the columns aligned to the left."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return [
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def print_table(reporter: pytest.TerminalReporter, columns: Row, rows: Iterable[Row]) -> None:
    """Write an empty line and a table to pytest's terminal."""
    head, *body = table(columns, rows)
    reporter.write_line("")
    reporter.write_line(head, bold=True)
    for line in body:
        reporter.write_line(line)
