"""Bounds of equations between inputs and outputs, from norms alone: they take O(length), where others take O(length^2).

Each bound is made of the terms of the other modules, with the largest values that |S|, |P| and |dP| can have.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF, PARTIAL_STORES, Arithmetic
from reference.bounds.backward import atomic_flush, stores_in_between, stores_in_group
from reference.bounds.exact import FLOAT32_SAFE
from reference.bounds.forward import SUBNORMAL_FLUSH, fused_overflow, merge_error, part_error
from reference.bounds.scores import LARGEST_EXPONENT, scaled_by_root
from reference.heads import fold
from reference.masks import visible

SECOND_ORDER = 1.01
"""Covers products of two relative errors, where all of them together are below a hundredth."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Folded float64 inputs, and how large what is computed from them can be.

    Attributes:
        q, dout (B, H, R, D), k, v (B, H, N, D): folded inputs.
        group: how many query heads read one key head.
        sm_scale: the scale of the scores.
        live: (B, H, R) which rows see a key.
        score: |S_ij| <= |sm_scale| |q_i| max_j |k_j| (Cauchy-Schwarz), (B, H, R).
        weight: relative error of any weight and of l, from such scores, (B, H, R).
        largest_v: max |v| by column, (B, H, 1, D).
        grad_p: |dP_ij| <= |dout_i| max_j |v_j|, (B, H, R).
        grad_s: error of sum_j |dS_ij| of a row, (B, H, R).
        safe: whether no product leaves float32, and no gradient its format.
        known: whether scores err so little that anything is known of exp(S - lse).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    group: int
    sm_scale: float
    live: Tensor
    score: Tensor
    weight: Tensor
    largest_v: Tensor
    grad_p: Tensor
    grad_s: Tensor
    safe: bool
    known: bool


def sizes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    a: Arithmetic,
    *,
    causal: bool,
    sm_scale: float,
    alignment: str,
    gradients: bool,
) -> Sizes:
    """Return the sizes of a call with q and dout (B, heads_q, seqlen_q, D), k and v (B, H, N, D), none of them empty.

    ``gradients`` says whether the kernel computes any: a call in which these may overflow is then not ``safe``.
    """
    seqlen_q, heads_kv, group = q.shape[2], k.shape[1], q.shape[1] // k.shape[1]
    q, dout = fold(q, heads_kv).double(), fold(dout, heads_kv).double()
    k, v = k.double(), v.double()
    terms, head_dim, v_head_dim = k.shape[2], k.shape[3], v.shape[3]
    seen = visible(seqlen_q, terms, causal, alignment, q.device)
    live = torch.ones(seqlen_q, dtype=torch.bool, device=q.device) if seen is None else seen.any(-1)
    live = live.repeat(group)
    key, value = k.norm(dim=-1).amax(-1, keepdim=True), v.norm(dim=-1).amax(-1, keepdim=True)
    product = q.norm(dim=-1) * key
    score = abs(sm_scale) * product
    length = math.log(max(terms, 1))
    rescalings = math.ceil(terms / a.tile_min) + 1
    # A weight errs by its score, by 4|S| + 4|S - lse| + 5|lse| where |lse| <= score + log n, by rescalings, by the sum
    # and the logarithm of l, and by what lazy rescaling adds.
    weight = (
        a.score_accumulation(head_dim) * score
        + 2 * a.operand_rounding * score
        + FP32_ROUNDOFF * (17 * score + 9 * length)
        + (rescalings + 2) * (a.exp_error + 2 * FP32_ROUNDOFF)
        + (terms + 2) * FP32_ROUNDOFF
        + a.log_error * max(1.0, length + a.lag)
        + 4 * FP32_ROUNDOFF * a.lag
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
    if a.qk_prescaled:
        operands = q.abs().sum(-1) + k.abs().sum(-1).amax(-1, keepdim=True)
        of_score, below = scaled_by_root(a, sm_scale, operands, head_dim)
        weight = weight + of_score * score + below
    if a.rounded_scores:
        floors = 2 * a.weights.underflow * max(1.0, abs(sm_scale))
        weight = weight + a.weights.roundoff * (5 * score + 4) + floors
    if a.l_from_rounded_p:
        weight = weight + a.weights.roundoff + terms * a.weights.underflow
    known = not weight.numel() or float(weight.amax()) < LARGEST_EXPONENT
    weight = torch.expm1(2 * weight.clamp_max(LARGEST_EXPONENT))
    largest_v = v.abs().amax(-2, keepdim=True)
    grad_p = dout.norm(dim=-1) * value
    # dS errs by weights (2 |dP| each), casts, the dot products of dP and delta, and the stored out in delta.
    stored = 2 * weight + a.weights.roundoff + a.operand_rounding + a.output.roundoff + terms * a.accumulate
    stored = stored + merge_error(a, terms) + PARTIAL_STORES * a.rounded_partials * a.output.roundoff
    # Each weight of a part's own softmax errs, and these sum to 1 in each part; so do four terms of dS, of 2 |dP| each.
    stored = stored + 8 * PARTIAL_STORES * a.difference_error
    casts = (2 + a.ds_from_rounded_p + 6 * a.rounded_scores) * a.weights.roundoff
    relative = 2 * weight + casts + 2 * v_head_dim * a.accumulate + 6 * FP32_ROUNDOFF
    floor = terms * a.weights.underflow / min(a.ds_units(sm_scale)) * (1 + grad_p)
    grad_s = (
        (2 * relative + 4 * a.operand_rounding + stored) * grad_p
        + floor
        + terms * SUBNORMAL_FLUSH * (1 + grad_p)
    )
    out_floor = a.output.underflow * dout.abs().sum(-1)
    # q.k may overflow before it is scaled, even where the scale is 0.
    summed = largest_v * max(terms, 1) * a.largest_weight
    largest = score, product, grad_p * product, summed, dout.abs().sum()
    peak = max(float(x.amax()) for x in largest)
    # What is scaled or rounded before the softmax may overflow its format; so may dS and gradients, if there are any.
    top = 0.25 * min(a.weights.maximum, a.output.maximum)
    half = top if gradients else math.inf
    rows = seqlen_q * max(1, group)
    gradient = float(grad_p.amax()) * max(1.0, float(key.amax()), float(q.norm(dim=-1).amax()))
    safe = peak < FLOAT32_SAFE and 2 * gradient * max(1.0, abs(sm_scale)) * max(terms, rows) < half
    safe = safe and float(dout.abs().sum(-2).amax()) < half and math.isfinite(peak)
    if a.k_prescaled:
        safe = safe and float(key.amax()) * abs(sm_scale) < top
    if a.q_prescaled:
        safe = safe and float(q.norm(dim=-1).amax()) * abs(sm_scale) < top
    if a.qk_prescaled:
        operand = max(float(key.amax()), float(q.norm(dim=-1).amax()))
        safe = safe and operand * math.sqrt(abs(sm_scale)) < top
    if a.rounded_scores:
        safe = safe and float(product.amax()) * max(1.0, abs(sm_scale)) < top
    return Sizes(
        q=q,
        k=k,
        v=v,
        dout=dout,
        group=group,
        sm_scale=sm_scale,
        live=live,
        score=score,
        weight=weight,
        largest_v=largest_v,
        grad_p=grad_p,
        grad_s=grad_s + out_floor,
        safe=safe,
        known=known,
    )


def hull_bound(s: Sizes, a: Arithmetic) -> Tensor:
    """How far out may be from the hull of the rows of v, (B, H, R, D)."""
    terms = s.k.shape[2]
    relative = _share(s, a, a.operand_rounding)
    # An infinite weight makes NaN of a v that is 0.
    of_weights = torch.where(relative.isinf(), math.inf, relative * SECOND_ORDER * s.largest_v)
    return of_weights + a.output.underflow + terms * SUBNORMAL_FLUSH


def ones_bound(s: Sizes, a: Arithmetic) -> Tensor:
    """How far out may be from 1 where v is 1, which no format of operands rounds, (B, H, R, 1)."""
    return SECOND_ORDER * _share(s, a, 0.0)


def _share(s: Sizes, a: Arithmetic, operand_rounding: float) -> Tensor:
    """How far out may leave its hull, (B, H, R, 1), relative to the largest v.

    It does by casts of P and v, accumulation, the sum l, merges, division and the final rounding. Weights do not sum
    to 1 where l is the sum of rounded P, where parts have weights of their own, and where l or the out of a part is
    rounded as well. Nothing is known where a weight may be infinite (``fused_overflow``).
    """
    terms = s.k.shape[2]
    relative = (
        a.weights.roundoff
        + operand_rounding
        + 2 * a.accumulation(terms)
        + terms * (a.weights.underflow + FP32_ROUNDOFF)
        + merge_error(a, terms)
        + a.div_error
        + a.output.roundoff
    )
    relative += (4 * a.rounded_scores + PARTIAL_STORES * a.rounded_partials) * a.output.roundoff
    relative += 2 * a.difference_error
    relative = 2 * relative if a.l_from_rounded_p else relative
    of_parts = part_error(a, s.score, terms) if a.merged_by_lse else 0.0
    share = torch.zeros_like(s.score) + relative + of_parts
    return share.masked_fill(fused_overflow(s.score, s.v), math.inf)[..., None]


def sums_bounds(s: Sizes, a: Arithmetic, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of sum_j dk_j = 0 and of sum_j dv_j = sum_i dout_i, (B, H, D), and of <dq, q> = <dk, k>, (B, H).

    ``dq`` (B, H, R, D), ``dk`` and ``dv`` (B, H, N, D) are the kernel's own, folded and float64.
    """
    rows, terms = s.q.shape[2], s.k.shape[2]
    scale = abs(s.sm_scale)
    last = a.output.roundoff + 4 * FP32_ROUNDOFF
    is_scaled = a.k_prescaled or a.q_prescaled or a.qk_prescaled or a.rounded_scores
    more = 2 * is_scaled + PARTIAL_STORES * a.rounded_partials
    stores_of_rows = stores_in_between(rows, a.dk_dv_rows) + more
    stores_of_keys = stores_in_between(terms, a.dq_keys) + more
    of_heads = stores_in_group(a, s.group)
    of_rows = math.expm1(a.output.roundoff * (stores_of_rows + of_heads))
    of_keys = math.expm1(a.output.roundoff * stores_of_keys)
    heads = s.group + of_heads - 1 if of_heads else 0
    times = 1 + heads + max(stores_of_rows, stores_of_keys) * max(1.0, 2 * scale)
    tiny = a.output.underflow * times + rows * SUBNORMAL_FLUSH
    accumulated = rows * a.accumulate + of_rows

    # sum_j dk_j = sm_scale sum_i (sum_j dS_ij) q_i, and the exact inner sum is 0.
    size_s = 2 * s.grad_p * (1 + s.weight)
    size_q = s.q.abs()
    per_row = scale * (s.grad_s + (accumulated + a.operand_rounding) * size_s)[..., None] * size_q
    dk_bound = per_row.sum(-2) + last * dk.abs().sum(-2) + terms * tiny
    # The weights of a row sum to 1, but for the error of lse.
    size_dout = s.dout.abs() * s.live[:, None]
    of_weights = (
        s.weight
        + a.weights.roundoff
        + a.operand_rounding
        + terms * a.weights.underflow
        + accumulated
        + PARTIAL_STORES * a.difference_error
    )
    dv_bound = (of_weights[..., None] * size_dout).sum(-2) + last * dv.abs().sum(-2) + terms * tiny
    # Both sides are sm_scale sum_ij dS_ij q_i.k_j, but dq and dk each round dS for themselves.
    summed = max(accumulated, terms * a.accumulate + of_keys) + a.operand_rounding
    summed += (a.k_prescaled + a.q_prescaled + 2 * (a.qk_prescaled + a.rounded_scores)) * a.weights.roundoff
    inner = (s.score * (s.grad_s + summed * size_s)).sum(-1)
    rounded = (last * (dq * s.q).abs()).sum((-2, -1)) + (last * (dk * s.k).abs()).sum((-2, -1))
    tiny_dq = tiny + scale * atomic_flush(a, terms)
    floors = tiny_dq * size_q.sum((-2, -1)) + tiny * s.k.abs().sum((-2, -1))
    return dk_bound, dv_bound, 2 * inner + rounded + floors
