"""Identities: equations between inputs and outputs that need no reference, so they hold at any length.

Rows of dS sum to 0, hence sum_j dk_j = 0 for one common query; sum_j dv_j = sum_i dout_i over rows that see a
key; <dq, q> = <dk, k> for each key head and its group; v = 1 gives out = 1; out lies in the hull of v.
Catches dropped or repeated keys, a delta that is slightly off, normalisation, at lengths where a reference
would be too slow: no other law on gradients draws them.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF, PARTIAL_STORES, Arithmetic
from reference.bounds.backward import atomic_flush
from reference.bounds.exact import FLOAT32_SAFE
from reference.bounds.forward import merge_error, part_error
from reference.bounds.scores import LARGEST_EXPONENT
from reference.heads import fold, unfold
from reference.masks import visible
from tests.harness.law import law
from tests.harness.relate import settled
from tests.harness.trial import Check, Outputs, Problem, Trial

LONGEST = 4096
MOST_SCORES = 2**26
"""The kernel's time alone sets the limit."""


@dataclass(frozen=True)
class Sizes:
    """Folded float64 inputs and a-priori sizes, O(length) to compute.

    Attributes:
        q, dout (B, H, R, D), k, v (B, H, N, D): folded inputs.
        live: (B, H, R) which rows see a key.
        score: |S_ij| <= |sm_scale| |q_i| max_j |k_j| (Cauchy-Schwarz), (B, H, R).
        weight: relative error of any weight and of l, from such scores, (B, H, R).
        largest_v: max |v| by column, (B, H, 1, D).
        grad_p: |dP_ij| <= |dout_i| max_j |v_j|, (B, H, R).
        grad_s: error of sum_j |dS_ij| of a row, (B, H, R).
        safe: no product leaves float32.
        known: scores are near enough to what they should be for exp(S - lse) to say anything.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    live: Tensor
    score: Tensor
    weight: Tensor
    largest_v: Tensor
    grad_p: Tensor
    grad_s: Tensor
    safe: bool
    known: bool


def sizes(trial: Trial, p: Problem) -> Sizes:
    """Bounds of everything from norms alone: the terms of ``reference.bounds`` with S and P at their largest."""
    a = trial.arithmetic
    q, dout = fold(p.q, p.heads_kv).double(), fold(p.dout, p.heads_kv).double()
    k, v = p.k.double(), p.v.double()
    terms, head_dim = k.shape[2], k.shape[3]
    seen = visible(p.q.shape[2], terms, p.causal, trial.alignment, q.device)
    live = torch.ones(p.q.shape[2], dtype=torch.bool, device=q.device) if seen is None else seen.any(-1)
    live = live.repeat(p.heads_q // p.heads_kv)
    key, value = k.norm(dim=-1).amax(-1, keepdim=True), v.norm(dim=-1).amax(-1, keepdim=True)
    product = q.norm(dim=-1) * key
    score = abs(p.sm_scale) * product
    length = math.log(max(terms, 1))
    rescalings = math.ceil(terms / a.tile_min) + 1
    # score error, 4|S| + 4|S - lse| + 5|lse|, the rescalings, l's own sum and logarithm, |lse| <= score + log n
    weight = (
        a.score_accumulation(head_dim) * score
        + 2 * a.operand_rounding * score
        + FP32_ROUNDOFF * (17 * score + 9 * length)
        + (rescalings + 2) * (a.exp_error + 2 * FP32_ROUNDOFF)
        + (terms + 2) * FP32_ROUNDOFF
        + a.log_error * max(1.0, length)
        + a.div_error
    )
    if a.merged_by_lse:
        weight = weight + part_error(a, score, terms)
    if a.k_prescaled:
        weight = weight + a.weights.roundoff * score + a.weights.underflow * q.abs().sum(-1)
    if a.q_prescaled:
        weight = (
            weight + a.weights.roundoff * score + a.weights.underflow * k.abs().sum(-1).amax(-1, keepdim=True)
        )
    if a.rounded_scores:
        floors = 2 * a.weights.underflow * max(1.0, abs(p.sm_scale))
        weight = weight + a.weights.roundoff * (5 * score + 4) + floors
    if a.l_from_rounded_p:
        weight = weight + a.weights.roundoff + terms * a.weights.underflow
    known = not weight.numel() or float(weight.amax()) < LARGEST_EXPONENT
    weight = torch.expm1(2 * weight.clamp_max(LARGEST_EXPONENT))
    largest_v = v.abs().amax(-2, keepdim=True)
    grad_p = dout.norm(dim=-1) * value
    # dS: weights (2 |dP| each), casts, dP's and delta's dot products, the stored out inside delta
    stored = 2 * weight + a.weights.roundoff + a.operand_rounding + a.output.roundoff + terms * a.accumulate
    stored = stored + merge_error(a, terms) + PARTIAL_STORES * a.rounded_partials * a.output.roundoff
    casts = (2 + a.ds_from_rounded_p + 6 * a.rounded_scores) * a.weights.roundoff
    relative = 2 * weight + casts + 2 * head_dim * a.accumulate + 6 * FP32_ROUNDOFF
    floor = terms * a.weights.underflow / min(a.ds_units(p.sm_scale)) * (1 + grad_p)
    grad_s = (
        (2 * relative + 4 * a.operand_rounding + stored) * grad_p + floor + terms * 2.0**-126 * (1 + grad_p)
    )
    out_floor = a.output.underflow * dout.abs().sum(-1)
    # q.k overflows before it is scaled: a scale of 0 does not save it
    largest = score, product, grad_p * product, largest_v * max(terms, 1), dout.abs().sum()
    peak = max(float(x.amax()) for x in largest)
    # of dS and the gradients: a forward alone has none
    half = 0.25 * min(a.weights.maximum, a.output.maximum) if trial.kernel.capabilities.backward else math.inf
    rows = p.q.shape[2] * max(1, p.heads_q // p.heads_kv)
    gradient = float(grad_p.amax()) * max(1.0, float(key.amax()), float(q.norm(dim=-1).amax()))
    safe = peak < FLOAT32_SAFE and 2 * gradient * max(1.0, abs(p.sm_scale)) * max(terms, rows) < half
    safe = safe and float(dout.abs().sum(-2).amax()) < half and math.isfinite(peak)
    if a.k_prescaled:
        safe = safe and float(key.amax()) * abs(p.sm_scale) < half
    if a.q_prescaled:
        safe = safe and float(q.norm(dim=-1).amax()) * abs(p.sm_scale) < half
    if a.rounded_scores:
        safe = safe and float(product.amax()) * max(1.0, abs(p.sm_scale)) < half
    return Sizes(q, k, v, dout, live, score, weight, largest_v, grad_p, grad_s + out_floor, safe, known)


@law(max_seqlen=LONGEST, max_tiles=64, max_work=MOST_SCORES)
def identities(trial: Trial) -> None:
    """All identities on one problem."""
    trial = settled(trial)
    p = trial.problem
    if 0 in p.q.shape or 0 in p.k.shape:
        return  # sums over nothing
    s = sizes(trial, p)
    if not s.safe:
        return  # float32 may overflow: what comes out is the forward and special laws' matter
    got = trial.gradients(p)
    checks = hull(trial, s, got)
    if s.known and got.dq is not None and got.dk is not None and got.dv is not None:
        checks += sums_of_gradients(trial, p, s, got, got.dq, got.dk, got.dv)
    trial.hold(checks + ones(trial, p, s))


def hull(trial: Trial, s: Sizes, got: Outputs) -> list[Check]:
    """Each row of out is a convex combination of rows of v."""
    a, terms = trial.arithmetic, s.k.shape[2]
    out = fold(got.out, s.k.shape[1]).double()
    low, high = s.v.amin(-2, keepdim=True), s.v.amax(-2, keepdim=True)
    low, high = (torch.where(s.live[:, None], x, 0.0) for x in (low, high))
    # casts of P, accumulation, the sum l, merges, division and the final rounding move out by this share of max |v|
    relative = (
        a.weights.roundoff
        + a.operand_rounding
        + 2 * a.accumulation(terms)
        + terms * (a.weights.underflow + FP32_ROUNDOFF)
        + merge_error(a, terms)
        + a.div_error
        + a.output.roundoff
    )
    bound = with_coarse_sums(a, s, relative) * 1.01 * s.largest_v + a.output.underflow + terms * 2.0**-126
    nearest = torch.minimum(torch.maximum(out, low), high)
    nearest = unfold(torch.where(out.isnan(), low, nearest), trial.case.heads_q)
    bound = unfold(bound.expand_as(out), trial.case.heads_q)
    group, live = trial.problem.heads_q // trial.problem.heads_kv, s.live[: got.out.shape[2]].long().tolist()
    each = f"x.repeat_interleave({group}, 1) * torch.tensor({live}).to(x)[:, None]"
    ends = f"({each} for x in v.double().aminmax(dim=-2, keepdim=True))"
    return [
        Check(
            claim="out lies in the hull of v",
            tensor="out",
            actual=got.out,
            other_expression=f"out.double().nan_to_num(0.0).clamp(*{ends})",
            expected=nearest,
            bound=bound,
            maximum=a.output.maximum,
            call=got.call,
            other=got.call,
        )
    ]


def with_coarse_sums(a: Arithmetic, s: Sizes, relative: float) -> Tensor:
    """How far out may be from its hull, (B, H, R, 1), relative to the largest v.

    Weights do not sum to 1 where l is the sum of rounded P, where parts have weights of their own, and where l or the
    out of a part is rounded as well.
    """
    relative += (4 * a.rounded_scores + PARTIAL_STORES * a.rounded_partials) * a.output.roundoff
    relative = 2 * relative if a.l_from_rounded_p else relative
    of_parts = part_error(a, s.score, s.k.shape[2]) if a.merged_by_lse else 0.0
    return (torch.zeros_like(s.score) + relative + of_parts)[..., None]


def ones(trial: Trial, p: Problem, s: Sizes) -> list[Check]:
    """V = 1 gives out = 1 on rows that see a key."""
    got = trial.forward(replace(p, v=torch.ones_like(p.v)))
    a, terms = trial.arithmetic, s.k.shape[2]
    relative = (
        a.weights.roundoff
        + 2 * a.accumulation(terms)
        + terms * (a.weights.underflow + FP32_ROUNDOFF)
        + merge_error(a, terms)
        + a.div_error
        + a.output.roundoff
    )
    bound = 1.01 * with_coarse_sums(a, s, relative)
    expected = s.live[: p.q.shape[2], None].double().expand_as(got.out)
    allowed = unfold(bound.expand(*s.score.shape, 1), p.heads_q).expand_as(expected)
    return [Check("v = 1 gives out = 1", "out", got.out, expected, allowed, call=got.call)]


def stores(terms: int, terms_per_store: int | None) -> int:
    """How often a running sum is rounded to the output's format."""
    return 0 if terms_per_store is None else math.ceil(terms / terms_per_store)


def sums_of_gradients(
    trial: Trial, p: Problem, s: Sizes, got: Outputs, dq: Tensor, dk: Tensor, dv: Tensor
) -> list[Check]:
    """The three sums over keys."""
    a, rows, terms = trial.arithmetic, s.q.shape[2], s.k.shape[2]
    scale = abs(p.sm_scale)
    dq, dk, dv = fold(dq, p.heads_kv).double(), dk.double(), dv.double()
    last = a.output.roundoff + 4 * FP32_ROUNDOFF
    more = 2 * (a.k_prescaled or a.q_prescaled or a.rounded_scores) + PARTIAL_STORES * a.rounded_partials
    stores_of_rows, stores_of_keys = stores(rows, a.dk_dv_rows) + more, stores(terms, a.dq_keys) + more
    of_rows = a.output.roundoff * (stores_of_rows + a.dk_dv_per_head)
    of_keys = a.output.roundoff * stores_of_keys
    heads = p.heads_q // p.heads_kv if a.dk_dv_per_head else 0
    times = 1 + heads + max(stores_of_rows, stores_of_keys) * max(1.0, 2 * scale)
    tiny = a.output.underflow * times + rows * 2.0**-126
    accumulated = rows * a.accumulate + of_rows

    # sum_j dk_j = sm_scale sum_i (sum_j dS_ij) q_i, and the inner sum is 0
    size_s = 2 * s.grad_p * (1 + s.weight)
    size_q = s.q.abs()
    per_row = scale * (s.grad_s + (accumulated + a.operand_rounding) * size_s)[..., None] * size_q
    dk_bound = per_row.sum(-2) + last * dk.abs().sum(-2) + terms * tiny
    # each row's weights sum to 1 up to the error of lse
    size_dout = s.dout.abs() * s.live[:, None]
    of_weights = (
        s.weight + a.weights.roundoff + a.operand_rounding + terms * a.weights.underflow + accumulated
    )
    dv_bound = (of_weights[..., None] * size_dout).sum(-2) + last * dv.abs().sum(-2) + terms * tiny
    # both sides are sm_scale sum_ij dS_ij q_i.k_j; the two passes round dS each for itself
    summed = max(accumulated, terms * a.accumulate + of_keys) + a.operand_rounding
    summed += (a.k_prescaled + a.q_prescaled + 2 * a.rounded_scores) * a.weights.roundoff
    inner = (s.score * (s.grad_s + summed * size_s)).sum(-1)
    rounded = (last * (dq * s.q).abs()).sum((-2, -1)) + (last * (dk * s.k).abs()).sum((-2, -1))
    tiny_dq = tiny + scale * atomic_flush(a, terms)
    floors = tiny_dq * size_q.sum((-2, -1)) + tiny * s.k.abs().sum((-2, -1))
    pair_bound = 2 * inner + rounded + floors
    return [
        Check(
            claim="rows of dS sum to 0, so the sum of dk over keys is 0",
            tensor="dk",
            expression="dk.double().sum(-2)",
            actual=dk.sum(-2),
            expected=torch.zeros_like(dk_bound),
            bound=dk_bound,
            call=got.call,
        ),
        Check(
            claim="the sum of dv over keys is the sum of dout over rows that see a key",
            tensor="dv",
            expression="dv.double().sum(-2)",
            actual=dv.sum(-2),
            expected=(s.dout * s.live[:, None]).sum(-2),
            bound=dv_bound,
            call=got.call,
        ),
        Check(
            claim="<dq, q> = <dk, k> for each key head and its group",
            tensor="dq",
            expression="(dq.double() * q.double()).sum((-2, -1)).unflatten(1, (k.shape[1], -1)).sum(-1)",
            actual=(dq * s.q).sum((-2, -1)),
            other_expression="(dk.double() * k.double()).sum((-2, -1))",
            expected=(dk * s.k).sum((-2, -1)),
            bound=pair_bound,
            call=got.call,
            other=got.call,
        ),
    ]
