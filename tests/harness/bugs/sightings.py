"""Where a bug showed: how often under which law, and in which cases."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strategies.case import Case, from_json, to_json

MOST_CASES = 200
"""The most failing cases of a bug that are kept, so that other claims can be tried on them."""


@dataclass
class Sightings:
    """Where a bug showed: the number of failing examples by law, dtype and worst tensor, and some of their cases.

    A sighting is a law that fails on a case as it was drawn. Smaller cases tried while shrinking do not count; they are
    in ``shrunk``, because a claim under which one of them fails is not true.
    """

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    cases: list[tuple[str, Case]] = field(default_factory=list)
    shrunk: list[tuple[str, Case]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of examples that failed because of the bug."""
        return self.counts.total()

    def add(self, law: str, case: Case, tensor: str) -> None:
        """Count one failing example."""
        self.counts[law, case.dtype, tensor] += 1
        _keep([(law, case)], self.cases)

    def keep(self, cases: Iterable[tuple[str, Case]]) -> None:
        """Keep failing cases that were met while one was shrunk."""
        _keep(cases, self.shrunk)

    def merge(self, other: "Sightings") -> None:
        """Add the sightings of another item or process."""
        self.counts.update(other.counts)
        _keep(other.cases, self.cases)
        _keep(other.shrunk, self.shrunk)

    def names(self, place: int) -> tuple[str, ...]:
        """Return the laws (place 0), dtypes (1) or tensors (2), the one with the most failures first."""
        counts = Counter(key[place] for key in self.counts.elements() if key[place])
        return tuple(sorted(counts, key=lambda name: (-counts[name], name)))

    def to_dict(self) -> dict[str, Any]:
        """Return a record for JSON."""
        return {
            "counts": [[*key, count] for key, count in self.counts.items()],
            "cases": [[law, to_json(case)] for law, case in self.cases],
            "shrunk": [[law, to_json(case)] for law, case in self.shrunk],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Sightings":
        """Make sightings from what ``to_dict`` returned, also after JSON."""
        counts = Counter({(law, dtype, tensor): count for law, dtype, tensor, count in fields["counts"]})
        cases, shrunk = (
            [(law, from_json(case)) for law, case in fields[name]] for name in ("cases", "shrunk")
        )
        return cls(counts, cases, shrunk)


def _keep(cases: Iterable[tuple[str, Case]], kept: list[tuple[str, Case]]) -> None:
    """Add cases to those that are kept, up to ``MOST_CASES``."""
    for case in cases:
        if len(kept) < MOST_CASES and case not in kept:
            kept.append(case)
