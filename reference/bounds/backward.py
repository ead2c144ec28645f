"""Bounds of dq, dk and dv.

A kernel with a backward of its own is judged at its own stored out and lse ("teacher-forced"), so that an
error is blamed where it was made. Where lse is not to be had, the exact ones are used and the forward's
bounds are carried through: lse's into every weight, out's into delta.

Notation, besides that of the package: B = |dout| |v|^T >= |dP|, (B, H, R, N).

Under dropout (``Exact.keep``: z) dv is the sum of P_ij z_ij dout_i, and dP_ij = z_ij dout_i . v_j; P z then stands
for the P of dv, and z B for B. Both products with z add 2 U to the relative error of what they multiply, and a cast
of P before it underflows by as much times 1 / (1 - p). dS = P (dP - delta) has P as it is, and delta is the row
sum of dout * out as ever.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF, Arithmetic
from reference.bounds.accumulation import multiplicity, probable_accumulation
from reference.bounds.exact import FLOAT32_SAFE, Exact, largest, operand_size
from reference.bounds.forward import SUBNORMAL_FLUSH, ForwardBounds
from reference.bounds.scores import LARGEST_EXPONENT, WeightError, weight_error
from reference.masks import hide


@dataclass(frozen=True)
class GradientBounds:
    """Expected dq (B, H, R, D), dk and dv (B, H, N, D) in float64, and the bounds of their errors."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_bound: Tensor
    dk_bound: Tensor
    dv_bound: Tensor


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
) -> GradientBounds:
    """Gradients and their bounds, by rule 1 (``safety=None``) or rule 2, which is never above rule 1.

    ``dout`` (B, H, R, D) is folded and float64, and so are ``out`` and ``lse``, which are the kernel's own
    (teacher-forced). Without them, ``forward`` holds the rule-1 bounds of the exact ones. ``safety`` and
    ``clustered`` are those of ``forward_bounds``. Raises ValueError where neither is given.
    """
    a, rows, keys = arithmetic, e.q.shape[-2], e.k.shape[-2]
    t = _terms(e, dout, a, out, lse, forward)
    scale, last = abs(e.sm_scale), a.output.roundoff
    stores_of_rows, stores_of_keys = _stores(rows, a.dk_dv_rows), _stores(keys, a.dq_keys)
    of_rows = math.expm1((stores_of_rows + a.dk_dv_per_head) * last)
    of_keys = math.expm1(stores_of_keys * last) + (a.weights.roundoff if a.k_prescaled else 0.0)
    dv = _product(t.weights.transposed(), dout, a, of_rows, safety, clustered)
    dq = _product(t.grad_s, e.k, a, of_keys, safety, clustered)
    dk = _product(t.grad_s.transposed(), e.q, a, of_rows, safety, clustered)
    dq_error = dq.error
    if a.k_prescaled:
        # dq is accumulated with round(k * sm_scale * log2 e), in units of ln 2
        below = a.weights.underflow * math.log(2) / max(scale, 1e-300)
        dq_error = dq_error + below * t.grad_s.size.sum(-1, keepdim=True)

    # What is stored may underflow each time: dq and dk before or after they are scaled.
    floor, heads = a.output.underflow, rows if a.dk_dv_per_head else 1
    dq_floor = (1 + stores_of_keys * max(1.0, scale)) * floor + scale * atomic_flush(a, keys)
    dk_floor = (heads + stores_of_rows * max(1.0, scale)) * floor
    dv_floor = (heads + stores_of_rows) * floor + rows * SUBNORMAL_FLUSH
    safe, scaled = FLOAT32_SAFE / max(1.0, scale), last + 4 * FP32_ROUNDOFF
    dq_bound = (dq_error * (1 + last)).add_(dq.value.abs(), alpha=scaled).mul_(scale).add_(dq_floor)
    dq_bound = dq_bound.masked_fill_(e.empty[..., None], 0.0)
    # Before it is scaled, or after.
    largest = a.output.maximum / max(1.0, scale)
    dq_lost = t.rows_lost | ~(dq.size < safe) | _overflows(dq.size, stores_of_keys, largest)
    dk_lost = t.keys_lost | ~(dk.size < safe) | _overflows(dk.size, stores_of_rows, largest)
    dv_lost = t.values_lost | _overflows(dv.size, stores_of_rows, a.output.maximum)
    dk_bound = (dk.error * (1 + last)).add_(dk.value.abs(), alpha=scaled).mul_(scale).add_(dk_floor)
    dv_bound = (dv.error * (1 + last)).add_(dv.value.abs(), alpha=last).add_(dv_floor)
    return GradientBounds(
        dq=dq.value * e.sm_scale,
        dk=dk.value * e.sm_scale,
        dv=dv.value,
        dq_bound=dq_bound.masked_fill_(dq_lost, math.inf),
        dk_bound=dk_bound.masked_fill_(dk_lost, math.inf),
        dv_bound=dv_bound.masked_fill_(dv_lost, math.inf),
    )


@dataclass(frozen=True)
class _Operand:
    """One side of a matrix product, (B, H, R, N).

    Its value, |value|, the error it has before its cast and by underflow in the cast; the weights P, and
    which entries are seen. Entries of equal P may round alike even where they differ: dS = P (dP - delta),
    and over a uniform P a dP of few bits is a lattice, all of whose points can lie at the same offset from
    the grid of the cast (found on fp16 with head_dim 1: 256 keys of equal weight, all of whose dS rounded
    upwards).
    """

    value: Tensor
    size: Tensor
    error: Tensor
    weights: Tensor
    seen: Tensor | None

    def transposed(self) -> "_Operand":
        seen = None if self.seen is None else self.seen.mT
        return _Operand(self.value.mT, self.size.mT, self.error.mT, self.weights.mT, seen)


@dataclass(frozen=True)
class _Product:
    """A matrix product before it is scaled and stored: its value, its error, the size of its partial sums."""

    value: Tensor
    error: Tensor
    size: Tensor


@dataclass(frozen=True)
class _Terms:
    """P and dS with their errors; rows, keys and columns of v where float32 may overflow."""

    weights: _Operand
    grad_s: _Operand
    rows_lost: Tensor
    keys_lost: Tensor
    values_lost: Tensor


def _terms(
    e: Exact,
    dout: Tensor,
    a: Arithmetic,
    out: Tensor | None,
    lse: Tensor | None,
    forward: ForwardBounds | None,
) -> _Terms:
    if out is not None and lse is not None:
        shift = lse.masked_fill(e.empty, 0.0)
        p = hide(torch.exp(e.scores - shift[..., None]), e.seen).masked_fill(e.empty[..., None], 0.0)
        extra, out_error = torch.zeros_like(shift), None
    elif forward is not None:
        out, shift, p = e.out, e.lse.masked_fill(e.empty, 0.0), e.weights
        extra, out_error = forward.lse + a.div_error, forward.out
    else:
        raise ValueError("backward_bounds needs the kernel's out and lse, or the forward bounds")
    err = weight_error(e, a, shift=shift, extra=extra, shift_terms=2.0)
    grad_p = e.dropped(dout @ e.v.mT)
    undropped = operand_size(dout, a.product_floor) @ operand_size(e.v, a.product_floor).mT
    products = e.dropped(undropped)
    # dP's dot product, and its own rounding: |dP| <= B
    of_grad_p = e.q.shape[-1] * a.accumulate + 2 * a.operand_rounding + FP32_ROUNDOFF + e.of_keep
    delta = (out * dout).sum(-1, keepdim=True)
    of_products = products * p
    delta_error = _delta_error(e, dout, out, out_error, a, err, of_products, of_grad_p)
    grad_s = (grad_p - delta) * p
    size = grad_s.abs()
    relative = torch.addcmul(err.intercept, err.slope, e.score_size)
    # Weight errors times errors of dP and delta; roundings of dP - delta and of the product; the cast of P,
    # where dS is made from what it left; exp2's flush of weights below 2^-126 to 0.
    of_delta = (1 + err.largest) * delta_error + 3 * FP32_ROUNDOFF * delta.abs()
    cast, below = (a.weights.roundoff, a.weights.underflow) if a.ds_from_rounded_p else (0.0, 0.0)
    flush = (SUBNORMAL_FLUSH + below) * (1 + largest(hide(products, e.seen), -1) + delta.abs() + delta_error)
    error = (
        ((relative + FP32_ROUNDOFF + cast * (1 + err.largest)) * size)
        .addcmul_(of_products, (1 + err.largest) * of_grad_p + 3 * FP32_ROUNDOFF)
        .addcmul_(p, of_delta)
        .add_(flush)
    )
    error = hide(error, e.seen)
    # dS is cast before its product with sm_scale, or after it.
    unit = abs(e.sm_scale) if a.ds_scaled and e.sm_scale else 1.0
    # An overflow of S, dP or delta spoils all of a row's dS, and through the sum over rows every dk; an
    # overflow in the cast of dS one row and one key. Masked pairs count: their weight is 0, but 0 * inf is
    # NaN, and whether it is computed depends on the tiles.
    cast_lost = ~(size + error < min(a.weights.maximum / unit, FLOAT32_SAFE))
    size_delta = (out.abs() * dout.abs()).sum(-1, keepdim=True) + delta_error
    # A lse that large scores have left off by more than e^50 says nothing of the weights.
    weights_lost = err.lost | ~(err.log < LARGEST_EXPONENT)
    largest_product = largest(undropped, -1) * e.keep_scale
    row_lost = weights_lost | ~((largest_product < FLOAT32_SAFE) & (size_delta < FLOAT32_SAFE))
    dropped, size_dout = e.dropped(p), dout.abs().sum(-2, keepdim=True) * e.keep_scale
    if e.keep is not None:
        relative = relative + e.of_keep * (1 + relative)
    of_dropped = relative.mul_(dropped)
    return _Terms(
        weights=_Operand(
            dropped, dropped, _with_underflow(dropped, of_dropped, a, 1.0 / e.keep_scale, e.seen), p, e.seen
        ),
        grad_s=_Operand(grad_s, size, _with_underflow(size, error, a, unit, e.seen), p, e.seen),
        rows_lost=row_lost | cast_lost.any(-1, keepdim=True),
        keys_lost=row_lost.any(-2, keepdim=True) | cast_lost.any(-2)[..., None],
        values_lost=weights_lost.any(-2, keepdim=True) | ~(size_dout < FLOAT32_SAFE),
    )


def _with_underflow(size: Tensor, error: Tensor, a: Arithmetic, unit: float, seen: Tensor | None) -> Tensor:
    """The error of entries that are cast in units of 1 / ``unit``, with underflow's where they are small."""
    underflow = a.weights.underflow / unit
    low = size < underflow / a.weights.roundoff
    return error.add_(low if seen is None else low & seen, alpha=underflow)


def _delta_error(
    e: Exact,
    dout: Tensor,
    out: Tensor,
    out_error: Tensor | None,
    a: Arithmetic,
    err: WeightError,
    of_products: Tensor,
    of_grad_p: float,
) -> Tensor:
    """Error of delta, (B, H, R, 1): sum of dout * out over the head dimension, or of P * dP over the keys."""
    size = operand_size(dout, a.operand_floor)
    size_out = operand_size(out, a.operand_floor)
    by_out = e.q.shape[-1] * FP32_ROUNDOFF * (size_out * size).sum(-1, keepdim=True)
    if out_error is None:
        return by_out
    by_out = by_out + (out_error * size).sum(-1, keepdim=True)
    if a.delta == "out":
        return by_out
    terms = e.k.shape[-2]
    relative = err.largest + terms * FP32_ROUNDOFF + (1 + err.largest) * of_grad_p
    by_p = relative * of_products.sum(-1, keepdim=True)
    return by_p if a.delta == "probabilities" else torch.maximum(by_out, by_p)


def _stores(terms: int, terms_per_store: int | None) -> int:
    """How often a running sum is rounded to the output's format before it is scaled and stored for good.

    Each time it errs by a roundoff of the sum of sizes so far, earlier stores included. dk and dv of each
    query head rounded before the sum over the group are one such rounding of all of them.
    """
    return 0 if terms_per_store is None else terms // terms_per_store


def _overflows(size: Tensor, stores: int, largest: float) -> Tensor:
    """Where a running sum of terms of this size, stored in between, may exceed what it is stored in."""
    return ~(size < largest) if stores else torch.zeros_like(size, dtype=torch.bool)


def atomic_flush(a: Arithmetic, keys: int) -> float:
    """What atomic adds lose of dq before it is scaled: each flushes what is added, and the sum, below 2^-126."""
    return 2 * math.ceil(keys / a.tile_min) * SUBNORMAL_FLUSH if a.dq_atomic else 0.0


def _product(
    x: _Operand, y: Tensor, a: Arithmetic, stores: float, safety: float | None, clustered: bool
) -> _Product:
    """Product x y, x cast to the weights' format, in a float32 sum; stores in between err by ``stores``.

    Rule 1 adds everything up; rule 2 takes casts in quadrature.
    """
    terms, cast, size_y = y.shape[-2], a.weights.roundoff, operand_size(y, a.operand_floor)
    value, of_error = x.value @ y, x.error @ size_y
    partial_sum = (x.size @ size_y).add_(of_error)
    always = a.operand_rounding + stores
    error = torch.add(of_error, partial_sum, alpha=always + cast + terms * a.accumulate)
    if safety is not None:
        squares = x.size * x.size
        if clustered:
            squares = squares * multiplicity(x.weights.clamp_min(TINY).log(), x.seen, cast)
        root, size = (squares @ (y * y)).sqrt_(), value.abs() + of_error
        probable = of_error.mul_(1 + cast).add_(root, alpha=safety * cast)
        probable.add_(probable_accumulation(terms, size, root), alpha=a.accumulate)
        if always:
            probable.add_(partial_sum, alpha=always)
        if a.weights.truncates:
            probable.add_(size, alpha=cast)
        error = torch.minimum(error, probable)
    return _Product(value, error, partial_sum)


TINY = 1e-300
"""Stands for 0 under a logarithm."""
