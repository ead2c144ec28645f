"""How bad a bug is: which ordinary cases show it, and which field distinguishes these from cases that pass.

A bug is as bad as it is for the users whom it hits. What a kernel is used for follows from what it claims: training
steps or prefills, decode steps, grouped heads, sinks, and each kind of calls with sequences of different lengths. Each
such use has cases of its own, and is counted by itself: a kernel that breaks every decode step shows in none of its
prefills. Only cases that the law of the failure judges count, as a law about packed calls tells nothing of others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kernels.contract import Capabilities
from strategies.case import DECLARED, Case
from strategies.features import value_of
from strategies.sequences import with_sequences
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.counterfactuals import needs_of
from tests.harness.bugs.dense import ordinary_cases
from tests.harness.bugs.failure import Failure
from tests.harness.clock import BudgetSpent
from tests.harness.diagnosis.conditions import ConditionSearch, without_accidents
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS
from tests.harness.running.runs import Runs
from tests.harness.symptoms import is_in_common, is_not_cured
from tests.harness.verdict import Finding

CONTRASTS = ("causal", "group", "heads_kv", "head_dim", "seqlen_k", "seqlen_q")
"""The fields in which ordinary cases differ."""
CONTRASTED = 4
"""The most ordinary cases that are compared: so many that show the bug, and so many that do not."""

PER_USE = 6
"""The cases of a use beside prefills: lengths, numbers of heads and head_dims differ between them."""
LENGTHS_OF_USES = (65, 128, 100, 200, 64, 150)
GROUPS = (4, 2, 8)
"""Query heads of a key head, in turn, where heads are grouped."""
SEVERAL = 3
"""The sequences of a decode step, and of a call with sequences of different lengths."""

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
            _found(case, failure, runs, spend)
    return [(case, runs.ordinary[law, case]) for case in ordinary if (law, case) in runs.ordinary]


def _found(case: Case, failure: Failure, runs: Runs, spend: Callable[[], None]) -> Finding | None:
    """Return what a failure's law finds in a case. It is run once for all failures. ``spend`` may raise BudgetSpent."""
    law = failure.law
    if (law, case) not in runs.ordinary:
        spend()
        found = runs.judged(law, case, failure.ignored, explained=True, designs=ALL_DESIGNS)
        runs.ordinary[law, case] = found
    return runs.ordinary[law, case]


def with_uses(
    bug: Bug,
    ordinary: Sequence[Answer],
    runs: Runs,
    counted: Callable[[Finding | None], Finding | None],
    spend: Callable[[], None],
) -> Bug:
    """Return the bug with the number of cases that show it of each use that the kernel claims.

    ``ordinary`` are the answers of ordinary cases, ``counted`` is ``Investigation.counted``. Once ``spend`` raises
    BudgetSpent, no further cases are run.
    """
    law, uses = bug.failure.law, dict[str, list[Answer]]()
    for case, x in () if law_named(law).has_own_calls else ordinary:
        uses.setdefault(_use_of(case, law), []).append((case, x))
    for use, answers in _found_in_uses(bug.failure, runs, spend).items():
        uses.setdefault(use, []).extend((case, counted(x)) for case, x in answers)
    counts = (
        (use, sum(x is not None and bug.could_break(x) and bug.is_met(case) for case, x in some), len(some))
        for use, some in uses.items()
    )
    return replace(bug, severity=replace(bug.severity, uses=tuple(counts)))


def _found_in_uses(failure: Failure, runs: Runs, spend: Callable[[], None]) -> dict[str, list[Answer]]:
    """Run a failure's law on the cases of each use that the kernel claims beside prefills; return findings by use.

    ``spend`` may raise BudgetSpent, which ends the runs. Findings are remembered for other failures.
    """
    found: dict[str, list[Answer]] = {}
    with suppress(BudgetSpent):
        for use, cases in _cases_of_uses(failure, runs).items():
            for case in cases:
                answer = case, _found(case, failure, runs, spend)
                found.setdefault(use, []).append(answer)
    return found


def _cases_of_uses(failure: Failure, runs: Runs) -> dict[str, list[Case]]:
    """Return the claimed cases of each use that the failure's law judges, beside those of ``ordinary_cases``.

    1. A law about calls of ``ragged`` has decode steps and prefills of each kind of such calls.
    2. A law with other calls of its own has calls with the options of the failing one.
    3. Any other has decode steps, calls of grouped heads, and calls with sinks, whose heads are grouped too, as far as
       these are claimed.
    """
    c, own = runs.claims_of(failure.law), failure.case
    of_its_own = law_named(failure.law).draws.get("calls", ())
    grouped: dict[str, Any] = {"group": GROUPS[0]} if c.grouped_heads else {}
    several: dict[str, Any] = {"batch": SEVERAL, **grouped}
    if "ragged" in of_its_own:
        uses = {
            f"{kind.replace('_', ' ')} {name}": {"ragged": kind, **several, **rows}
            for kind in c.ragged
            for name, rows in (("decode steps", {"seqlen_q": 1}), ("prefills", {}))
        }
    elif of_its_own:
        uses = {f"calls with {DECLARED[x]['called']}": {x: getattr(own, x)} for x in of_its_own}
    else:
        uses = {"decode steps": {**several, "seqlen_q": 1}}
        uses |= {"calls of grouped heads": grouped} if grouped else {}
        uses |= {"calls with sinks": {"sinks": True, **grouped}} if c.sinks else {}
    return {use: _claimed(c, own, runs.device_type, fields) for use, fields in uses.items()}


def _claimed(c: Capabilities, own: Case, device_type: str, fields: Mapping[str, Any]) -> list[Case]:
    """Return claimed cases of a use: ordinary ones of other lengths, with ``fields`` of their own."""
    ordinary = ordinary_cases(replace(c, max_seqlen_q=None), own.dtype, device_type, own)
    drawn = []
    for at, case in enumerate(ordinary[: 2 * PER_USE]):
        length = LENGTHS_OF_USES[at % PER_USE]
        other = replace(case, **{"seqlen_q": length, "seqlen_k": length, **fields})
        if "group" in fields:
            other = replace(other, group=GROUPS[at % len(GROUPS)])
        drawn.append(with_sequences(c, other) if "ragged" in fields else other)
    return [case for case in drawn if c.admits(case)][:PER_USE]


def _use_of(case: Case, law: str) -> str:
    """Return the use that an ordinary case is one of."""
    if case.seqlen_q == 1:
        return "decode steps"
    return "training steps" if law_named(law).judges_gradients else "prefills"


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
