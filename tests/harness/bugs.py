"""Many failures, few bugs: failures that share kernel, law, tensor and the fields that matter are told once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.harness.report import Failure, headline


@dataclass(frozen=True)
class Bug:
    """A failure, as far as a run's summary tells of it.

    ``ratio`` is its error over bound, infinite where no number says how wrong it is; ``matters`` are the fields of its
    case that do; ``folder`` is that of its report.
    """

    kernel: str
    law: str
    tensor: str
    matters: tuple[str, ...]
    headline: str
    ratio: float
    folder: str

    @classmethod
    def of(cls, failure: Failure) -> "Bug":
        """What is told of a failure."""
        ratio = failure.finding.ratio
        return cls(
            kernel=failure.kernel,
            law=failure.law,
            tensor=failure.finding.tensor,
            matters=tuple(field.name for field in failure.explanation.fields if field.matters),
            headline=headline(failure),
            ratio=math.inf if ratio is None else float(ratio),
            folder=str(failure.folder),
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Bug":
        """Inverse of ``asdict``, after JSON too (which turns tuples into lists)."""
        return cls(**{**fields, "matters": tuple(fields["matters"])})


def distinct(bugs: Iterable[Bug]) -> list[list[Bug]]:
    """The failures of each bug, the worst first; the worst bug first."""
    groups: dict[tuple[str, str, str, tuple[str, ...]], list[Bug]] = {}
    for bug in bugs:
        groups.setdefault((bug.kernel, bug.law, bug.tensor, bug.matters), []).append(bug)
    ordered = [sorted(group, key=_severity) for group in groups.values()]
    return sorted(ordered, key=lambda group: _severity(group[0]))


def _severity(bug: Bug) -> tuple[float, str]:
    return -bug.ratio, bug.folder


def annotation(group: list[Bug]) -> str:
    """A line that GitHub Actions shows beside a run (workflow commands, in its documentation)."""
    worst = group[0]
    text = f"{len(group)} failures; matters: {', '.join(worst.matters) or 'nothing that was varied'}; {worst.folder}"
    return (
        f"::error title={_escaped(worst.headline).replace(':', '%3A').replace(',', '%2C')}::{_escaped(text)}"
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
