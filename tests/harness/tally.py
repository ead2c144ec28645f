"""Counts of what was tried, which can be merged over examples, items and processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from strategies.case import TENSORS, Case
from tests.harness.verdict import Verdict

BINS = 1000
"""Resolution of the distribution of error over bound, on [0, 1]."""

MOST_REASONS = 10
"""How many different reasons for refusals are kept, since they may name the sizes of each case."""

MOST_CASES = 100
"""How many different cases are kept of those refused in an item, and of those answered."""

CASES = ("refused_cases", "answered_cases")
"""The fields of a tally that hold cases."""


@dataclass
class Tally:
    """What happened to one kernel under one law.

    ``examples`` are the drawn cases that came to a verdict, ``broken`` those of them that broke the law; ``refusals``
    and ``skipped`` are the others, with ``reasons``. ``known`` cases meet a known failure, ``set_aside`` ones a bug
    found in this run; ``moved`` counts those of both that were run with other values of the fields concerned, and are
    examples. ``undrawn`` are those for which the time was up.
    ``worst``, ``worst_tensor`` and ``worst_case`` are the largest error over bound of any example that held;
    ``histogram`` counts examples by that ratio, for each tensor, and ``largest`` is its largest; ``seconds``
    splits the time into "kernel", "check" and "tensors" (in the child) and "total" (drawing included).
    ``judged`` and ``idle`` count, for each tensor, the examples in which it was held to its bounds, and those of them
    that test nothing of it; ``designs`` counts them by the member of a family that explained them.
    ``refused_cases`` and ``answered_cases`` are some of the cases, without their numbers, which no claim is about.
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
        """The number of all cases that were drawn."""
        return self.examples + self.refusals + self.skipped + self.known + self.set_aside

    def add(self, verdict: Verdict, case: Case) -> None:
        """Count one case."""
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
        """Add seconds by what they were spent on."""
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
    """Add the case without its numbers, if there is room and it is not kept yet."""
    if len(cases) < MOST_CASES:
        numbers: dict[str, Any] = {f"{tensor}_values": "normal" for tensor in TENSORS}
        plain = replace(case, seed=0, spikes=(), **numbers)
        if plain not in cases:
            cases.append(plain)


def _to_fields(case: Case) -> dict[str, Any]:
    return {f.name: value for f in fields(case) if (value := getattr(case, f.name)) != f.default}


def _from_fields(changed: dict[str, Any]) -> Case:
    return Case(**{**changed, "launch": tuple(map(tuple, changed.get("launch", ())))})
