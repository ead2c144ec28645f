"""Steer drawn cases away from known failures and bugs, to nearby cases that can show something new."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernels.contract import LAYOUTS, Capabilities, KnownFailure
from strategies.case import LAYOUT_FIELDS, OPTIONS, SIMPLEST, Case
from strategies.features import with_value
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.counterfactuals import counterfactuals
from tests.harness.kernel_record import meets

IN_ORDER = (
    *LAYOUT_FIELDS,
    *(name for name in OPTIONS if name != "causal"),
    *("group", "heads_kv", "batch", "causal", "head_dim", "seqlen_q", "seqlen_k"),
)
"""The fields of a known failure that are changed, in this order: first those that matter least for what the case tests.
"""

SMALL_LENGTHS = range(1, 513)
"""The lengths that are tried to find one outside of a known failure."""

MOST_STEPS = 8
"""The most fields that are changed in one case, since a change may lead from one known failure to another."""


@dataclass(frozen=True)
class Avoided:
    """What cases of a law keep clear of: known failures, and bugs that were found in this run."""

    known: tuple[KnownFailure, ...]
    bugs: tuple[Bug, ...] = ()

    def is_met(self, case: Case) -> bool:
        """Whether a case falls under a known failure, or may show a bug, that is to be avoided."""
        return any(meets(case, known) for known in self.known) or any(
            may_show(bug, case) for bug in self.bugs
        )

    def exits(self, case: Case, capabilities: Capabilities) -> Iterator[Case]:
        """Yield variants of the case, one field changed, that avoid the first known failure or bug it would hit."""
        for known in self.known:
            if meets(case, known):
                return (yield from _out_of(known, case, capabilities))
        for bug in self.bugs:
            if may_show(bug, case):
                return (yield from _away_from(bug, case, capabilities))
        return None


def steer_away(case: Case, closed: Avoided, capabilities: Capabilities) -> Case | None:
    """Return the case, or a claimed one of its dtype nearby, that hits nothing to be avoided; None if there is none."""
    for _ in range(MOST_STEPS):
        if not closed.is_met(case):
            return case
        found = next(closed.exits(case, capabilities), None)
        if found is None:
            return None
        case = found
    return None


def _out_of(known: KnownFailure, case: Case, capabilities: Capabilities) -> Iterator[Case]:
    for name in (name for name in IN_ORDER if name in known.where):
        for value in _values(name, case, capabilities):
            changed = with_value(case, name, value)
            if value not in known.where[name] and capabilities.admits(changed):
                yield changed


def _values(name: str, case: Case, capabilities: Capabilities) -> Iterable[Any]:
    """Return other values of a field, the simplest first; of a size, the nearest first."""
    own = getattr(case, name)
    if name in LAYOUT_FIELDS:
        return [x for x in LAYOUTS if x != "huge"]
    if name in ("head_dim", "seqlen_q", "seqlen_k"):
        allowed = capabilities.head_dims if name == "head_dim" else SMALL_LENGTHS
        return sorted(allowed, key=lambda value: abs(value - own))
    return OPTIONS.get(name, (SIMPLEST[name],))


def _away_from(bug: Bug, case: Case, capabilities: Capabilities) -> Iterator[Case]:
    # Which condition is changed first depends on the case. If all cases lost the same one, say their causal mask, no
    # case would be left to show another bug of causal masks.
    first = case.seed % len(bug.needs) if bug.needs else 0
    for need in (*bug.needs[first:], *bug.needs[:first]):
        for changed in counterfactuals(need, case, capabilities):
            if not may_show(bug, changed):
                yield changed


def may_show(bug: Bug, case: Case) -> bool:
    """Whether a case meets all known conditions of a bug, so that it may show it.

    A bug that needs special numbers, and was seen without NaN, does not count in a case with NaN: a NaN is no such
    number, and may show another bug.
    """
    has_others = bug.needs_numbers and bug.lacks_nan_of(case)
    return not has_others and bug.is_met(case) and bug.is_of_scores_in(case)
