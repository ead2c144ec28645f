"""Which less precise design, if any, would explain a result that no design of full precision does."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from reference.family import less_precise
from tests.harness.trial import CannotRun, LawBroken, Refused, Trial
from tests.harness.verdict import Finding

NUMBERS = ("error", "nonfinite")
"""The kinds of a finding that another arithmetic may explain."""


def with_explanations(finding: Finding, trial: Trial | None, law: Callable[[Trial], None]) -> Finding:
    """The finding with the claims that would explain it; without any where the kernel declares its arithmetic."""
    if trial is None or trial.kernel.capabilities.designs is None or finding.kind not in NUMBERS:
        return finding
    return replace(finding, explained_by=tuple(explanations(trial, law)))


def explanations(trial: Trial, law: Callable[[Trial], None]) -> Iterator[str]:
    """Claims with which the law holds of what the trial's calls returned; calls that it had not come to are made."""
    for claim, family in less_precise(trial.family):
        try:
            law(trial.replayed(family))
        except (LawBroken, Refused, CannotRun):
            continue
        yield claim
