"""Bounds of dq, dk, dv, dbias and dsinks.

Gradients are judged at the kernel's own stored out and lse ("teacher-forced") wherever the kernel computes them from
these, so that an error of the forward is not blamed on the backward. Where the kernel returns no out or lse, or its
backward does not use it, the exact one takes its place and the forward's bound is carried through: the bound of lse
into every weight, that of out into delta.

What is stored per query head in the output's format (``Arithmetic.dk_dv_per_head``) rounds, underflows and overflows
there. The sum over the group, and its partial sums, may be finite where the part of one head is not. An element
counts as lost where the sizes of the parts together reach the largest number of the format.

Where the parts g_1, ..., g_G of a group's heads are added one after the other in that format, in any order
(``Arithmetic.rounded_group_sums``), each running sum s_t = g_1 + ... + g_t is rounded once more, for t from 2 to G; the
last of these roundings is the last store of every design. By rule 1 the G - 2 others err by u sum |g_h| each, the
roundings before included: together with the store of each part by ((1 + u)^(G - 1) - 1) sum |g_h|. By rule 2, each s_t
is as large as ``probable_partial_sum`` says, |s| + 3 r with r the root of sum g_h^2, and the G - 2 errors of u times
that add up like a root. Parts that are all equal do not round independently. They err by u 2^e in each step where s_t
is between 2^e and 2^(e + 1), so that x = s_G / 2^e of the last e leaves at most u G |s_G| (x - 2/3) / x^2: 3/8 u G |s|
for x = 4/3, the worst. As r is |s| / sqrt(G) then, that is less than four roots of G times u (|s| + 3 r) up to a group
of 171.

Notation, besides that of the package: G = |dout| |v|^T, which is at least |dP|, of shape (B, H, R, N).

Under dropout (``Exact.keep``: z) dv is the sum of P_ij z_ij dout_i, and dP_ij = z_ij dout_i . v_j. In dv, P z then
takes the place of P, and z G that of G everywhere. A product with z adds 2 U to the relative error of the other
factor, and if P is cast before it is multiplied with z, its underflow is multiplied with 1 / (1 - p). In
dS = P (dP - delta), P is not multiplied with z, and delta is the row sum of dout * out as without dropout.

Under a soft-cap c, dS is multiplied by s = 1 - t^2, where t = tanh(x / c) is made again of the score: it errs by
d = e_S / c, e_S being the error of the score, and s by at most 2 |t| d + d^2 + 3 U, and never by more than 1. dS may be
cast before that product or after it. A bias and a sink have no part in dS beside that in P.

Where autograd differentiates merges by difference (``Arithmetic.merged_by_difference``), what reaches a part is
g - s g at each later merge, which errs by ``Arithmetic.difference_error`` of dout in all, as the moves of out do. The P
of a part's own softmax is 1 at most, so in dv each weight errs by as much, absolutely. dS of a part is its P times
dP - delta of the part, plus the gradient of its lse, s (1 - s) g (out_s - out), and that of the running lse, which the
factors 1 - s of later merges multiply: each of the four errs by ``difference_error`` of the largest |dP| of the row.

If rows are some of a longer sequence, and dout is 0 in all others (``Exact.is_part``), dk and dv are the same sums:
what other rows add is 0, by which no running sum changes. A design that stores them after so many rows may store them
after each of these rows, as they may lie apart.

A bias is added after the soft-cap and after the scale, so dbias is the sum of dS = P (dP - delta) before both, over the
n rows, heads and sequences that share an entry of the bias; n = 1 where it has an entry for each score. Each dS errs as
it does in dq and dk. If it is stored, or is the gradient of an expanded bias, it is rounded to the format of the output
before it is summed, by u |dS|, or by the underflow of that format below u times as much; if n = 1, that is the last
store itself. A dS that is made from the P that was cast errs by the cast of P as well. A sum of n terms in float32 errs
by n U sum |dS|, and by 2 n 2^-126 where atomic adds flush the addend and the sum (PTX ISA, atom.add). By rule 2 the
casts of different dS count as their root of squares, as in dq and dk. Where the bias was multiplied by log2 e and
rounded (``Arithmetic.rounded_bias``), what is summed is ln 2 dS, and each dS or their sum is rounded once more before
the factor log2 e is put back: that is one store more, whose underflow counts 1 / ln 2 < 2 times.

A gradient g of lse adds P_ij g_i to dS_ij, so that delta - g takes the place of delta, whether one subtracts g from
delta or autograd adds P g to dS. In the second case each term errs and is cast by itself, so that P |g| is added to
the size of dS, and |g| to that of delta.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF, PARTIAL_STORES, Arithmetic
from reference.bounds.accumulation import multiplicity, probable_partial_sum, probable_steps
from reference.bounds.exact import FLOAT32_SAFE, Exact, largest, operand_size
from reference.bounds.forward import SUBNORMAL_FLUSH, ForwardBounds, merge_error, sum_error
from reference.bounds.scores import LARGEST_EXPONENT, WeightError, weight_error
from reference.bounds.sinks import OfSinks, sinks_gradient
from reference.heads import unfold
from reference.masks import hide
from reference.score_rule import broadcast


@dataclass(frozen=True)
class GradientBounds:
    """Expected dq (B, H, R, D), dk and dv (B, H, N, D) in float64, and the bounds of their errors.

    dbias, with the shape of the bias, and dsinks (heads_q,) are None, with their bounds, if they are not asked for.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_bound: Tensor
    dk_bound: Tensor
    dv_bound: Tensor
    dbias: Tensor | None = None
    dbias_bound: Tensor | None = None
    dsinks: Tensor | None = None
    dsinks_bound: Tensor | None = None


def backward_bounds(
    e: Exact,
    dout: Tensor,
    arithmetic: Arithmetic,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    forward: ForwardBounds | None = None,
    safety: float | None = None,
    clustered: bool = True,
    bias_shape: Sequence[int] | None = None,
    keys: Tensor | None = None,
    dlse: Tensor | None = None,
    of_sinks: bool = False,
) -> GradientBounds:
    """Return the gradients and their bounds, by rule 1 (``safety=None``) or rule 2, which is never above rule 1.

    ``dout`` (B, H, R, D), ``out`` (B, H, R, D) and ``lse`` (B, H, R) are folded and float64; out and lse are the
    kernel's own (teacher-forced). If either is None, the exact one is used and ``forward`` must hold its rule-1
    bounds. ``safety`` and ``clustered`` are those of ``forward_bounds``. With ``bias_shape``, the shape of a bias
    (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k), there is dbias as well. With ``keys`` (number,) int64, dk and
    dv are those of these keys alone. ``dlse`` (B, H, R), float64, is the gradient of lse, and ``of_sinks`` asks for
    dsinks, whose bound is that of rule 1. Raises ValueError if out or lse is missing and ``forward`` is too.
    """
    a, rows, terms = arithmetic, e.q.shape[-2], e.k.shape[-2]
    t = _terms(e, dout, a, out, lse, forward, safety, clustered, dlse)
    dbias = None if bias_shape is None else _bias_gradient(e, t, a, bias_shape, safety, clustered)
    scale, last = abs(e.sm_scale), a.output.roundoff
    # If an operand was scaled and rounded, the gradient of the scaled operand may be stored before it is scaled back.
    q_first, k_first = (x or a.qk_prescaled or a.rounded_scores for x in (a.q_prescaled, a.k_prescaled))
    parts = PARTIAL_STORES * a.rounded_partials
    in_between = stores_in_between(rows, 1 if e.is_part and a.dk_dv_rows else a.dk_dv_rows)
    stores_of_rows = in_between + k_first + parts
    stores_of_keys = stores_in_between(terms, a.dq_keys) + q_first + parts
    of_rows = math.expm1(stores_of_rows * last) + q_first * a.weights.roundoff
    of_keys = math.expm1(stores_of_keys * last) + k_first * a.weights.roundoff
    dq = _product(t.grad_s, e.k, a, of_keys, safety, clustered)
    k = t if keys is None else t.of_some(keys)
    dv = _product(k.weights.transposed(), dout, a, of_rows, safety, clustered)
    dk = _product(k.grad_s.transposed(), e.q, a, of_rows, safety, clustered)
    dq_error, dk_error, dv_error = dq.error, dk.error, dv.error
    # dq is accumulated with round(k * sm_scale * log2 e) in units of ln 2, dk with round(q * sm_scale). Where both are
    # multiplied by the root r, the gradients of both products are multiplied by r as well, and what underflows is too.
    whole = a.q_prescaled or a.k_prescaled or a.rounded_scores or not a.qk_prescaled
    factor = min(scale if whole else math.inf, math.sqrt(scale) if a.qk_prescaled else math.inf)
    below = a.weights.underflow / max(factor, 1e-300)
    if k_first:
        dq_error += below * t.grad_s.size.sum(-1, keepdim=True)
    if q_first:
        dk_error += below * k.grad_s.size.sum(-2)[..., None]

    # Each store may underflow. dq and dk may be stored before or after they are scaled, which may include log2 e.
    floor = a.output.underflow
    scale_back = scale / math.log(2) if a.k_prescaled or a.q_prescaled or a.qk_prescaled else scale
    of_heads = stores_in_group(a, e.group)
    heads = e.group + of_heads - 1 if of_heads else 1
    dq_floor = (1 + stores_of_keys * max(1.0, scale_back)) * floor + scale * atomic_flush(a, terms)
    dk_floor = (heads + stores_of_rows * max(1.0, scale_back)) * floor
    dv_floor = (heads + stores_of_rows) * floor + rows * SUBNORMAL_FLUSH
    scaled = last + 4 * FP32_ROUNDOFF
    dq_bound = dq_error.mul_(1 + last).add_(dq.value.abs(), alpha=scaled).mul_(scale).add_(dq_floor)
    dq_bound.masked_fill_(e.empty[..., None], 0.0)
    # dq and dk may overflow before they are scaled, or after, and any of the three at a store in between.
    dq_most, dk_most = (
        min(FLOAT32_SAFE, a.output.maximum if stores else math.inf) / max(1.0, scale)
        for stores in (stores_of_keys, stores_of_rows)
    )
    dq_lost, dk_lost = t.rows_lost | ~(dq.size < dq_most), k.keys_lost | ~(dk.size < dk_most)
    dv_lost = t.values_lost | ~(dv.size < a.output.maximum) if stores_of_rows else t.values_lost
    if of_heads:
        of_group = (1 + last) ** of_heads - 1
        dk_parts, dk_stores = _stores_of_group(k.grad_s, e.q, dk, e.group, of_heads, last, safety)
        dv_parts, dv_stores = _stores_of_group(k.weights, dout, dv, e.group, of_heads, last, safety)
        dk_error.add_(dk_stores)
        dv_error.add_(dv_stores)
        dk_lost = dk_lost | ~(dk_parts * scale * (1 + of_group) < a.output.maximum)
        dv_lost = dv_lost | ~(dv_parts * (1 + of_group) < a.output.maximum)
    dk_bound = dk_error.mul_(1 + last).add_(dk.value.abs(), alpha=scaled).mul_(scale).add_(dk_floor)
    dv_bound = dv_error.mul_(1 + last).add_(dv.value.abs(), alpha=last).add_(dv_floor)
    return GradientBounds(
        dq=dq.value.mul_(e.sm_scale),
        dk=dk.value.mul_(e.sm_scale),
        dv=dv.value,
        dq_bound=dq_bound.masked_fill_(dq_lost, math.inf),
        dk_bound=dk_bound.masked_fill_(dk_lost, math.inf),
        dv_bound=dv_bound.masked_fill_(dv_lost, math.inf),
        **({} if dbias is None else {"dbias": dbias[0], "dbias_bound": dbias[1]}),
        **(sinks_gradient(e, t.sinks, a, t.of_scores.casts, t.products_lost) if of_sinks else {}),
    )


@dataclass(frozen=True)
class _Operand:
    """One side of a matrix product, P or dS, (B, H, R, N).

    Attributes:
        value: the exact value.
        size: |value|.
        error: its error before the cast, and that by underflow in the cast.
        weights: P. Entries of equal P may round alike even where their values differ: dS = P (dP - delta), and over a
            uniform P a dP of few bits is a lattice, all of whose points can lie at the same offset from the grid of
            the cast (found on fp16 with head_dim 1: 256 keys of equal weight, all of whose dS rounded upwards).
        seen: which entries are seen; None if all are.
        casts: how many casts it errs by: 2 where dS is made from a P that was cast.
    """

    value: Tensor
    size: Tensor
    error: Tensor
    weights: Tensor
    seen: Tensor | None
    casts: int = 1

    def of_some(self, keys: Tensor) -> "_Operand":
        """Return the operand of some keys alone."""
        seen = None if self.seen is None else self.seen[..., keys]
        value, size, error, weights = (
            x[..., keys] for x in (self.value, self.size, self.error, self.weights)
        )
        return _Operand(value, size, error, weights, seen, self.casts)

    def transposed(self) -> "_Operand":
        seen = None if self.seen is None else self.seen.mT
        return _Operand(self.value.mT, self.size.mT, self.error.mT, self.weights.mT, seen, self.casts)


@dataclass(frozen=True)
class _Product:
    """A matrix product before it is scaled and stored: its value, its error, the size of its partial sums."""

    value: Tensor
    error: Tensor
    size: Tensor


@dataclass(frozen=True)
class _Terms:
    """P and dS with their errors, and the rows, keys and columns of v that an overflow of float32 may spoil.

    ``of_scores`` is dS before a soft-cap's slope, and its error that before any cast of it. ``sinks`` has what dsinks
    is made of. ``products_lost`` are the rows in which a product may overflow, whatever comes of the cast of dS.
    """

    weights: _Operand
    grad_s: _Operand
    of_scores: _Operand
    sinks: OfSinks
    products_lost: Tensor
    rows_lost: Tensor
    keys_lost: Tensor
    values_lost: Tensor

    def of_some(self, keys: Tensor) -> "_Terms":
        """Return what dk and dv of some keys alone are made of."""
        return replace(
            self,
            weights=self.weights.of_some(keys),
            grad_s=self.grad_s.of_some(keys),
            keys_lost=self.keys_lost[..., keys, :],
        )


def _terms(
    e: Exact,
    dout: Tensor,
    a: Arithmetic,
    out: Tensor | None,
    lse: Tensor | None,
    forward: ForwardBounds | None,
    safety: float | None,
    clustered: bool,
    dlse: Tensor | None,
) -> _Terms:
    if forward is None and (out is None or lse is None):
        raise ValueError("backward_bounds needs the kernel's out and lse, or the forward bounds")
    shift = (e.lse if lse is None else lse).masked_fill(e.empty, 0.0)
    if lse is None:
        p, extra = e.weights, forward.lse + a.div_error  # type: ignore[union-attr]  # checked above
    else:
        p = (e.scores - shift[..., None]).exp_()
        # The kernel may have kept its natural lse for the backward; the lse of base 2 differs by its conversion.
        extra = a.lse_conversion * shift.abs()
    err = weight_error(e, a, shift=shift, extra=extra, shift_terms=2.0)
    grad_p = e.dropped(dout @ e.v.mT)
    undropped = operand_size(dout, a.product_floor) @ operand_size(e.v, a.product_floor).mT
    products = e.dropped(undropped)
    # Relative error of dP, whose size is |dP| <= G: that of the dot product, and the rounding of its result.
    of_grad_p = e.v.shape[-1] * a.accumulate + 2 * a.operand_rounding + FP32_ROUNDOFF + e.of_keep
    rounded = a.weights.roundoff if a.rounded_scores else 0.0
    of_grad_p += 2 * rounded  # dP is rounded as a product, and again as its distance to delta.
    of_products = products * p
    out_error: Tensor | None = None
    apart: Tensor | float = 0.0
    if a.delta == "out" and out is not None:
        delta = (out * dout).sum(-1, keepdim=True)
    else:
        delta = (p * grad_p).sum(-1, keepdim=True)
        if a.delta == "any" and out is not None:
            apart = ((out * dout).sum(-1, keepdim=True) - delta).abs()
        else:
            out, out_error = e.out, None if forward is None else forward.out
    sums = _Sums(dout, out, out_error, apart, p, grad_p, of_products, of_grad_p)
    delta_error = _delta_error(e, a, err, sums, safety, clustered)
    grad_s = (grad_p - delta).mul_(p)
    size, size_delta = grad_s.abs(), delta.abs()
    if dlse is not None:
        of_lse = dlse[..., None]
        grad_s.addcmul_(p, of_lse)
        size.addcmul_(p, of_lse.abs())
        delta, size_delta = delta - of_lse, size_delta + of_lse.abs()
    relative = torch.addcmul(err.intercept, err.slope, err.size)
    # The error of dS: weight errors times errors of dP and delta; roundings of dP - delta and of the product; the cast
    # of P, if dS is made from the P that was cast; and exp2's flush of weights below 2^-126 to 0.
    of_delta = torch.addcmul(
        (3 * FP32_ROUNDOFF + 2 * rounded) * size_delta, err.factor + rounded, delta_error
    )
    below = a.weights.underflow if a.ds_from_rounded_p else 0.0
    cast = 2 * rounded  # dS is rounded before and after it is scaled.
    below += 4 * a.weights.underflow if a.rounded_scores else 0.0
    flush = (
        (largest(hide(products, e.seen), -1) + size_delta + delta_error).add_(1).mul_(SUBNORMAL_FLUSH + below)
    )
    if a.merged_by_difference:
        flush = flush + (4 * a.difference_error) * (largest(hide(products, e.seen), -1) + size_delta)
    error = (
        (relative + (FP32_ROUNDOFF + cast * err.factor))
        .mul_(size)
        .addcmul_(of_products, err.factor * of_grad_p + 3 * FP32_ROUNDOFF)
        .addcmul_(p, of_delta)
        .add_(flush)
    )
    error = hide(error, e.seen)
    smallest_unit, largest_unit = a.ds_units(e.sm_scale)
    # An overflow of S, dP or delta spoils all of a row's dS, and through the sum over rows every dk; an
    # overflow in the cast of dS one row and one key. Masked pairs count: their weight is 0, but 0 * inf is
    # NaN, and whether it is computed depends on the tiles.
    cast_ds, most_ds = size + error, min(a.weights.maximum / largest_unit, FLOAT32_SAFE)
    of_scores = _Operand(
        grad_s,
        size,
        error.masked_fill(e.empty[..., None], 0.0),
        p,
        e.seen,
        casts=1 + a.ds_from_rounded_p,
    )
    if e.cap_slope is not None:
        error = error + cast * size
        grad_s, size, error = _through_cap(e, e.cap_slope, (grad_s, size, error), relative)
    largest_delta = (out * dout).abs_().sum(-1, keepdim=True) + delta_error
    # If large scores make lse err by LARGEST_EXPONENT or more, the weights made from it are unknown. A weight above 1
    # comes from a wrong lse of the kernel's own, and may overflow in the cast.
    weights_lost = err.lost | ~(err.log < LARGEST_EXPONENT) | ~(largest(p, -1) < a.weights.maximum)
    largest_term = torch.maximum(largest(undropped, -1) * e.keep_scale, largest_delta)
    if e.leaky is not None:
        weights_lost = weights_lost | e.leaky[..., None]
    row_lost = weights_lost | ~(largest_term < FLOAT32_SAFE)
    if a.rounded_scores:
        row_lost |= ~(largest(grad_p.abs(), -1) * (1 + of_grad_p) < a.weights.maximum)
    dropped, size_dout = e.dropped(p), dout.abs().sum(-2, keepdim=True) * e.keep_scale
    if e.keep is not None:
        relative = relative + e.of_keep * (1 + relative)
    of_dropped = relative.mul_(dropped)
    if a.merged_by_difference:
        of_dropped = hide(of_dropped.add_(a.difference_error), e.seen)
    return _Terms(
        weights=_Operand(
            dropped, dropped, _with_underflow(dropped, of_dropped, a, 1.0 / e.keep_scale, e.seen), p, e.seen
        ),
        grad_s=_Operand(
            grad_s,
            size,
            _with_underflow(size, error, a, smallest_unit, e.seen),
            p,
            e.seen,
            casts=1 + a.ds_from_rounded_p,
        ),
        of_scores=of_scores,
        sinks=OfSinks(delta, delta_error + 3 * FP32_ROUNDOFF * size_delta, shift, extra),
        products_lost=row_lost,
        rows_lost=row_lost | ~(largest(cast_ds, -1) < most_ds),
        keys_lost=row_lost.any(-2, keepdim=True) | ~(largest(cast_ds, -2).mT < most_ds),
        values_lost=weights_lost.any(-2, keepdim=True) | ~(size_dout < FLOAT32_SAFE),
    )


def _bias_gradient(
    e: Exact, t: _Terms, a: Arithmetic, shape: Sequence[int], safety: float | None, clustered: bool
) -> tuple[Tensor, Tensor]:
    """Return dbias (of this shape) and its bound, which the docstring of this module derives."""
    heads_q, dims = e.group * e.k.shape[1], broadcast(shape)
    kept = [dim for dim in range(4) if dim not in dims]

    def terms_of(x: Tensor) -> Tensor:
        """Return x (B, H, R, N) with the terms of each entry of dbias in the last dimension, the entries before it."""
        whole = unfold(x.expand_as(t.of_scores.value), heads_q).permute(*kept, *dims)
        return whole.reshape(*whole.shape[: len(kept)], math.prod(whole.shape[len(kept) :]))

    values, sizes, errors = (terms_of(x) for x in (t.of_scores.value, t.of_scores.size, t.of_scores.error))
    terms, last = values.shape[-1], a.output.roundoff
    value, of_error = values.sum(-1), errors.sum(-1)
    partial_sum = sizes.sum(-1).add_(of_error)
    cast = last if terms > 1 else 0.0
    of_p = (t.of_scores.casts - 1) * a.weights.roundoff
    stores = PARTIAL_STORES * a.rounded_partials + a.rounded_bias
    error = of_error + (cast + of_p + terms * a.accumulate) * partial_sum
    if safety is not None:
        squares = sizes.square()
        if clustered and terms > 1:
            like = terms_of(t.of_scores.weights).clamp_min(TINY).log()
            squares.mul_(multiplicity(like, None, max(cast, of_p)))
        root, size = squares.sum(-1).sqrt_(), value.abs().add_(of_error)
        probable = of_error * (1 + cast + of_p) + (safety * math.hypot(cast, of_p)) * root
        probable.add_(probable_partial_sum(size, root), alpha=a.accumulate * probable_steps(terms))
        error = torch.minimum(error, probable)
    error = error.add_(partial_sum, alpha=math.expm1(stores * last))
    if cast:
        low = (sizes < a.output.underflow / last) & (sizes + errors > 0)
        error.add_(low.sum(-1), alpha=a.output.underflow * (1 + 2 * a.rounded_bias))
    floor = (1 + stores + a.rounded_bias) * a.output.underflow + 2 * terms * SUBNORMAL_FLUSH
    bound = error.mul_(1 + last).add_(value.abs(), alpha=last).add_(floor)
    most = min(a.output.maximum if cast or stores else math.inf, FLOAT32_SAFE)
    lost = terms_of(t.products_lost).any(-1) | ~(partial_sum < most)
    return value.reshape(*shape), bound.masked_fill_(lost, math.inf).reshape(*shape)


def _through_cap(
    e: Exact, slope: Tensor, before: tuple[Tensor, Tensor, Tensor], of_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dS, its size and its error after the soft-cap's slope, from those ``before`` it.

    Scores err by ``of_scores`` (B, H, R, N). The slope where scores are cut off is 0 or 1, whatever the error.
    """
    grad_s, size, error = before
    moved = of_scores / e.softcap if e.softcap else torch.zeros_like(of_scores)
    of_slope = 2 * (1 - slope).sqrt() * moved + moved.square() + 3 * FP32_ROUNDOFF
    of_slope.clamp_max_(1.0)
    error = error * (slope + of_slope) + size * of_slope
    return grad_s * slope, size * slope, error


def _with_underflow(size: Tensor, error: Tensor, a: Arithmetic, unit: float, seen: Tensor | None) -> Tensor:
    """Add what underflow may cost the small entries of what is cast in units of 1 / ``unit`` to their error."""
    underflow = a.weights.underflow / unit
    low = size < underflow / a.weights.roundoff
    return error.add_(low if seen is None else low & seen, alpha=underflow)


@dataclass(frozen=True)
class _Sums:
    """The terms that delta is the sum of: out times dout (B, H, R, D), or P times dP (B, H, R, N).

    ``out_error`` is None if out is the kernel's own. If delta may be either sum, it is the second one that is taken,
    from which that of the kernel's own out is ``apart``. ``of_products`` is P G, and dP errs by ``of_grad_p`` relative
    to G.
    """

    dout: Tensor
    out: Tensor
    out_error: Tensor | None
    apart: Tensor | float
    p: Tensor
    grad_p: Tensor
    of_products: Tensor
    of_grad_p: float

    @property
    def of_terms(self) -> Tensor:
        """P |dP|, (B, H, R, N)."""
        return self.p * self.grad_p.abs()


def _delta_error(
    e: Exact, a: Arithmetic, err: WeightError, s: _Sums, safety: float | None, clustered: bool
) -> Tensor:
    """Error of delta, (B, H, R, 1), computed in the way that ``Arithmetic.delta`` names; the largest for ``any``."""
    ways = {"out": _delta_by_out, "probabilities": _delta_by_probabilities}
    if a.delta in ways:
        return ways[a.delta](e, a, err, s)
    by_weights = _delta_by_probabilities(e, a, err, s) + _delta_by_casts(e, a, err, s, safety, clustered)
    return (
        by_weights
        if a.delta == "weights"
        else torch.maximum(by_weights, s.apart + _delta_by_out(e, a, err, s))
    )


def _delta_by_out(e: Exact, a: Arithmetic, err: WeightError, s: _Sums) -> Tensor:
    """Error of delta as the sum of dout * out over the head dimension: that of the sum, and that of out itself."""
    size = operand_size(s.dout, a.operand_floor)
    error = (
        size.shape[-1] * FP32_ROUNDOFF * (operand_size(s.out, a.operand_floor) * size).sum(-1, keepdim=True)
    )
    return error if s.out_error is None else error + (s.out_error * size).sum(-1, keepdim=True)


def _delta_by_probabilities(e: Exact, a: Arithmetic, err: WeightError, s: _Sums) -> Tensor:
    """Error of delta as the sum of P * dP over the keys: that of each P, of the sum, and of each dP."""
    of_weights = (err.largest + e.k.shape[-2] * FP32_ROUNDOFF) * s.of_terms.sum(-1, keepdim=True)
    return of_weights + err.factor * s.of_grad_p * s.of_products.sum(-1, keepdim=True)


def _delta_by_casts(
    e: Exact, a: Arithmetic, err: WeightError, s: _Sums, safety: float | None, clustered: bool
) -> Tensor:
    """Error that delta gains from casts of P, and from the sums, merges and division that make an unstored out.

    The casts change delta by the same amount in both ways to compute it. With c_j the cast error of P_j, the sum of
    P * dP changes by sum_j c_j dP_j; out, before it is stored, changes by sum_j c_j v_j, and dout . v_j is dP_j.
    """
    terms, of_terms = e.k.shape[-2], s.of_terms
    size, cast = of_terms.sum(-1, keepdim=True), a.weights.roundoff * err.factor
    of_casts = cast * size
    if safety is not None:
        squares = of_terms.square_()
        if clustered:
            squares = squares * multiplicity(s.p.clamp_min(TINY).log(), e.seen, a.weights.roundoff)
        of_casts = torch.minimum(of_casts, safety * cast * squares.sum(-1, keepdim=True).sqrt())
    of_casts = of_casts * (1 + s.of_grad_p)
    products = s.of_products / s.p.clamp_min(TINY)
    flush = a.weights.underflow * hide(products, e.seen).sum(-1, keepdim=True)
    merges = merge_error(replace(a, partial_results=True), terms)
    of_sums = (a.accumulation(terms) + merges) * s.of_products.sum(-1, keepdim=True)
    return of_casts + flush + of_sums + (sum_error(a, terms) + a.div_error) * size


def _stores_of_group(
    x: _Operand, y: Tensor, whole: "_Product", group: int, stores: int, roundoff: float, safety: float | None
) -> tuple[Tensor, Tensor]:
    """Return the sizes of the products x^T y of each query head, summed over the group, and what their stores err by.

    Both are (B, H, N, D). ``whole`` is the product over the group, ``stores`` what ``stores_in_group`` returns.
    """
    by_head = x.value.unflatten(-2, (group, -1)).mT @ y.unflatten(-2, (group, -1))
    sizes = by_head.abs().sum(-3).add_(whole.error)
    error = sizes * ((1 + roundoff) ** stores - 1)
    if safety is not None and stores > 1:
        size, of_parts = whole.value.abs().add_(whole.error), sizes * roundoff
        of_sums = probable_partial_sum(size, by_head.square_().sum(-3).sqrt_()).add_(of_parts)
        steps = min(stores - 1.0, safety * math.sqrt(stores - 1))
        probable = of_sums.mul_(math.expm1(steps * roundoff)).add_(of_parts)
        error = torch.minimum(error, probable)
    return sizes, error


def stores_in_group(a: Arithmetic, group: int) -> int:
    """Count how often dk and dv of a query head are rounded before the last store of the sum over the group.

    They are once if each head's are stored, and in each running sum but the last if these are rounded as well. In a
    group of one head there is no other store than the last.
    """
    if a.rounded_group_sums:
        return group - 1
    return int(a.dk_dv_per_head and group > 1)


def stores_in_between(terms: int, terms_per_store: int | None) -> int:
    """Count how often a running sum is rounded to the output's format before it is scaled and stored for good.

    Each time it errs by a roundoff of the sum of sizes so far, earlier stores included. Storing dk and dv of each
    query head before they are summed over the group is not counted here: it is one such rounding of all of them.
    """
    return 0 if terms_per_store is None else terms // terms_per_store


def atomic_flush(a: Arithmetic, keys: int) -> float:
    """Absolute error of dq, before it is scaled, by atomic adds: each flushes the addend and the sum below 2^-126."""
    return 2 * math.ceil(keys / a.tile_min) * SUBNORMAL_FLUSH if a.dq_atomic else 0.0


def _product(
    x: _Operand, y: Tensor, a: Arithmetic, stores: float, safety: float | None, clustered: bool
) -> _Product:
    """Return the product x y and its error: x is cast to the weights' format, and the sum is float32.

    Intermediate stores add a relative error of ``stores``. Rule 1 adds up the errors of all casts; rule 2 takes the
    root of the sum of their squares.
    """
    terms, cast, size_y = y.shape[-2], a.weights.roundoff, operand_size(y, a.operand_floor)
    value, of_error = x.value @ y, x.error @ size_y
    partial_sum = (x.size @ size_y).add_(of_error)
    always = a.operand_rounding + stores
    error = torch.add(of_error, partial_sum, alpha=always + x.casts * cast + terms * a.accumulate)
    if safety is not None:
        squares = x.size * x.size
        if clustered:
            squares.mul_(multiplicity(x.weights.clamp_min(TINY).log_(), x.seen, cast))
        root, size = (squares @ (y * y)).sqrt_(), value.abs().add_(of_error)
        probable = of_error.mul_(1 + x.casts * cast).add_(root, alpha=safety * math.sqrt(x.casts) * cast)
        probable.add_(probable_partial_sum(size, root), alpha=a.accumulate * probable_steps(terms))
        if always:
            probable.add_(partial_sum, alpha=always)
        if a.weights.truncates:
            probable.add_(size, alpha=x.casts * cast)
        error = torch.minimum(error, probable)
    return _Product(value, error, partial_sum)


TINY = 1e-300
"""Takes the place of 0 under a logarithm and as a divisor."""
