"""Which less precise design, if any, would explain a result that no design of full precision explains.

Bounds alone do not tell a scaled q from a scaled k. Designs that bounds do not tell apart are compared by how near a
result is to exact arithmetic in which a single kind of step rounds, as in each of them.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF
from reference.bounds.accumulation import SAFETY
from reference.family import LESS_PRECISE, PAIRS, Family, implied, in_pairs, less_precise, widest
from reference.heads import fold, unfold
from reference.masks import LOWEST, hide, visible
from strategies.case import LAYOUT_FIELDS, Case
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS, NO_DESIGN, WHOLE_DESIGN
from tests.harness.symptoms import FEWEST_KEYS
from tests.harness.trial.judge import is_large, judge, pieces
from tests.harness.trial.problem import Outputs, Problem
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

ORDINARY = {"batch": 2, "heads_kv": 4, "seqlen_q": 128, "seqlen_k": 128}
"""The sizes of a call of ordinary numbers whose mean errors a design has to explain."""
ALIKE = 0.1
"""The errors of a kernel with tf32 products are correlated at least so much with those of such a kernel that is known.

Truncated and rounded operands have errors with a correlation of -1/2, and so have sums of their products.
"""
MOST_OF_GROUP = 4
"""The most query heads that read a key head of such a call."""

FURTHER = 2.0
"""A design is not the kernel's if it misses a result by this many times the error of the nearest design."""
FEWEST_NUMBERS = 16
"""Of fewer different numbers, a design that is not the kernel's may come near all of them by luck."""
MOSTLY = 0.75
"""A rival gives a result if it has the very numbers of so many of those that tell it from exact arithmetic."""
LOG2_E = 1 / math.log(2)
QUIETER = 16.0
"""A part of an error that is so many times smaller than another one does not come of the same roundings."""
TF32 = "precision=tf32"
LEAST_OF_EXP = 2.0**-16
"""What an exponential that errs by up to 1e-4 makes lse err by at least, in the root mean square."""


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
    if left is None:
        if left_by(asked_whether(trial, trial.family), law) is None:
            return finding  # the same results hold: what failed is not how precise they are
        ordinary = ordinary_call(trial)
        unlike = set() if ordinary is None else unlike_seen(ordinary, {finding.tensor, *finding.tensors})
        claims = [*islice(explanations(trial, law, ordinary, unlike), None if designs == ALL_DESIGNS else 1)]
        if not claims and ordinary is not None:
            return told_by_means(finding, ordinary)
        likely = likeliest_of(trial, claims, finding)
        return replace(finding, explained_by=tuple(implied(claims)), likely=likely)
    if designs == WHOLE_DESIGN or finding.tensor in left.tensors:
        return finding
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


def asked_whether(trial: Trial, family: Family) -> Trial:
    """Return the trial as if the kernel were of another family, to be asked whether a law holds, and not how not."""
    again = trial.replayed(family)
    again.to_first_breach = True
    return again


def left_by(trial: Trial, law: Callable[[Trial], None]) -> Finding | None:
    """Return what a law finds wrong with a trial; None if nothing is."""
    with suppress(Refused, CannotRun):
        try:
            law(trial)
        except LawBroken as broken:
            return broken.finding
    return None


def explanations(
    trial: Trial,
    law: Callable[[Trial], None],
    ordinary: Trial | None = None,
    excluded: Set[str] = frozenset(),
) -> Iterator[str]:
    """Yield claims under which the law holds for what the trial's calls returned; calls not reached so far are made.

    With an ``ordinary_call``, they have to explain its mean errors as well. Those that are ``excluded`` are not asked.
    Pairs of claims come last, if no single one explains it.
    """
    is_explained = False
    for claim, family in less_precise(trial.family):
        if claim not in excluded and _explains(family, trial, law, ordinary):
            is_explained = True
            yield claim
    if not is_explained:
        yield from (
            pair
            for pair, family in in_pairs(trial.family)
            if excluded.isdisjoint(PAIRS[pair]) and _explains(family, trial, law, ordinary)
        )


def ordinary_call(trial: Trial) -> Trial | None:
    """Return a trial that has made a call of ordinary numbers, in which no mean error is known to be a rounding's.

    A bound says how far roundings may carry one element, and so it excuses an error of half its size that every element
    has. No design has such errors: roundings to nearest leave nothing in the mean. The call has the sizes ``ORDINARY``,
    and else the shape, the layouts and the launch settings of the trial's. None is returned if the
    kernel does not claim such calls, or does not answer this one.
    """
    case, claims = trial.case, trial.kernel.capabilities
    kept = ("head_dim", "v_head_dim", "v_in_k", "dtype", "seed", "launch", *LAYOUT_FIELDS)
    fields_: dict[str, Any] = {name: getattr(case, name) for name in kept}
    fields_ |= ORDINARY | {"group": min(case.group, MOST_OF_GROUP)}
    # The first rows of a causal mask have few keys, and a largest weight of 1 that no cast changes.
    asked = next(filter(claims.admits, (Case(**fields_, causal=causal) for causal in (False, True))), None)
    if asked is None:
        return None
    ordinary = trial.replayed(trial.family).on(asked)
    ordinary.safety, ordinary.answered, ordinary.given = SAFETY, [], []
    with suppress(LawBroken, Refused, CannotRun):
        law_named("unbiased")(ordinary)
    return ordinary if ordinary.given else None


def unlike_seen(ordinary: Trial, wrong: Collection[str]) -> set[str]:
    """Return claims that do not explain the tensors that are ``wrong``, as their errors in an ordinary call are others.

    If out or lse is wrong, these are claims of which every step of the forward would show in lse, where lse is too
    exact. Their bounds are far above such a lse, so that they would excuse an out that is wrong for another reason. Of
    tf32 it is said where no tensor has errors like those of truncated operands, beside a factor. And where a factor is
    all that is wrong, no design explains it, as errors of roundings scatter.
    """
    call, given = ordinary.calls[0], ordinary.given[0]
    piece = next(pieces(call.problem, given))

    def made(design: Design) -> dict[str, list[Tensor]]:
        return design.results(piece.problem, piece.outputs, ordinary.alignment)

    exact, seen = made(Design()), piece.outputs.named()
    found = set[str]()
    if "lse" in seen and not {"out", "lse"}.isdisjoint(wrong):
        lse = exact["lse"][0]
        shown = {"exp_error=1e-4": LEAST_OF_EXP}
        for claim, designs in RIVALS.items():
            showing = [x for x in designs if x.can_show(call.problem, in_forward=True)]
            sizes = [_size(made(x)["lse"][0] - lse) for x in showing]
            shown.setdefault(claim, min(sizes, default=0.0))
        error = _size(seen["lse"] - lse)
        found |= {claim for claim, least in shown.items() if error < least / QUIETER}
    others = [name for name in exact if name != "lse" and name in wrong and name in seen]
    if any(is_factor(x, seen[name]) for name in others for x in exact[name]):
        return {*LESS_PRECISE}
    in_tf32 = [made(x) for x in RIVALS[TF32]]
    judged = [x for x in exact if x in wrong and x in seen]
    if judged and not any(
        abs(correlation(seen[name] - of_exact, other - of_exact, of_exact)) > ALIKE
        for name in judged
        for rival in in_tf32
        for of_exact in exact[name]
        for other in rival[name]
    ):
        found.add(TF32)
    return found


def is_factor(exact: Tensor, seen: Tensor) -> bool:
    """Whether what is left of an error without its part along the exact tensor is ``QUIETER`` times smaller.

    Truncated numbers lose half a unit in the last place in the mean, and scatter by 0.29 of it around that. In sums of
    products with normal numbers both count alike, so that the part along is less than twice what is left.
    """
    error = seen.double() - exact
    factor = (error * exact).sum() / exact.square().sum().clamp_min(1e-300)
    return bool((factor * exact).norm() > QUIETER * (error - factor * exact).norm())


def _size(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def correlation(one: Tensor, two: Tensor, common: Tensor) -> float:
    """Return the correlation of two tensors once their parts along a ``common`` one are taken away."""
    parts = [x.double() - common * ((x * common).sum() / common.square().sum()) for x in (one, two)]
    norms = parts[0].norm() * parts[1].norm()
    return float((parts[0] * parts[1]).sum() / norms.clamp_min(1e-300))


def told_by_means(finding: Finding, ordinary: Trial) -> Finding:
    """Return the finding with what the means of an ordinary call say of the same tensor, if they say anything."""
    of_means = left_by(asked_whether(ordinary, ordinary.family), law_named("unbiased"))
    if finding.certificate or of_means is None or of_means.tensor not in finding.tensors:
        return finding
    return replace(finding, certificate=of_means.certificate)


def _explains(
    family: Family, trial: Trial, law: Callable[[Trial], None], ordinary: Trial | None = None
) -> bool:
    """Whether the law holds for what the trial's calls returned, were the kernel of this family.

    Some laws allow for the worst sum of errors, so that a family would excuse much that it does not explain. Therefore
    a call of the whole problem has to be within its bounds as well, and the means of an ``ordinary_call``. Gradients
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
        if ordinary is not None:
            law_named("unbiased")(asked_whether(ordinary, family))
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


@dataclass(frozen=True)
class Design:
    """Which steps of exact attention round to the inputs' dtype, and which products are in tf32.

    ``prescaled`` is the operand, if any, that is multiplied by sm_scale and ``base`` and rounded; "qk" stands for both,
    multiplied by the root of that. ``steps`` are others: "products" of q and k, scaled "scores", "slopes" of ALiBi and
    what is "added" to scores, both times ``base``, "weights" after the softmax, the weights in its "sum", "dp", and the
    running sums of dk and dv over the heads of a "group". ``tf32`` says whose products have operands in tf32: those of
    "P and dS", or of "all". dS is then truncated before it is scaled.
    """

    prescaled: str = ""
    base: float = 1.0
    steps: frozenset[str] = frozenset()
    tf32: Literal["", "P and dS", "all"] = ""

    def results(self, p: Problem, given: Outputs, alignment: str) -> dict[str, list[Tensor]]:
        """Return out, lse and gradients in float64, each once for every way in which a kernel of the design gets it.

        There are two ways to get delta, P dP and out. P is truncated to tf32 before or after its division by the sum.
        The heads of a group are added from the first to the last or, as autograd does it, from the last to the first.
        """
        p = self._with_operands(p)
        added, sink = self._added(p, alignment), p.rule.sink(p.q, p.k)
        group = p.heads_q // p.heads_kv
        q, k, v, dout = (fold(x, p.heads_kv).double() for x in (p.q, p.k, p.v, p.dout))
        q_in, k_in, v_in, dout_in = (self._operand(x) if self.tf32 == "all" else x for x in (q, k, v, dout))
        seen = visible(
            p.q.shape[2], p.k.shape[2], p.causal, alignment, p.q.device, group=group, pattern=p.pattern
        )
        scores = self._cast("scores", self._cast("products", q_in @ k_in.mT, p) * p.sm_scale, p)
        capped = p.rule.capped(scores)
        scores = hide(capped + added, seen, -math.inf)
        m = torch.maximum(scores.amax(-1, keepdim=True), sink).clamp_min(LOWEST)
        weights = (scores - m).exp()
        total = self._cast("sum", weights, p).sum(-1, keepdim=True) + (sink - m).exp()
        before, divisor = weights, total.clamp_min(0.5)
        weights = self._cast("weights", before / divisor, p)
        of_v = [self._operand(before) / divisor, self._operand(weights)] if self.tf32 else [weights]
        dp = self._cast("dp", dout_in @ v_in.mT, p)
        own_out = fold(given.out, p.heads_kv).double()
        deltas = [x.sum(-1, keepdim=True) for x in (weights * dp, dout * own_out)]
        slope = p.rule.slope(capped) * p.sm_scale
        ds = [self._operand(hide(weights * (dp - delta), seen)) * slope for delta in deltas]
        return {
            "out": [unfold(x @ self._operand(v), p.heads_q) for x in of_v],
            "lse": [unfold((m + total.log())[..., 0], p.heads_q)],
            "dq": [unfold(x @ self._operand(k), p.heads_q) for x in ds],
            "dk": [whole for x in ds for whole in self._over_heads(x, self._operand(q), group, p)],
            "dv": self._over_heads(self._operand(weights), dout_in, group, p),
        }

    def can_show(self, p: Problem, *, in_forward: bool) -> bool:
        """Whether a call has anything for it to round beside the weights, which every design casts.

        ``in_forward``, that has to be a step of the forward. Designs of which no step is known can show in any call.
        """
        steps = self.steps - {"weights"}
        idle = {"dp", "group"} if in_forward else {"group"} if p.heads_q == p.heads_kv else set()
        idle |= set() if p.rule.is_biased else {"added"}
        idle |= set() if p.rule.alibi_slopes is not None else {"slopes"}
        return not steps or not steps <= idle

    def _operand(self, x: Tensor) -> Tensor:
        """Return an operand of a product as the product takes it: as it is, or its first 10 fraction bits."""
        return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double() if self.tf32 else x

    def _over_heads(self, x: Tensor, y: Tensor, group: int, p: Problem) -> list[Tensor]:
        """Return the sum of x^T y over the query heads of a group, whose rows are folded; also in reverse order."""
        if "group" not in self.steps:
            return [x.mT @ y]
        parts = [a.mT @ b for a, b in zip(x.chunk(group, -2), y.chunk(group, -2), strict=True)]
        parts = [self._cast("group", part, p) for part in parts]
        return [
            reduce(lambda a, b: self._cast("group", a + b, p), order) for order in (parts, reversed(parts))
        ]

    def _with_operands(self, p: Problem) -> Problem:
        scale = p.sm_scale * self.base
        factor = (scale if len(self.prescaled) == 1 else math.sqrt(abs(scale))) or 1.0
        scaled = {name: (getattr(p, name).float() * factor).to(p.dout.dtype) for name in self.prescaled}
        return replace(p, **{name: x.double() / factor for name, x in scaled.items()})

    def _added(self, p: Problem, alignment: str) -> Tensor:
        """Return what is added to scores, (batch or 1, heads_kv, group * seqlen_q, seqlen_k) float64, heads folded."""
        rule = p.rule
        if rule.alibi_slopes is not None:
            slopes = self._cast("slopes", rule.alibi_slopes.double() * self.base, p) / self.base
            rule = replace(rule, alibi_slopes=slopes)
        return self._cast("added", rule.added(p.q, p.k, alignment) * self.base, p) / self.base

    def _cast(self, step: str, x: Tensor, p: Problem) -> Tensor:
        return x.to(p.dout.dtype).double() if step in self.steps else x


def _all_of(*steps: str) -> list[frozenset[str]]:
    """Return every set of some of these steps, the empty one included."""
    counts = range(len(steps) + 1)
    return [frozenset(x) for count in counts for x in itertools.combinations(steps, count)]


def _any_cast(prescaled: str = "", *steps: str, bases: Sequence[float] = (1.0,)) -> tuple[Design, ...]:
    """Return designs whose weights are cast after the softmax, or not, with each base of their exponentials."""
    return tuple(Design(prescaled, base, cast | {*steps}) for base in bases for cast in _all_of("weights"))


E_OR_2 = (1.0, LOG2_E)
"""What scores are multiplied by for exponentials to base e, and to base 2."""


RIVALS: Mapping[str, tuple[Design, ...]] = {
    "exp_error=1e-4": _any_cast(),
    "l_from_rounded_p=true": _any_cast("", "sum"),
    "rounded_group_sums=true": _any_cast("", "group"),
    "k_prescaled=true": _any_cast("k", bases=E_OR_2),
    "q_prescaled=true": _any_cast("q", bases=E_OR_2),
    "qk_prescaled=true": _any_cast("qk", bases=E_OR_2),
    "rounded_bias=true": tuple(
        design
        for steps in (("added",), ("slopes",), ("slopes", "added"))
        for design in _any_cast("", *steps, bases=E_OR_2)
    ),
    "rounded_scores=true": (
        *(Design(steps=x) for x in _all_of("products", "scores", "dp", "weights") if x - {"weights"}),
        *(Design("qk", steps=x | {"scores"}) for x in _all_of("dp", "weights")),
    ),
    "precision=tf32": (Design(tf32="all"), Design(tf32="P and dS")),
}
"""Claims whose bounds are alike, each with its designs."""


def likeliest(
    claims: Sequence[str], wrong: Collection[str], p: Problem, given: Outputs, alignment: str
) -> list[str]:
    """Return the claims without those that a rival explains much better.

    ``given`` is what the call with the arguments ``p`` returned. Designs are compared by lse, or else out, and by those
    of out, dq, dk and dv that are ``wrong``. If rivals give the very numbers of one that is wrong, theirs are the only
    claims, as a claim without a rival can't be compared.
    """
    rivals = {claim: RIVALS[claim] for claim in claims if claim in RIVALS}
    known = p.key_padding_mask is None and not p.dropout_p and p.k.shape[2] > 0 and not is_large(p)
    if not rivals or not known:
        return [*claims]
    piece = next(pieces(p, given))
    left, shown = set(claims), set[str]()
    forward = "out" if given.lse is None else "lse"

    def made(designs: Sequence[Design]) -> list[tuple[Design, dict[str, list[Tensor]]]]:
        return [(design, design.results(piece.problem, piece.outputs, alignment)) for design in designs]

    plain = made(_any_cast())
    of_rivals = {claim: made(designs) for claim, designs in rivals.items()}
    for name in dict.fromkeys((forward, *(x for x in ("out", "dq", "dk", "dv") if x in wrong))):
        actual = getattr(piece.outputs, name)
        if actual is None or len(actual.unique()) < FEWEST_NUMBERS:  # a call may give no gradients
            continue
        in_forward = name in ("out", "lse") and not {"out", "lse"}.isdisjoint(wrong)
        expected = {
            claim: [
                x
                for design, results in of_claim
                if design.can_show(p, in_forward=in_forward)
                for x in results[name]
            ]
            for claim, of_claim in of_rivals.items()
        }
        missed = {
            claim: min((miss(actual.double(), x, name) for x in of_claim), default=math.inf)
            for claim, of_claim in expected.items()
        }
        limit = FURTHER * min(missed.values()) + 8 * FP32_ROUNDOFF
        left -= {claim for claim, error in missed.items() if error > limit}
        if name in wrong:
            usual = [x for _, results in plain for x in results[name]]
            shown |= {
                claim
                for claim, of_claim in expected.items()
                if any(gives(x, usual, actual) for x in of_claim)
            }
    return [claim for claim in claims if claim in (left & shown or left)]


def gives(expected: Tensor, usual: Sequence[Tensor], actual: Tensor) -> bool:
    """Whether a rival, once its results are stored, gives the actual numbers where it has others than exact arithmetic.

    ``usual`` are the results of exact arithmetic, by each way to get them. Numbers that another design made are seldom
    the same by luck, and those of the rival's own design differ where a sum in float32 fell on the other side of a tie.
    """
    stored = expected.to(actual.dtype)
    apart = torch.stack([stored != x.to(actual.dtype) for x in usual]).all(0)
    same = (stored == actual)[apart].double()
    return len(same) >= FEWEST_NUMBERS and float(same.mean()) > MOSTLY


def miss(actual: Tensor, expected: Tensor, name: str) -> float:
    """Return the root mean square of the errors, each over the sum of the entry's size and that of usual entries.

    Usual entries of out and lse are of size 1, those of gradients have the size of their root mean square.
    """
    square = expected.square()
    usual = 1.0 if name in ("out", "lse") else square[square.isfinite()].mean().sqrt()
    error = ((actual - expected) / (usual + expected.abs())).square()
    return math.sqrt(error[error.isfinite()].mean().nan_to_num(0.0).item())
