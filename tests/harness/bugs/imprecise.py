"""Calls that are less precise than claimed. If one claim explains them all, they are a single finding of the kernel."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reference.family import AND, concerns
from strategies.case import Case, from_json, to_json
from tests.harness.bugs.bug import Bug
from tests.harness.verdict import Finding, in_ulps

MOST_CASES = 20
"""How many calls of an item are remembered."""


@dataclass(frozen=True)
class ImpreciseCall:
    """A call that broke its bounds. Each claim of ``explained_by`` would explain it; some of these are ``likely``."""

    law: str
    case: Case
    tensor: str
    explained_by: tuple[str, ...]
    ulps: float
    ratio: float
    likely: tuple[str, ...] = ()

    @classmethod
    def of(cls, law: str, case: Case, finding: Finding) -> "ImpreciseCall":
        """Make a record of a call from what a law has found."""
        ulps, ratio = (float(x or 0.0) for x in (finding.ulps, finding.ratio))
        return cls(law, case, finding.tensor, finding.explained_by, ulps, ratio, finding.likely)

    def is_of(self, bug: Bug) -> bool:
        """Whether a bug explains the call: the case meets all its conditions, and it makes the tensor wrong.

        Gradients follow from a wrong out. But a bug without conditions makes out wrong in every case, so that no run
        shows whether gradients are less precise for another reason; it does not explain them.
        """
        spoiled = bug.may_spoil if bug.needs else bug.may_make_wrong
        return self.tensor in spoiled and bug.is_met(self.case)


@dataclass
class Imprecise:
    """The less precise calls of an item or a kernel: their largest errors and, by dtype, what explains all of them.

    ``votes`` count, for each claim, the calls of which it is likely.
    """

    claims: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    ulps: dict[str, float] = field(default_factory=dict)
    calls: list[ImpreciseCall] = field(default_factory=list)
    votes: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of calls."""
        return sum(self.counts.values())

    @property
    def common(self) -> list[str]:
        """Return the claims each of which alone explains every call, the one that is likely for most calls first."""
        found = list(self.claims.values())
        common = [claim for claim in (found[0] if found else ()) if all(claim in others for others in found)]
        return sorted(common, key=lambda claim: -self.votes.get(claim, 0))

    @property
    def may_be_meant(self) -> bool:
        """Whether, in each dtype, some claim explains every call: a kernel has one design in a dtype."""
        return all(self.claims.values())

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the likeliest claim that explains every call, or both claims of a pair; none if no claim does."""
        return tuple(self.common[0].split(AND)) if self.common else ()

    def are_of(self, bugs: Sequence[Bug]) -> bool:
        """Whether each remembered call is explained by one of these bugs."""
        return all(any(map(call.is_of, bugs)) for call in self.calls)

    def shows(self, bug: Bug) -> bool:
        """Whether a bug explains at least one remembered call."""
        return any(call.is_of(bug) for call in self.calls)

    def explains_also(self, call: ImpreciseCall) -> bool:
        """Whether some claim explains this call and all earlier ones."""
        return not self.total or any(claim in call.explained_by for claim in self.common)

    def add(self, call: ImpreciseCall) -> None:
        """Remember a call."""
        self.merge(replace(Imprecise.told_by(call), counts={call.case.dtype: 1}, calls=[call]))

    @classmethod
    def told_by(cls, call: ImpreciseCall) -> "Imprecise":
        """Return what a call says about which claims explain all calls, without counting it."""
        dtype, votes = call.case.dtype, dict.fromkeys(call.likely, 1)
        return cls({dtype: list(call.explained_by)}, {dtype: 0}, {call.tensor: call.ulps}, votes=votes)

    def merge(self, other: "Imprecise") -> None:
        """Add the calls of another item or process."""
        for dtype, claims in other.claims.items():
            known = self.claims.get(dtype, claims)
            self.claims[dtype] = [claim for claim in known if claim in claims]
            self.counts[dtype] = self.counts.get(dtype, 0) + other.counts[dtype]
        for tensor, ulps in other.ulps.items():
            self.ulps[tensor] = max(self.ulps.get(tensor, 0.0), ulps)
        for claim, votes in other.votes.items():
            self.votes[claim] = self.votes.get(claim, 0) + votes
        self.calls += other.calls[: MOST_CASES - len(self.calls)]

    def to_dict(self) -> dict[str, Any]:
        """Return a record for JSON."""
        calls = [[call.law, to_json(call.case), call.tensor, call.ulps, call.ratio] for call in self.calls]
        counts = {"counts": self.counts, "ulps": self.ulps, "votes": self.votes}
        return {"claims": self.claims, **counts, "calls": calls}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Imprecise":
        """Make the calls from what ``to_dict`` returned, also after JSON."""
        calls = [
            ImpreciseCall(law, from_json(case), tensor, (), ulps, ratio)
            for law, case, tensor, ulps, ratio in fields["calls"]
        ]
        return cls(fields["claims"], fields["counts"], fields["ulps"], calls, fields.get("votes", {}))


def sentence(imprecise: Imprecise, claimed: Iterable[str]) -> str:
    """Return the finding as one line; ``claimed`` are the dtypes of which examples were run.

    It offers the likeliest claim, and names others that explain all calls and are as likely. A claim has a dtype before
    it, such as ``float16:``, if calls in other dtypes do without. If no claim explains all calls, the line says so.
    """
    tensor = max(imprecise.ulps, key=lambda name: imprecise.ulps[name])
    ulps = imprecise.ulps[tensor]
    worst = f"{tensor} {'up to ' * math.isfinite(ulps)}{in_ulps(ulps)}"
    common = imprecise.common
    if not common:
        if imprecise.may_be_meant:
            what = f"{imprecise.total} calls are less precise than FlashAttention-2, {worst}"
            return f"{what}; no one claim explains those of all dtypes"
        what = f"{imprecise.total} calls are wrong, {worst}"
        return f"{what}: a less precise design would explain each by itself, but none explains all of them"
    claim, needed = common[0], imprecise.needed
    dtypes = sorted(imprecise.claims)
    without = {dtype for dtype in claimed if concerns(claim, dtype)} - set(dtypes)
    prefixes = [f"{dtype}:" for dtype in dtypes] if without else [""]
    options = " ".join(f"--claims {prefix}{part}" for part in needed for prefix in prefixes)
    name = "` with `".join(part.removesuffix("=true") for part in needed)
    as_likely = [x for x in common[1:] if imprecise.votes.get(x, 0) == imprecise.votes.get(claim, 0)]
    others = f" (or {' or '.join(as_likely)})" if as_likely else ""
    what = f"consistent with `{name}`{others}: less precise than FlashAttention-2, {worst}"
    return f"{what}; if that is meant, `{options}`"
