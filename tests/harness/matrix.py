"""The verdicts of a run on one screen: kernels by properties, with a mark for each dtype in the cell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Paint = Callable[..., str]
"""Colours a text, as ``TerminalWriter.markup`` does: ``paint("X", red=True)``."""

FEW = 3
"""Up to so many kernels stand side by side above the properties; of more, each has a row of its own."""
LONGEST_NAME = 20
"""Characters of a name at the left of the matrix; of a longer one the middle is left out."""


@dataclass(frozen=True)
class Mark:
    """How a verdict is shown: one character, its meaning in the legend, and its colour."""

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
"""The verdicts, the worst first."""


def matrix(
    kernels: Sequence[str],
    laws: Sequence[str],
    dtypes: Sequence[str],
    verdict: Callable[[str, str, str], str],
    paint: Paint,
) -> list[str]:
    """A line for each kernel below a staircase of the laws' names, or for few kernels the other way round.

    Args:
        kernels: their names, in the order in which they are shown.
        laws: likewise.
        dtypes: what the marks of a cell stand for.
        verdict: the key of ``MARKS`` for a kernel, a law and a dtype.
        paint: colours a mark.
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
    """The rows, and above them the name of each column on a line of its own: no name has to be cut to fit."""
    margin = min(max(map(len, rows)), LONGEST_NAME) + 1
    step = "|".ljust(width + 1)
    stairs = [" " * margin + step * place + name for place, name in enumerate(columns)]
    return [*stairs, *(_fitted(name).ljust(margin) + " ".join(cells) for name, cells in rows.items())]


def _fitted(name: str) -> str:
    """A name without its middle, if it is too long: kernels of one module differ in their ends."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME // 2 - 2]}..{name[-LONGEST_NAME // 2 :]}"


def _legend(shown: set[str], paint: Paint) -> str:
    """What the marks mean that are in the matrix."""
    marks = [mark for verdict, mark in MARKS.items() if verdict in shown]
    return "   ".join(f"{paint(mark.character, **mark.colour)} {mark.meaning}" for mark in marks)
