"""What a call of ``flashproof.verify`` returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.telling import bug_text

HELD = "held"
"""The status of a run of which nothing speaks against the kernel."""


@dataclass(frozen=True, repr=False)
class Bug:
    """A distinct bug: ``found`` is its entry in verdict.json, which ``docs/verdict.md`` describes.

    A notebook shows it as ``str`` tells it.
    """

    found: Mapping[str, Any]

    @property
    def headline(self) -> str:
        """The bug in one line."""
        return str(self.found["headline"])

    @property
    def certificate(self) -> str | None:
        """What the kernel computes instead, where that is certain; else None."""
        told: str | None = self.found["certificate"]
        return told

    @property
    def law(self) -> str:
        """The law that reports it."""
        return str(self.found["law"])

    @property
    def case(self) -> str:
        """The smallest case, as Python."""
        return str(self.found["case"])

    @property
    def report(self) -> Path:
        """The folder of its report."""
        return Path(self.found["report"])

    @property
    def replay(self) -> str:
        """A command that runs the case again."""
        return str(self.found["replay"])

    @property
    def text(self) -> str:
        """The text of its report, to paste into an issue. Raises OSError if the report has been deleted."""
        return (self.report / "report.md").read_text()

    def __str__(self) -> str:
        """Return its headline, and below it the facts that a failing test shows."""
        return bug_text(self.found)

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Result:
    """The verdict on one kernel: ``verdict`` is the content of verdict.json, which ``docs/verdict.md`` describes.

    A notebook shows it as ``str`` tells it. ``log`` is what ``flashproof verify`` printed for people.
    """

    verdict: Mapping[str, Any]
    log: str

    @property
    def status(self) -> str:
        """The status of the run, such as "held" or "broken"."""
        return str(self.verdict["status"])

    @property
    def held(self) -> bool:
        """Whether nothing speaks against the kernel, some law held, and ``forward`` was tried.

        What else was not tried is in ``coverage``.
        """
        return self.status == HELD

    @property
    def bugs(self) -> tuple[Bug, ...]:
        """Each distinct bug, the worst first."""
        return tuple(map(Bug, self.verdict["bugs"]))

    @property
    def less_precise(self) -> tuple[str, ...]:
        """What is less precise than claimed, in one line; else nothing."""
        return tuple(self.verdict["less_precise"].values())

    @property
    def coverage(self) -> Mapping[str, Any]:
        """What was tried of what the kernel claims."""
        found: Mapping[str, Any] = next(iter(self.verdict["coverage"].values()))
        return found

    @property
    def notes(self) -> Sequence[str]:
        """What a user must know besides, each in one line."""
        return tuple(self.verdict["notes"])

    @property
    def score(self) -> float:
        """The score, from 0 to 1."""
        return float(self.verdict["score"])

    @property
    def report_dir(self) -> Path:
        """The folder of all reports."""
        return Path(self.verdict["report_dir"])

    def check(self) -> None:
        """Raise AssertionError, with what speaks against the kernel, unless it held."""
        __tracebackhide__ = True  # pytest shows the line of the test, not this one
        if not self.held:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        """Return the status in one line, and below it each bug or other reason why the kernel has not held."""
        (name,), verdict = self.verdict["kernels"], self.verdict
        examples = verdict["kernels"][name]["examples"]
        first = (
            f"{name}: {self.status}, score {self.score:g}, "
            f"{examples} example{'s' * (examples != 1)} in {verdict['seconds']:.0f} s"
        )
        if self.held:
            return first
        bugs = [f"{number}. {bug}" for number, bug in enumerate(self.bugs, 1)]
        reasons = dict.fromkeys(row["reason"] for row in verdict["laws"] if row["reason"] and row["dtypes"])
        others = [*self.less_precise, *([] if bugs or self.less_precise else [*self.notes, *reasons])]
        return "\n\n".join([first, *bugs, *others])

    __repr__ = __str__
