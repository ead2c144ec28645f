"""Bounds of mean signed errors: what roundings to nearest leave of an error that is averaged over many elements.

A mean is <X, R> / <R, R>, the slope of the tensor X along a regressor R that no rounding enters, such as the exact X.
To first order a rounding of an intermediate y by the factor 1 + t moves <X, R> by t y d<X, R>/dy, its *share*. Shares
are known exactly:

- out = P v. With G_ij = v_j . R_i, a weight's own error, which l has too, has the share
  W_ij = P_ij (G_ij - out_i . R_i), a cast of P, which l has not, the share P_ij G_ij, and l the share -out_i . R_i.
- dv = P^T dout. With G_ij = dout_i . R_j, weights and their casts have the share P_ij G_ij.
- dq = scale dS k, dk = scale dS^T q. With G_ij = scale R_i . k_j, or scale q_i . R_j, a weight and a cast of dS have
  the share W_ij = dS_ij G_ij, dP_ij has P_ij G_ij dP_ij, and delta_i has -delta_i sum_j P_ij G_ij.
- The last store of an element x has the share R x.

Three kinds of errors are added up differently.

- Roundings to nearest err by |t| <= u with mean 0, but for the curvature of the density of what is rounded: numbers
  whose density changes by a factor of e over a factor of e leave u^2 of the shares' sizes. Shares of different numbers
  are independent where these are; those of one number, such as a row's delta or an entry of a k that is scaled and
  rounded, are added first. By Hoeffding's inequality the sum exceeds s times the root of all (u share)^2 with a
  probability of 2 exp(-s^2 / 2), and by 2 exp(-3 s^2 / 2) as errors of roundings are uniform within their bounds:
  1e-16 for s = 5. So n elements leave about u / sqrt(n).
- What may err in one direction counts in full, with the size of its share: exponentials, divisions and logarithms of a
  GPU, the rounded constant scale * log2 e, casts and operands that are truncated, and the drift of tensor cores, whose
  sums are truncated: n / 2 steps of the partial sum (``accumulation.probable_steps``). Float32 products of an IEEE unit
  have no drift. Where a truncation drops a part of each product, the mean part is dropped of the sum, and what differs
  from it has random signs. A cast that truncates drops half a unit in the last place in the mean, and never adds any.
- Where a number of 16 bits is multiplied by a constant and rounded to 16 bits again, its error follows from its
  fraction alone, of which there are 128 in bfloat16. These do not average out: a factor of 1 + u/2 moves no number.
  So a q or k that is scaled and rounded, and scores in 16 bits that are scaled, are rounded here as a kernel does it,
  and the sum of their shares counts in full. So are gradients that are stored before they are scaled.

Numbers have to be ordinary: independent, normal, with scores of size 1. The law draws them so.

Notation is that of the package. Shapes: R is like X, G and W (B, H, R, N).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from reference.arithmetic import BFLOAT16, FP32_ROUNDOFF, PARTIAL_STORES, TF32_TRUNCATED, Arithmetic, Format
from reference.bounds.backward import stores_in_between, stores_in_group
from reference.bounds.exact import Exact
from reference.bounds.forward import merge_error, part_error, sum_error
from reference.bounds.scores import rescalings
from reference.masks import hide

FACTOR, SHIFT, DELTA = "factor", "shift", "delta"
"""The regressors: the exact tensor, its size, and what a relative error of delta does to dq and dk."""
INSTEAD_OF = {BFLOAT16.name: TF32_TRUNCATED.roundoff / 2}
"""What is lost, in the mean, by a design that does not cast P and dS to a format, but truncates them to more bits.

A kernel that converts its inputs to float32, and multiplies in tf32, does so with bfloat16: its errors are smaller.
"""
FLUSHED = 4.0
"""A cast of what is below this many times its smallest error may lose all of it, in one direction."""


@dataclass(frozen=True)
class Mean:
    """What the slope of a tensor along a regressor should be about, and how far a sound kernel's is from it.

    ``regressor`` and ``exact``, the exact tensor, have the folded shape of the tensor.
    """

    tensor: str
    along: str
    regressor: Tensor
    exact: Tensor
    expected: float
    bound: float

    def of(self, x: Tensor) -> Tensor:
        """Return the slope () of ``x``, folded, along the regressor."""
        return (x.double() * self.regressor).sum() / self.regressor.square().sum()


@dataclass
class _Total:
    """What errors of all kinds add up to: those of one direction, and the squares of those with random signs.

    They lie around ``centre``, which is not 0 where numbers may be cut.
    """

    drift: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))
    centre: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, shares: Tensor, *, drift: float | Tensor = 0.0, random: float | Tensor = 0.0) -> None:
        """Add errors with these shares: up to ``drift`` in one direction, and ``random`` ones up to that size."""
        self.drift = self.drift + (shares.abs() * drift).sum()
        self.squares = self.squares + (shares * random).square().sum()

    def add_cut(self, shares: Tensor, mean: float) -> None:
        """Add what a truncation may drop: between nothing and ``mean`` in the mean, and twice that at most."""
        whole = shares.sum() * (mean / 2)
        self.centre = self.centre - whole
        self.drift = self.drift + whole.abs()
        self.squares = self.squares + (shares * (2 * mean)).square().sum()

    def bound(self, deviations: float) -> float:
        """Return the largest error of a sum of such shares."""
        return float(self.drift + deviations * self.squares.sqrt())


def rounded(format_: Format, x: Tensor) -> Tensor:
    """Return numbers in float64 rounded to nearest even with as many bits as a format has, whatever its range."""
    fraction, exponent = x.frexp()  # the fraction is in [1/2, 1), where neighbours lie ``roundoff`` apart
    return torch.ldexp((fraction / format_.roundoff).round() * format_.roundoff, exponent)


def factors_of(sm_scale: float) -> list[float]:
    """Return what an operand is multiplied by where scores are scaled: for exponentials to base e, and to base 2."""
    return [abs(sm_scale), abs(sm_scale) / math.log(2.0)]


def partial_sum(value: Tensor, root: Tensor) -> Tensor:
    """Return the root mean square of all partial sums of x_i, given value = sum x_i and root = sqrt(sum x_i^2).

    In random order, the sum of the first j of n terms has a mean square of (j/n)^2 value^2 + (j/n) root^2 at most.
    """
    return (value.square() / 3).add_(root.square(), alpha=0.5).sqrt_()


def drift_of_sum(a: Arithmetic, terms: int) -> float:
    """Return the drift of a sum of products in a tensor core, relative to ``partial_sum``: see ``probable_steps``."""
    return 0.5 * terms * a.accumulate


def means(
    e: Exact,
    dout: Tensor | None,
    a: Arithmetic,
    *,
    out: Tensor,
    lse: Tensor | None,
    deviations: float,
    drifts: bool,
) -> Iterator[Mean]:
    """Yield the means of out and lse, and of dq, dk and dv if there is a dout, each along its regressors.

    ``dout`` (B, H, R, D), ``out`` (B, H, R, D) and ``lse`` (B, H, R) are folded and float64. Gradients are those at the
    kernel's own ``out`` and ``lse``, or at the exact lse if that is None. ``drifts`` says whether sums of products may
    be truncated. Every row has to see a key.
    """
    forward = _Forward(e, a, drifts)
    regressors = [("out", FACTOR, e.out), ("out", SHIFT, e.out.abs())]
    regressors += [("lse", SHIFT, torch.ones_like(e.lse)), ("lse", FACTOR, e.lse)]
    pairs = [(x, forward.total(x[0], x[2])) for x in regressors]
    exact = {"out": e.out, "lse": e.lse}
    if dout is not None:
        backward = _Backward(e, a, drifts, dout, out, lse, forward)
        exact |= {"dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
        of_delta = {"dq": backward.of_delta @ e.k, "dk": backward.of_delta.mT @ e.q}
        for name in ("dv", "dq", "dk"):
            x = exact[name]
            by_name = {FACTOR: x, SHIFT: x.abs()} | ({DELTA: of_delta[name]} if name in of_delta else {})
            pairs += [((name, how, r), backward.total(name, r)) for how, r in by_name.items()]
    for (name, along, r), total in pairs:
        norm = float(r.square().sum())
        if norm:
            expected = float((exact[name] * r).sum() + total.centre) / norm
            yield Mean(name, along, r, exact[name], expected, total.bound(deviations) / norm)


@dataclass(frozen=True)
class _Forward:
    """Shares of a forward's errors. Cached tensors are (B, H, R, N), or (B, H, R, 1) where they belong to a row."""

    e: Exact
    a: Arithmetic
    drifts: bool

    @cached_property
    def scores(self) -> Tensor:
        """Scores, 0 where a row does not see a key."""
        return hide(self.e.scores, self.e.seen, 0.0)

    @cached_property
    def score_root(self) -> Tensor:
        """The root of the sum of the squares of the products that are summed for each score."""
        return (self.e.q.square() @ self.e.k.square().mT).sqrt_() * abs(self.e.sm_scale)

    @cached_property
    def score_size(self) -> Tensor:
        """The size of the partial sums of each score."""
        return partial_sum(self.scores, self.score_root)

    @cached_property
    def of_exponentials(self) -> Tensor:
        """What errs in one direction in the unnormalised weights of a row: exponentials, and logarithms of parts."""
        a, e = self.a, self.e
        error = a.exp_error * (1 + rescalings(e, a))
        if a.merged > 1:
            of_log = a.log_error * max(1.0, math.log(e.k.shape[-2]))
            times = 1 + PARTIAL_STORES * a.merged_by_difference
            error = error + of_log * times + a.div_error + a.merged * a.exp_error
        return error[..., None]

    @cached_property
    def of_parts(self) -> Tensor | float:
        """What errs with random signs in the weights of parts."""
        a = replace(self.a, exp_error=0.0, log_error=0.0, div_error=0.0)
        return part_error(a, self.e.row_max.abs()[..., None], self.e.k.shape[-2]) if a.merged > 1 else 0.0

    @cached_property
    def of_logarithm(self) -> Tensor:
        """What errs in one direction in lse, beside the weights."""
        return (self.e.lse - self.e.row_max).abs().clamp_min(1.0)[..., None] * self.a.log_error

    def add_weights(
        self, total: _Total, shares: Tensor, shift: Tensor, of_exponentials: Tensor | float
    ) -> None:
        """Add the errors of weights exp(S - shift), shift (B, H, R, 1), before any cast, with these shares."""
        a, e = self.a, self.e
        head_dim, away = e.q.shape[-1], hide(self.scores - shift, e.seen, 0.0).abs()
        total.add(shares, drift=of_exponentials)
        total.add(shares.abs().sum(-1, keepdim=True), random=self.of_parts)
        steps = 8 * FP32_ROUNDOFF * (self.scores.abs() + away)
        total.add(shares, random=math.sqrt(head_dim) * a.accumulate * self.score_size + steps)
        if self.drifts:
            total.add(shares * self.score_size, drift=drift_of_sum(a, head_dim))
        if a.operand_rounding:
            total.add_cut(shares * self.scores, a.operand_rounding)
            total.add(shares * self.score_root, random=2 * a.operand_rounding)
        # fl(scale * log2 e) and fl(log2 e), the same in all rows
        of_rows = (shares * self.scores).sum(-1, keepdim=True) - shares.sum(-1, keepdim=True) * shift
        total.add(of_rows, drift=2 * FP32_ROUNDOFF)
        total.add(shares.sum(-1, keepdim=True), random=4 * FP32_ROUNDOFF * shift.abs())
        if a.rounded_scores:
            coarse = a.weights.roundoff * (1 + self.scores.abs() + away)
            total.add(shares, random=3 * coarse, drift=2 * coarse.square())
            total.add((shares * self._of_scaled_scores).sum(), drift=1.0)
        for at, is_scaled in enumerate((a.q_prescaled, a.k_prescaled)):
            if is_scaled or a.qk_prescaled or a.rounded_scores:
                self._add_scaled_operand(total, shares, at, is_root=not is_scaled)

    @cached_property
    def _of_scaled_scores(self) -> Tensor:
        """What a product in 16 bits errs by where it is scaled and rounded once more."""
        scale = self.e.sm_scale
        product = rounded(self.a.weights, self.scores / scale)
        return rounded(self.a.weights, product * scale) - product * scale

    def _add_scaled_operand(self, total: _Total, shares: Tensor, at: int, *, is_root: bool) -> None:
        """Add the errors of q or k where it is multiplied by the scale, or by a root of it, and rounded.

        Its own roundings, by any factor that is known, are not random: see above. Others are alike in size.
        """
        a, e = self.a, self.e
        operand, other = (e.q, e.k) if at == 0 else (e.k, e.q)
        of_operand = ((shares if at == 0 else shares.mT) @ other) * e.sm_scale
        scales = factors_of(e.sm_scale)
        factors = [*scales, *map(math.sqrt, scales)] if is_root else scales
        known = [(of_operand * (rounded(a.weights, operand * x) / x - operand)).sum() for x in factors]
        total.add(torch.stack(known).abs().max(), drift=1.0)
        total.add(of_operand * operand, random=a.weights.roundoff)
        total.add(of_operand, random=a.weights.underflow / max(min(factors), 1e-300))
        total.add(shares, drift=(a.weights.roundoff * self.score_size).square())

    def add_casts(self, total: _Total, value: Tensor, factors: Tensor, casts: int = 1) -> None:
        """Add the errors of casts of ``value`` (B, H, R, N) to the format of the weights, times ``factors``."""
        w, shares = self.a.weights, value * factors
        total.add(shares, random=math.sqrt(casts) * w.roundoff, drift=casts * w.roundoff**2)
        total.add_cut(shares, w.roundoff / 2 if w.truncates else INSTEAD_OF.get(w.name, 0.0))
        total.add(factors.masked_fill(value == 0, 0.0), random=w.underflow)
        total.add(shares.masked_fill(value.abs() >= FLUSHED * w.underflow, 0.0), drift=1.0)

    def add_sums(
        self, total: _Total, r: Tensor, value: Tensor, root: Tensor, terms: int, stores: float
    ) -> None:
        """Add the errors of sums of products in float32, and of their stores, the last and ``stores`` before it."""
        a, size = self.a, partial_sum(value, root)
        total.add(r * size, random=math.sqrt(terms) * a.accumulate)
        if self.drifts:
            total.add(r * size, drift=drift_of_sum(a, terms))
        if a.operand_rounding:
            total.add_cut(r * value, a.operand_rounding / 2)
            total.add(r * root, random=a.operand_rounding)
        total.add(r * size, random=math.sqrt(stores) * a.output.roundoff, drift=stores * a.output.roundoff**2)
        total.add(r * value, random=a.output.roundoff, drift=a.output.roundoff**2 + 4 * FP32_ROUNDOFF**2)
        total.add(r, random=(1 + stores) * a.output.underflow)

    def total(self, name: str, r: Tensor) -> _Total:
        """Return what the errors of out or lse leave along a regressor."""
        return self._of_out(r) if name == "out" else self._of_lse(r)

    def _of_out(self, r: Tensor) -> _Total:
        a, e, total = self.a, self.e, _Total()
        terms, p = e.k.shape[-2], e.weights
        of_values = r @ e.v.mT
        of_sum = (r * e.out).sum(-1, keepdim=True)
        self.add_weights(total, p * (of_values - of_sum), e.row_max[..., None], self.of_exponentials)
        self.add_casts(total, p, of_values)
        total.add(of_sum, drift=a.div_error, random=math.sqrt(terms) * FP32_ROUNDOFF + sum_error(a, 1))
        if a.l_from_rounded_p:
            total.add(p * of_sum, random=a.weights.roundoff)
        if a.rounded_scores:
            total.add(of_sum, random=4 * a.weights.roundoff)
        if a.partial_results:  # each division of what there is so far
            so_far = (p * of_values).cumsum(-1)
            largest = torch.maximum(so_far.abs(), (of_sum - so_far).abs()).amax(-1, keepdim=True)
            total.add(largest, drift=merge_error(a, terms))
        root = (p.square() @ e.v.square()).sqrt_()
        if a.merged_by_difference:
            total.add(r * partial_sum(e.out, root), drift=PARTIAL_STORES * a.difference_error)
        self.add_sums(total, r, e.out, root, terms, PARTIAL_STORES * a.rounded_partials)
        return total

    def _of_lse(self, r: Tensor) -> _Total:
        a, e, total = self.a, self.e, _Total()
        terms, rows = e.k.shape[-2], r[..., None]
        self.add_weights(total, e.weights * rows, e.row_max[..., None], self.of_exponentials)
        total.add(rows, drift=self.of_logarithm + e.lse[..., None].abs() * a.lse_conversion)
        top = (3 * e.row_max.abs() + 2 * e.lse.abs())[..., None]
        total.add(rows, random=FP32_ROUNDOFF * (top + math.sqrt(terms) + 1))
        total.add(e.lse[..., None] * rows, drift=2 * FP32_ROUNDOFF)  # ln 2 or log2 e, as constants
        if a.l_from_rounded_p:
            self.add_casts(total, e.weights, rows.expand_as(e.weights))
        if a.rounded_scores:
            coarse = 4 * a.weights.roundoff * (1 + top)
            total.add(rows, random=coarse, drift=coarse * a.weights.roundoff)
        return total


@dataclass(frozen=True)
class _Backward:
    """Shares of a backward's errors. Its tensors are those at the kernel's own out and lse."""

    e: Exact
    a: Arithmetic
    drifts: bool
    dout: Tensor
    out: Tensor
    lse: Tensor | None
    forward: _Forward

    @cached_property
    def shift(self) -> Tensor:
        """The lse of each row (B, H, R, 1)."""
        return (self.e.lse if self.lse is None else self.lse)[..., None]

    @cached_property
    def p(self) -> Tensor:
        """The weights."""
        return (self.e.scores - self.shift).exp_()

    @cached_property
    def dp(self) -> Tensor:
        """The gradients of the weights."""
        return self.dout @ self.e.v.mT

    @cached_property
    def dp_root(self) -> Tensor:
        """The root of the sum of the squares of the products that are summed for dP."""
        return (self.dout.square() @ self.e.v.square().mT).sqrt_()

    @cached_property
    def delta(self) -> Tensor:
        """Delta (B, H, R, 1) from the stored out."""
        return (self.dout * self.out).sum(-1, keepdim=True)

    @cached_property
    def of_delta(self) -> Tensor:
        """What a delta that is twice too large adds to the gradients of the products of q and k."""
        return self.p * self.delta * -self.e.sm_scale

    @cached_property
    def ds(self) -> Tensor:
        """The gradients of the scores."""
        return self.p * (self.dp - self.delta)

    @cached_property
    def dq(self) -> Tensor:
        """Exact dq (B, H, R, D)."""
        return self.ds @ self.e.k * self.e.sm_scale

    @cached_property
    def dk(self) -> Tensor:
        """Exact dk (B, H, N, D)."""
        return self.ds.mT @ self.e.q * self.e.sm_scale

    @cached_property
    def dv(self) -> Tensor:
        """Exact dv (B, H, N, Dv)."""
        return self.p.mT @ self.dout

    @cached_property
    def of_exponentials(self) -> Tensor:
        """What errs in one direction in the weights of a backward that makes them again, or keeps the forward's.

        Kept weights exp(S - m) are divided by the sum l that lse is the logarithm of, so that errors of l cancel. If
        they were relative to an earlier maximum, or are those of a part, one exponential more brings them to lse.
        """
        a, f = self.a, self.forward
        if self.lse is None:
            return f.of_exponentials + f.of_logarithm + a.div_error
        kept = a.saved_weights * (a.exp_error + a.div_error + 2 * f.of_logarithm)
        return torch.full_like(self.shift, a.exp_error) + kept

    def total(self, name: str, r: Tensor) -> _Total:
        """Return what the errors of a gradient leave along a regressor."""
        return self._of_dv(r) if name == "dv" else self._of_scores(name, r)

    def _of_dv(self, r: Tensor) -> _Total:
        a, e, total, f = self.a, self.e, _Total(), self.forward
        of_weights, rows = self.dout @ r.mT, e.q.shape[-2]
        f.add_weights(total, self.p * of_weights, self.shift, self.of_exponentials)
        self._add_rounded_lse(total, self.p * of_weights)
        f.add_casts(total, self.p, of_weights)
        if a.saved_weights:
            total.add((self.p * of_weights).sum(-1, keepdim=True), random=self._of_saved_sum)
        root = (self.p.mT.square() @ self.dout.square()).sqrt_()
        stores = stores_in_between(rows, a.dk_dv_rows) + stores_in_group(a, e.group)
        f.add_sums(total, r, self.dv, root, rows, stores + PARTIAL_STORES * a.rounded_partials)
        if a.merged_by_difference:
            total.add(r * partial_sum(self.dv, root), drift=PARTIAL_STORES * a.difference_error)
        return total

    @property
    def _of_saved_sum(self) -> float:
        return (math.sqrt(self.e.k.shape[-2]) + 1) * FP32_ROUNDOFF

    def _add_rounded_lse(self, total: _Total, shares: Tensor) -> None:
        """Add what a softmax in 16 bits leaves in the weights of a row, and the error of the lse they are judged at.

        Such weights may be kept, and be more precise than an lse that is stored in 16 bits.
        """
        if self.a.rounded_scores:
            u, rows = self.a.weights.roundoff, shares.sum(-1, keepdim=True)
            total.add(
                rows, random=u * (4 + 3 * self.shift.abs()), drift=(u * (4 + 3 * self.shift.abs())) ** 2
            )

    def _of_scores(self, name: str, r: Tensor) -> _Total:
        a, e, total, f = self.a, self.e, _Total(), self.forward
        u, (rows, terms), width = a.weights.roundoff, e.scores.shape[-2:], e.v.shape[-1]
        factors = (r @ e.k.mT if name == "dq" else e.q @ r.mT) * e.sm_scale
        of_p, shares = self.p * factors, self.ds * factors
        f.add_weights(total, shares, self.shift, self.of_exponentials)
        self._add_rounded_lse(total, shares)
        size = partial_sum(self.dp, self.dp_root)
        total.add(of_p * size, random=math.sqrt(width) * a.accumulate)
        total.add(of_p * (self.dp.abs() + self.delta.abs()), random=4 * FP32_ROUNDOFF)
        if self.drifts:
            total.add(of_p * size, drift=drift_of_sum(a, width))
        if a.operand_rounding:
            total.add_cut(of_p * self.dp, a.operand_rounding)
            total.add(of_p * self.dp_root, random=2 * a.operand_rounding)
        self._add_delta(total, -of_p.sum(-1, keepdim=True))
        stored = 3 if a.rounded_scores else 1
        smaller, _ = a.ds_units(e.sm_scale)
        f.add_casts(
            total, self.ds * smaller, factors / smaller, stored + a.ds_from_rounded_p + a.saved_weights
        )
        if a.rounded_scores:
            total.add(of_p * self.dp, random=u, drift=u * u)
        left, right = (e.k, self.ds) if name == "dq" else (e.q, self.ds.mT)
        value = (self.dq if name == "dq" else self.dk) / (e.sm_scale or 1.0)
        root = (right.square() @ left.square()).sqrt_()
        is_scaled = a.k_prescaled if name == "dq" else a.q_prescaled
        is_scaled = is_scaled or a.qk_prescaled or a.rounded_scores
        if is_scaled:  # the product is with the rounded operand
            total.add((right.mT @ r) * left * e.sm_scale, random=u)
            total.add(shares, drift=u * u)
            total.add(self._of_scaling_back(r, value), drift=1.0)
        in_between = (
            stores_in_between(terms, a.dq_keys)
            if name == "dq"
            else stores_in_between(rows, a.dk_dv_rows) + stores_in_group(a, e.group)
        )
        stores = (
            in_between + is_scaled + a.qk_prescaled + a.rounded_scores + PARTIAL_STORES * a.rounded_partials
        )
        f.add_sums(
            total, r, value * e.sm_scale, root * abs(e.sm_scale), terms if name == "dq" else rows, stores
        )
        if a.merged_by_difference:
            whole = partial_sum(value, root) * abs(e.sm_scale)
            total.add(r * whole, drift=4 * PARTIAL_STORES * a.difference_error)
        return total

    def _of_scaling_back(self, r: Tensor, value: Tensor) -> Tensor:
        """Return the share of the last rounding where dq or dk is stored before it is multiplied by a known factor."""
        a, e = self.a, self.e
        found = []
        for factor in (*factors_of(e.sm_scale), *map(math.sqrt, factors_of(e.sm_scale))):
            stored = rounded(a.output, value * (abs(e.sm_scale) / factor))
            found.append((r * (rounded(a.output, stored * factor) - stored * factor)).sum())
        return torch.stack(found).abs().max()

    def _add_delta(self, total: _Total, shares: Tensor) -> None:
        """Add the errors of delta by each way to get it, with these shares (B, H, R, 1).

        P dP differs from the stored out by the stores of out, by the casts of P, and by what errs in either's weights.
        """
        a, e, of_terms = self.a, self.e, self.p * self.dp
        terms, width = e.k.shape[-2], e.v.shape[-1]
        products = self.dout * self.out
        size = partial_sum(self.delta, products.square().sum(-1, keepdim=True).sqrt())
        total.add(shares * size, random=math.sqrt(width + terms) * FP32_ROUNDOFF)
        if a.delta != "out" or a.saved_weights:
            total.add(shares * products, random=a.output.roundoff)
            total.add(shares * of_terms, random=a.weights.roundoff * (1 + a.weights.truncates))
            of_weights = self.forward.of_exponentials + a.div_error + a.operand_rounding
            total.add(shares * self.ds, drift=of_weights + a.weights.roundoff * a.weights.truncates)
            total.add(shares * self.delta, drift=a.div_error)
        if a.merged_by_difference or a.rounded_partials:
            total.add(shares * products, random=PARTIAL_STORES * a.output.roundoff * a.rounded_partials)
            total.add(shares * size, drift=4 * PARTIAL_STORES * a.difference_error)
        if a.rounded_scores:
            total.add(shares * size, random=3 * a.weights.roundoff)
