"""What is told of memory that a kernel has no business in: outside of a tensor, or never written."""

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.harness.verdict import BEFORE_THE_BEGINNING, FRAME, NUMBERS, PAST_THE_END, Finding

VERBS = {"load": "reads", "unwritten": "reads", "store": "writes", "atomic": "changes"}
UNWRITTEN = "{place} reads numbers of {operand} that nobody has written, though no result shows it{text}"
"""What is told of a kernel that reads fresh memory: as it may not use the numbers, it breaks no law."""


@dataclass(frozen=True, kw_only=True)
class Touched:
    """An access of a kernel outside of a tensor, which was not made, or a load of what nobody has written.

    Attributes:
        kind: "load", "store", "atomic" or "unwritten".
        operand: the parameter that the pointer comes from.
        index: the element that was meant, counted from the first one of the tensor.
        elements: those that may be touched, counted in the same way: the tensor may lie in a larger storage.
        shape: that of the tensor; None if the pointer is to one of several.
        nearest: where the element is, by the tensor of the launch that is nearest to it.
        program: the number of the first program that does it.
        frames: file and line of the access, then of the call of the function that it is in, and so on.
    """

    kind: str
    operand: str
    index: int
    elements: range
    shape: tuple[int, ...] | None
    nearest: str
    program: int
    frames: tuple[tuple[str, int], ...]

    @property
    def is_outside(self) -> bool:
        """Whether it is outside of the tensor's storage."""
        return self.index not in self.elements

    @property
    def is_before(self) -> bool:
        """Whether it is before the beginning of the tensor's storage, not past its end."""
        return self.index < self.elements.start

    @property
    def claim(self) -> str:
        """Return the sentence that is false, with the line of the kernel."""
        rule = BEFORE_THE_BEGINNING if self.is_before else PAST_THE_END
        place, text = self._place()
        return f"{rule}, but {place} {VERBS[self.kind]} {self.operand} there{text}"

    @property
    def note(self) -> str:
        """Return what is told of a load of what nobody has written."""
        place, text = self._place()
        return UNWRITTEN.format(place=place, operand=self.operand, text=text)

    @property
    def line(self) -> int:
        """Which frame is told: the innermost one in the kernel's own file, as others have what kernels share."""
        return next(i for i, (path, _) in enumerate(self.frames) if path == self.frames[-1][0])

    def _place(self) -> tuple[str, str]:
        """Return the line in the kernel's source, and its text after a colon, if it is known."""
        return _told(*self.frames[self.line]) if self.frames else ("a kernel", "")

    @property
    def detail(self) -> str:
        """Return which element it is, and where in the source, like a traceback."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        shape = "" if self.shape is None else f" of shape {self.shape}"
        yield f"program {self.program} {VERBS[self.kind]} element {self.index} of {self.operand}{shape}"
        known = f"{self.elements.start} to {self.elements.stop - 1}" if self.elements else "none"
        yield f"elements in memory: {known}; this one is {self.nearest}"
        for number, (path, line) in reversed([*enumerate(self.frames)]):
            if number < self.line:
                yield "  in {}{}".format(*_told(path, line))
            else:
                yield f'  {FRAME}{path}", line {line}'
                yield f"    {linecache.getline(path, line).strip()}"


def _told(path: str, line: int) -> tuple[str, str]:
    """Return the name of a file with a line, and the text of the line after a colon, if it can be read."""
    text = linecache.getline(path, line).strip()
    return f"{Path(path).name}:{line}", f": {text}" if text else ""


def with_accesses(finding: Finding, touched: Sequence[Touched]) -> Finding:
    """Return a finding of wrong numbers with where the kernel has read or written outside of a tensor, if it has."""
    if not touched or finding.kind not in NUMBERS:
        return finding
    return replace(finding, detail=f"{touched[0].claim}\n{touched[0].detail}")
