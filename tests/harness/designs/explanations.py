"""Which less precise design, if any, would explain a result that no design of full precision explains.

A design explains one if its bounds do, those of all calls that were made, and if the errors of a call of ordinary
numbers are like its own. Of several, those are told that are nearest to the result.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from reference.family import PAIRS, Family, implied, in_pairs, less_precise, widest
from tests.harness.designs.ordinary import Ordinary, asked_whether, left_by, ordinary_call
from tests.harness.designs.rivals import likeliest
from tests.harness.designs.same_case import left_with_ordinary_numbers
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS, NO_DESIGN, WHOLE_DESIGN
from tests.harness.symptoms import FEWEST_KEYS, wrong_tensors
from tests.harness.trial.judge import judge
from tests.harness.trial.trial import CannotRun, LawBroken, Refused, Trial
from tests.harness.verdict import NUMBERS, Finding

LARGEST_ERROR = 2.0**-4
"""No design errs by this share of a tensor's norm where ``is_plainly_wrong`` asks.

The formats of all designs have at least 8 bits, so that a rounding errs by 2^-8 of a number at most. Numbers from a
normal distribution make scores of size 1 in the root mean square, and a rounded score then changes its weight by less
than 2^-8 of it. Gradients take one or two such factors more, and running sums that are rounded at each of N tiles, or
after each of N heads of a group, add sqrt(N) errors of random signs: fewer than 128 tiles add less than 2^-4, and so do
128 heads, whose running sums are as large as the root of their number. Where sm_scale makes scores larger, their
roundings are larger by as much. This is asked of dq and dk at the default sm_scale alone: large scores leave the weight
of one key, and dP - delta is then a small difference of large numbers.
"""


def with_explanations(
    finding: Finding, trial: Trial | None, law: Callable[[Trial], None], designs: str
) -> Finding:
    """Return the finding with the claims that would explain it, unless the kernel declares its arithmetic.

    If no claim explains all wrong tensors, but one explains some of them, the finding returned is that of the others,
    if that is asked for. ``designs`` says how many claims are looked for, and what they may explain: see ``DESIGNS``.
    """
    if trial is None or trial.kernel.capabilities.designs is None or finding.kind not in NUMBERS:
        return finding
    if designs == NO_DESIGN or is_plainly_wrong(finding, trial):
        return finding
    left = left_by(trial.replayed(widened(trial.family)), law)
    wrong = wrong_tensors(finding)
    if left is None:
        if left_by(asked_whether(trial, trial.family), law) is None:
            return finding  # the same results hold: what failed is not how precise they are
        if is_wrong_with_ordinary_numbers(trial, law, wrong):
            return finding
        ordinary = ordinary_call(trial, wrong)
        if ordinary is None or not ordinary.multiples:
            found = explanations(trial, law, ordinary)
            claims = [*islice(found, None if designs == ALL_DESIGNS else 1)]
            likely = likeliest_of(trial, claims, finding)
            told = replace(finding, explained_by=tuple(implied(claims)), likely=likely)
            return told if claims or ordinary is None else ordinary.told_beside(finding)
        if designs == WHOLE_DESIGN or finding.tensor in ordinary.multiples:
            return ordinary.told_beside(finding)
        explained = wrong - ordinary.multiples
    elif designs == WHOLE_DESIGN or finding.tensor in left.tensors:
        return finding
    else:
        explained = most_explained(finding, trial, law)
    if finding.tensor not in explained:
        return finding
    others = trial.replayed(trial.family)
    others.ignored = trial.ignored | explained
    try:
        law(others)
    except LawBroken as broken:
        trial.compared, trial.calls = others.compared, others.calls
        return broken.finding
    return finding


def is_plainly_wrong(finding: Finding, trial: Trial) -> bool:
    """Whether a tensor of an ordinary call is further from the exact one than any design can be.

    Bounds are for the worst case: they would explain a gradient of half its size by roundings that all have one sign.
    """
    case = trial.case
    values = {case.q_values, case.k_values, case.v_values, case.dout_values}
    normal = values == {"normal"} and not case.spikes
    scores = abs(case.scale) * math.sqrt(case.head_dim)
    does_not_cancel = case.sm_scale is None or finding.tensor in ("out", "lse", "dv")
    long = min(case.seqlen_q, case.seqlen_k) >= FEWEST_KEYS and case.key_padding == "none"
    of_whole = finding.call < len(trial.calls) and trial.calls[finding.call].problem is trial.problem
    compared_with_truth = finding.other is None and not finding.expression
    usual = not (case.dropout_p or case.pattern or case.changes_scores)
    if not (normal and does_not_cancel and long and of_whole and compared_with_truth and usual):
        return False
    return float(finding.relative or 0.0) > LARGEST_ERROR * max(1.0, scores)


def is_wrong_with_ordinary_numbers(trial: Trial, law: Callable[[Trial], None], wrong: set[str]) -> bool:
    """Whether one of the wrong tensors is too far off for any design once the numbers of the case are ordinary."""
    usual = left_with_ordinary_numbers(trial, law)
    if usual is None:
        return False
    made, found = usual
    if wrong.isdisjoint(wrong_tensors(found)):
        return False
    if is_plainly_wrong(found, made):
        return True
    left = left_by(made.replayed(widened(made.family)), law)
    return left is not None and not wrong.isdisjoint(wrong_tensors(left))


def most_explained(finding: Finding, trial: Trial, law: Callable[[Trial], None]) -> set[str]:
    """Return those of the wrong tensors that are right by one less precise design, by the one that explains most.

    The bounds of all designs together, which are wider, would take a wrong lse or out of bfloat16 for a rounded one.
    """
    lefts = (left_by(trial.replayed(family), law) for _, family in less_precise(trial.family))
    return max((set(finding.tensors) - set(left.tensors) for left in lefts if left), key=len, default=set())


def widened(family: Family) -> Family:
    """Return the family with the largest errors that any less precise design may have."""
    bases = (base for _, less in less_precise(family) for base in less.bases)
    return replace(family, bases=(widest(bases),))


def explanations(
    trial: Trial, law: Callable[[Trial], None], ordinary: Ordinary | None = None
) -> Iterator[str]:
    """Yield claims under which the law holds for what the trial's calls returned; calls not reached so far are made.

    They have to explain the errors of an ``ordinary`` call as well. Pairs of claims come last, if no single one does.
    """
    unlike = ordinary.unlike_seen() if ordinary else set[str]()
    is_explained = False
    for claim, family in less_precise(trial.family):
        if claim not in unlike and _explains(family, trial, law, ordinary):
            is_explained = True
            yield claim
    if not is_explained:
        for pair, family in in_pairs(trial.family):
            if unlike.isdisjoint(PAIRS[pair]) and _explains(family, trial, law, ordinary):
                yield pair


def _explains(family: Family, trial: Trial, law: Callable[[Trial], None], ordinary: Ordinary | None) -> bool:
    """Whether the law holds for what the trial's calls returned, were the kernel of this family.

    Some laws allow for the worst sum of errors, so that a family would excuse much that it does not explain. Therefore
    a call of the whole problem has to be within its bounds as well, and the means of an ``ordinary`` call. Gradients
    are asked for only by laws that judge some, as a bug of the backward says nothing of the forward; and a kernel that
    has none may refuse to give them.
    """
    with suppress(LawBroken, Refused, CannotRun):
        asked = asked_whether(trial, family)
        law(asked)
        if all(bool(x.isfinite().all()) for x in (trial.problem.q, trial.problem.k, trial.problem.v)):
            with suppress(Refused):
                again = asked_whether(trial, family)
                backward = any(call.backward for call in asked.calls)
                judge(again, again.problem, again.gradients() if backward else again.forward())
        if ordinary:
            law_named("unbiased")(asked_whether(ordinary.trial, family))
        return True
    return False


def likeliest_of(trial: Trial, claims: Sequence[str], finding: Finding) -> tuple[str, ...]:
    """Return the claims without those that a rival explains much better, by what the call at fault returned.

    Rivals answer plain calls alone, so that all claims are returned for a call with arguments that the law adds.
    """
    if finding.call >= len(trial.given):
        return tuple(claims)
    call, given = trial.calls[finding.call], trial.given[finding.call]
    if call.launch.keys() - dict(trial.case.launch):
        return tuple(claims)
    return tuple(likeliest(claims, {finding.tensor, *finding.tensors}, call.problem, given, trial.alignment))
