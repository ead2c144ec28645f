"""Counts of the cases that were tried. Those of several items and processes can be merged into one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from strategies.case import TENSORS, Case
from tests.harness.verdict import Verdict

BINS = 1000
"""The number of bins of a histogram of error over bound, which range from 0 to 1."""

MOST_REASONS = 10
"""The most different reasons for refusals that are kept: if they name the sizes of a case, each case has its own."""

MOST_CASES = 100
"""The most different cases that an item keeps of those that were refused, and of those that were answered."""

CASES = ("refused_cases", "answered_cases")
"""The fields of a tally that hold cases."""


@dataclass
class Tally:
    """Counts for one kernel, law and dtype.

    Attributes:
        examples: the number of drawn cases for which the law held or was broken.
        broken: the number of examples that broke the law.
        refusals: the number of cases that the kernel refused.
        skipped: the number of cases that could not be run on this machine.
        known: the number of drawn cases that meet a known failure of the kernel, so that they were not run as drawn.
        set_aside: the number of other drawn cases that meet a bug found in this run, and were not run as drawn.
        moved: how many of both were run with other values of some fields instead, and count among the others as well.
        undrawn: the number of cases that were not drawn because the time was up.
        worst, worst_tensor, worst_case: the largest error over bound in any example that held.
        seconds: the time spent on "kernel", "check" and "tensors" in the child, and in "total", with the drawing.
        histogram: for each tensor, the number of examples by bin of their largest error over bound.
        largest: for each tensor, the largest error over bound.
        reasons: how often the kernel gave each reason for a refusal, or a case for being skipped.
        judged: for each tensor, the number of examples in which it was held to its bounds.
        idle: for each tensor, how many of these test nothing of it, because an answer of 0 would hold.
        designs: the number of examples that each member of a family of designs explained.
        refused_cases, answered_cases: some of the cases, with plain numbers, since no claim is about numbers.
    """

    examples: int = 0
    broken: int = 0
    refusals: int = 0
    skipped: int = 0
    known: int = 0
    set_aside: int = 0
    moved: int = 0
    undrawn: int = 0
    worst: float = 0.0
    worst_tensor: str = ""
    worst_case: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    histogram: dict[str, dict[int, int]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    judged: dict[str, int] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)
    designs: dict[str, int] = field(default_factory=dict)
    refused_cases: list[Case] = field(default_factory=list)
    answered_cases: list[Case] = field(default_factory=list)

    @property
    def drawn(self) -> int:
        """The number of cases that were drawn, among which cases that were moved count twice."""
        return self.examples + self.refusals + self.skipped + self.known + self.set_aside

    def add(self, verdict: Verdict, case: Case) -> None:
        """Count one case by its verdict."""
        self.add_seconds(verdict.seconds)
        if verdict.reason in self.reasons or (verdict.reason and len(self.reasons) < MOST_REASONS):
            self.reasons[verdict.reason] = self.reasons.get(verdict.reason, 0) + 1
        if verdict.status == "refused":
            self.refusals += 1
            _keep(case, self.refused_cases)
        elif verdict.status == "skipped":
            self.skipped += 1
        else:
            self.examples += 1
            _keep(case, self.answered_cases)
            self.broken += verdict.status == "broken"
        _count(self.judged, dict.fromkeys(verdict.idle, 1))
        _count(self.idle, {tensor: int(idle) for tensor, idle in verdict.idle.items()})
        _count(self.designs, dict.fromkeys(verdict.designs, 1))
        for tensor, ratio in verdict.worst.items():
            bins = self.histogram.setdefault(tensor, {})
            at = min(int(ratio * BINS), BINS)
            bins[at] = bins.get(at, 0) + 1
            self.largest[tensor] = max(self.largest.get(tensor, 0.0), ratio)
            if ratio > self.worst:
                self.worst, self.worst_tensor, self.worst_case = ratio, tensor, repr(case)

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Add seconds to those spent on the same things before."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def merge(self, other: "Tally") -> None:
        """Add another tally to this one."""
        self.examples += other.examples
        self.broken += other.broken
        self.refusals += other.refusals
        self.skipped += other.skipped
        self.known += other.known
        self.set_aside += other.set_aside
        self.moved += other.moved
        self.undrawn += other.undrawn
        if other.worst > self.worst:
            self.worst, self.worst_tensor, self.worst_case = other.worst, other.worst_tensor, other.worst_case
        self.add_seconds(other.seconds)
        for tensor, bins in other.histogram.items():
            mine = self.histogram.setdefault(tensor, {})
            for at, count in bins.items():
                mine[int(at)] = mine.get(int(at), 0) + count
        for tensor, ratio in other.largest.items():
            self.largest[tensor] = max(self.largest.get(tensor, 0.0), ratio)
        for name in ("reasons", "judged", "idle", "designs"):
            _count(getattr(self, name), getattr(other, name))
        self.refused_cases = list(dict.fromkeys([*self.refused_cases, *other.refused_cases]))
        self.answered_cases = list(dict.fromkeys([*self.answered_cases, *other.answered_cases]))

    def quantile(self, tensor: str, share: float) -> float:
        """Return the ratio that ``share`` of a tensor's examples stay below, as the upper edge of its bin."""
        bins = self.histogram[tensor]
        left = share * sum(bins.values())
        for at in sorted(bins):
            left -= bins[at]
            if left <= 0:
                return (at + 1) / BINS
        return 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return a record for JSON; of the cases that are kept it has only the fields that are not the default."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**counts, **{name: list(map(_to_fields, counts[name])) for name in CASES}}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Tally":
        """Make a tally from what ``to_dict`` returned, also after JSON, which turns bins into strings."""
        kept = {name: list(map(_from_fields, fields[name])) for name in CASES}
        tally = cls()
        tally.merge(cls(**{**fields, **kept}))
        return tally


def _count(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Add counts to those of the same names."""
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def _keep(case: Case, cases: list[Case]) -> None:
    """Add the case with normal numbers to ``cases``, unless these have it already or are ``MOST_CASES``."""
    if len(cases) < MOST_CASES:
        numbers: dict[str, Any] = {f"{tensor}_values": "normal" for tensor in TENSORS}
        plain = replace(case, seed=0, spikes=(), **numbers)
        if plain not in cases:
            cases.append(plain)


def _to_fields(case: Case) -> dict[str, Any]:
    return {f.name: value for f in fields(case) if (value := getattr(case, f.name)) != f.default}


def _from_fields(changed: dict[str, Any]) -> Case:
    return Case(**{**changed, "launch": tuple(map(tuple, changed.get("launch", ())))})
