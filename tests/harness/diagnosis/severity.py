"""How bad a bug is: which ordinary cases show it, and which field distinguishes these from cases that pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from strategies.case import Case
from strategies.features import value_of
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.counterfactuals import needs_of
from tests.harness.bugs.dense import ordinary_cases
from tests.harness.bugs.failure import Failure
from tests.harness.clock import BudgetSpent
from tests.harness.diagnosis.conditions import ConditionSearch, without_accidents
from tests.harness.run import ALL_DESIGNS
from tests.harness.running.runs import Runs
from tests.harness.symptoms import is_in_common, is_not_cured
from tests.harness.verdict import Finding

CONTRASTS = ("causal", "group", "heads_kv", "head_dim", "seqlen_k", "seqlen_q")
"""The fields in which ordinary cases differ."""
CONTRASTED = 4
"""The most ordinary cases that are compared: so many that show the bug, and so many that do not."""

Answer = tuple[Case, Finding | None]
"""A case with its finding."""


def found_in_ordinary(failure: Failure, runs: Runs, spend: Callable[[], None]) -> list[Answer]:
    """Run a failure's law on ordinary cases, and return the findings, which are remembered for other failures.

    ``spend`` may raise BudgetSpent, which ends the runs.
    """
    law, own = failure.law, failure.case
    ordinary = ordinary_cases(runs.info.capabilities, own.dtype, runs.device_type, own)
    with suppress(BudgetSpent):
        for case in ordinary:
            if (law, case) not in runs.ordinary:
                spend()
                found = runs.judged(law, case, failure.ignored, explained=True, designs=ALL_DESIGNS)
                runs.ordinary[law, case] = found
    return [(case, runs.ordinary[law, case]) for case in ordinary if (law, case) in runs.ordinary]


def with_contrast(
    bug: Bug,
    answers: Sequence[Answer],
    search: ConditionSearch,
    counted: Callable[[Finding | None], Finding | None],
    spend: Callable[[], None],
) -> Bug:
    """Find conditions for a bug without any, by comparing ordinary cases that show it with ordinary cases that pass.

    Example: a causal case shows it, and a case without causal passes. If causal=False fixes the causal case, and the
    bug's own case is causal too, that is its condition.

    ``answers`` are those of ordinary cases. ``counted`` is ``Investigation.counted``. ``spend`` may raise BudgetSpent,
    which ends the search.
    """
    f = bug.failure
    mine = f.finding
    showing = [case for case, x in answers if x and is_in_common(mine, x)]
    without = [case for case, x in answers if not is_not_cured(mine, x)]
    if bug.needs or not showing or not without:
        return bug

    def fails(case: Case) -> bool:
        spend()
        found = search.runs.judged(f.law, case, f.ignored, explained=True, designs=ALL_DESIGNS)
        return is_not_cured(mine, counted(found))

    with suppress(BudgetSpent):
        differences = [need for case in without[:CONTRASTED] for need in _contrast(showing[0], case)]
        # If the failure's own case does not meet a condition, those cases show another bug.
        differences = [need for need in differences if need.is_met(f.case)]
        needs = needs_of(differences, showing[:CONTRASTED], fails, search.claims)
        bug = replace(bug, needs=without_accidents(needs))
        if needs:
            wrong = search.tensors_of(bug.needs, showing[:1], spend)
            bug = replace(bug, tensors=tuple(sorted(wrong)) or bug.tensors)
    return bug


def _contrast(showing: Case, without: Case) -> Iterator[Condition]:
    """Yield a condition for each field in which a case that shows a bug differs from a case that does not."""
    for name in CONTRASTS:
        value, other = value_of(showing, name), value_of(without, name)
        if value != other:
            yield Condition(name, (value,), (other,))
