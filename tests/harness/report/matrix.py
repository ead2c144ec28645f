"""The matrix of verdicts at the end of a run: kernels by laws, with one mark for each dtype in each cell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Paint = Callable[..., str]
"""A function that colours a text, such as ``TerminalWriter.markup``: ``paint("X", red=True)``."""

FEW = 3
"""Up to this many kernels are columns, and the laws are rows; with more, the kernels are rows and the laws columns."""
SCREEN = 80
"""The characters of a line."""
LONGEST_NAME = 20
"""The most characters of a name at the left of the matrix; a longer name loses its middle."""


@dataclass(frozen=True)
class Mark:
    """How the matrix shows a verdict: as one character, with a meaning for the legend, and in a colour."""

    character: str
    meaning: str
    colour: dict[str, Any]


MARKS = {
    "broken": Mark("X", "broken", {"red": True, "bold": True}),
    "less precise": Mark("~", "less precise than claimed", {"red": True}),
    "refused": Mark("r", "refused nearly all", {"red": True}),
    "known": Mark("k", "known failure", {"yellow": True}),
    "held": Mark("+", "held", {"green": True}),
    "not tried": Mark("?", "not tried", {"yellow": True}),
    "not claimed": Mark(".", "not claimed", {}),
}
"""The mark of each verdict, the worst first, which is the order of the legend."""


def matrix(
    kernels: Sequence[str],
    laws: Sequence[str],
    dtypes: Sequence[str],
    verdict: Callable[[str, str, str], str],
    paint: Paint,
) -> list[str]:
    """Return the lines of the matrix, its legend included.

    Each column's name stands on a line of its own above the rows, so the names form a staircase.

    Args:
        kernels: names of kernels, in the order in which they are shown.
        laws: names of laws, likewise.
        dtypes: names of dtypes, one for each mark of a cell.
        verdict: a function from the names of a kernel, a law and a dtype to a key of ``MARKS``.
        paint: a function that colours a mark.
    """
    shown = {verdict(kernel, law, dtype) for kernel in kernels for law in laws for dtype in dtypes}

    def cell(kernel: str, law: str) -> str:
        marks = [MARKS[verdict(kernel, law, dtype)] for dtype in dtypes]
        return "".join(paint(mark.character, **mark.colour) for mark in marks)

    if len(kernels) > FEW:
        rows = {name: [cell(name, law) for law in laws] for name in kernels}
        lines = _below_stairs(laws, rows, len(dtypes))
    else:
        rows = {law: [cell(name, law) for name in kernels] for law in laws}
        lines = _below_stairs(kernels, rows, len(dtypes))
    return [*lines, "", f"in each cell: {', '.join(dtypes)}", _legend(shown, paint)]


def _below_stairs(columns: Sequence[str], rows: dict[str, list[str]], width: int) -> list[str]:
    """Return the rows below the names of the columns, each on a line of its own, so that no name has to be cut."""
    margin = min(max(map(len, rows)), LONGEST_NAME) + 1
    step = "|".ljust(width + 1)
    stairs = [_stair(" " * margin + step * place, name) for place, name in enumerate(columns)]
    return [*stairs, *(_fitted(name).ljust(margin) + " ".join(cells) for name, cells in rows.items())]


def _stair(before: str, name: str) -> str:
    """Return the line of a column's name: right of its place or, where the screen is too narrow, left of its bar."""
    if len(before) + len(name) <= SCREEN:
        return before + name
    return f"{before[: -len(name) - 2]} {name} |"


def _fitted(name: str) -> str:
    """Return a name, without its middle if it is too long: the names of one module's kernels differ at their ends."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME // 2 - 2]}..{name[-LONGEST_NAME // 2 :]}"


def _legend(shown: set[str], paint: Paint) -> str:
    """Return the meanings of the marks that the matrix has."""
    marks = [mark for verdict, mark in MARKS.items() if verdict in shown]
    return "   ".join(f"{paint(mark.character, **mark.colour)} {mark.meaning}" for mark in marks)
