"""Tables as lines of text without borders, which can be copied into an issue."""

from collections.abc import Callable, Iterable, Sequence

Row = Sequence[str]
WriteLine = Callable[..., object]
"""A function that writes a line, such as ``TerminalWriter.line``: ``write("text", bold=True)``."""
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


def print_table(write: WriteLine, columns: Row, rows: Iterable[Row]) -> None:
    """Write an empty line and a table."""
    head, *body = table(columns, rows)
    write("")
    write(head, bold=True)
    for line in body:
        write(line)
