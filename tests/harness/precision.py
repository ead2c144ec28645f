"""Which less precise design, if any, would explain a result that no design of full precision explains."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torch import Tensor

from reference import safe_softmax
from reference.arithmetic import FP32_ROUNDOFF
from reference.family import Family, less_precise, widest
from reference.heads import fold, unfold
from reference.masks import hide, visible
from tests.harness.judge import judge
from tests.harness.trial import CannotRun, LawBroken, Outputs, Problem, Refused, Trial
from tests.harness.verdict import NUMBERS, Finding

LARGEST_ERROR = 2.0**-4
"""No design errs by this share of a tensor's norm where ``is_plainly_wrong`` asks.

The formats of all designs have at least 8 bits, so that a rounding errs by 2^-8 of a number at most. Numbers from a
normal distribution make scores of size 1 in the root mean square, and a rounded score then changes its weight by less
than 2^-8 of it. Gradients take one or two such factors more, and running sums that are rounded at each of N tiles add
sqrt(N) errors of random signs: fewer than 128 tiles add less than 2^-4.
"""
FEWEST_KEYS = 16
"""With at least this many rows and keys, only a few rows of a tensor are 0 or small differences of large numbers."""

FURTHER = 2.0
"""A design is not the kernel's if it misses a result by this many times the error of the nearest design."""


def with_explanations(finding: Finding, trial: Trial | None, law: Callable[[Trial], None]) -> Finding:
    """Return the finding with the claims that would explain it, unless the kernel declares its arithmetic.

    If claims explain only some of the wrong tensors, the finding returned is that of the others.
    """
    if trial is None or trial.kernel.capabilities.designs is None or finding.kind not in NUMBERS:
        return finding
    if is_plainly_wrong(finding, trial):
        return finding
    left = left_by(trial.replayed(widened(trial.family)), law)
    if left is None:
        if left_by(trial.replayed(trial.family), law) is None:
            return finding  # the same results hold: what failed is not how precise they are
        claims = list(explanations(trial, law))
        return replace(finding, explained_by=tuple(likeliest(trial, claims)))
    explained = set(finding.tensors) - set(left.tensors)
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
    normal = values == {"normal"} and not case.spikes and case.sm_scale is None
    long = min(case.seqlen_q, case.seqlen_k) >= FEWEST_KEYS and case.key_padding == "none"
    of_whole = finding.call < len(trial.calls) and trial.calls[finding.call].problem is trial.problem
    compared_with_truth = finding.other is None and not finding.expression
    if not (normal and long and of_whole and compared_with_truth) or case.dropout_p or case.window:
        return False
    return float(finding.relative or 0.0) > LARGEST_ERROR


def widened(family: Family) -> Family:
    """Return the family with the largest errors that any less precise design may have."""
    bases = (base for _, less in less_precise(family) for base in less.bases)
    return replace(family, bases=(widest(bases),))


def left_by(trial: Trial, law: Callable[[Trial], None]) -> Finding | None:
    """Return what a law finds wrong with a trial; None if nothing is."""
    with suppress(Refused, CannotRun):
        try:
            law(trial)
        except LawBroken as broken:
            return broken.finding
    return None


def explanations(trial: Trial, law: Callable[[Trial], None]) -> Iterator[str]:
    """Yield claims under which the law holds for what the trial's calls returned; calls not reached so far are made.

    Some laws allow for the worst sum of errors, so that a claim would excuse much that it does not explain. Therefore a
    call of the whole problem has to be within its bounds as well.
    """
    for claim, family in less_precise(trial.family):
        with suppress(LawBroken, Refused, CannotRun):
            law(trial.replayed(family))
            if all(bool(x.isfinite().all()) for x in (trial.problem.q, trial.problem.k, trial.problem.v)):
                again = trial.replayed(family)
                judge(again, again.problem, again.gradients())
            yield claim


def likeliest(trial: Trial, claims: list[str]) -> list[str]:
    """Return the claims without those that a rival explains much better.

    Bounds alone do not tell a scaled q from a scaled k. Rivals are told apart by comparing what the first call returned
    with exact arithmetic on operands that are rounded as in their design.
    """
    if len(RIVALS.keys() & set(claims)) < 2 or not trial.given:
        return claims
    problem, given = trial.calls[0].problem, trial.given[0]
    missed = {claim: miss(trial, problem, given, RIVALS[claim]) for claim in claims if claim in RIVALS}
    limit = FURTHER * min(missed.values()) + 8 * FP32_ROUNDOFF
    return [claim for claim in claims if missed.get(claim, 0.0) <= limit]


Design = Callable[..., Tensor]
"""A function from a problem, "out" or "lse", and the alignment to exact results for operands rounded as in a design."""


def miss(trial: Trial, p: Problem, given: Outputs, designs: tuple[Design, ...]) -> float:
    """Return the root mean square distance of lse, or else out, to the nearest design; errors are over 1 + |entry|."""
    name = "out" if given.lse is None else "lse"
    actual = getattr(given, name).double()

    def distance(design: Design) -> float:
        expected = design(p, name, alignment=trial.alignment)
        square = ((actual - expected) / (1 + expected.abs())).square()
        return math.sqrt(square[square.isfinite()].mean().nan_to_num(0.0).item())

    return min(map(distance, designs))


def _exactly(p: Problem, name: str, *, alignment: str) -> Tensor:
    """Return out or lse of a problem in float64."""
    options = {**p.options, "alignment": alignment}
    return dict(zip(("out", "lse"), safe_softmax.forward(p.q, p.k, p.v, **options), strict=True))[name]


def _prescaled(operand: str, base: float, p: Problem, name: str, *, alignment: str) -> Tensor:
    """Return the same with an operand multiplied by sm_scale and ``base``, and rounded to the inputs' dtype."""
    factor = p.sm_scale * base or 1.0
    x = getattr(p, operand)
    rounded = (x.float() * factor).to(x.dtype).double() / factor
    return _exactly(replace(p, **{operand: rounded}), name, alignment=alignment)


def _summed_rounded(p: Problem, name: str, *, alignment: str) -> Tensor:
    """Return the same with a softmax sum taken over weights, relative to the largest, rounded to the inputs' dtype."""
    out_or_lse = _exactly(p, name, alignment=alignment)
    if p.k.shape[2] == 0:
        return out_or_lse
    scores = fold(p.q, p.heads_kv).double() @ p.k.double().mT * p.sm_scale
    group = p.heads_q // p.heads_kv
    seen = visible(p.q.shape[2], p.k.shape[2], p.causal, alignment, p.q.device, group=group, window=p.window)
    scores = hide(scores, seen, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
    grown = unfold(weights.to(p.q.dtype).double().sum(-1) / weights.sum(-1), p.heads_q)
    return out_or_lse + grown.log() if name == "lse" else out_or_lse / grown[..., None]


LOG2_E = 1 / math.log(2)

RIVALS: Mapping[str, tuple[Design, ...]] = {
    "exp_error=1e-4": (_exactly,),
    "l_from_rounded_p=true": (_summed_rounded,),
    "k_prescaled=true": tuple(partial(_prescaled, "k", base) for base in (1.0, LOG2_E)),
    "q_prescaled=true": tuple(partial(_prescaled, "q", base) for base in (1.0, LOG2_E)),
}
"""Claims whose bounds are alike, each with functions for exact results of operands that its design has rounded."""
