"""Relative error of the unnormalised softmax weights: what scores, exponentials and rescaling contribute.

The error of a score S_ij is at most relative * A_ij + offset_i in natural units, so that a weight errs by expm1 of
that. To keep the bound linear in A, expm1 is replaced by a chord that lies above it:
expm1(x) <= x expm1(top) / top on [0, top], where top is the row's largest error.

Where what is added to scores is rounded twice (``Arithmetic.rounded_bias``), a score errs by (2 u + u^2) times its
``added_size``, slope * distance + |bias|, and by the underflow for each rounding: that of a slope counts as often as
the distance says, which is less than seqlen_q + seqlen_k. A is raised so that ``relative`` times it holds the first of
these. It stays as it is for a key whose score, with its error, is ``SCORE_GAP`` below the largest that a row is sure to
have, or below its lse: such a weight is 0, by whatever the -10000 that hides the key was rounded.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF, Arithmetic
from reference.bounds.exact import SCORE_GAP, Exact, largest
from reference.masks import hide

LARGEST_EXPONENT = 50.0
"""Largest error of a score, in natural units, that is computed with. Beyond e^50 a weight is unknown, and the hull of
v bounds the output instead."""

RECORD_TILE = 16
"""Keys in the smallest key tile of a tensor-core kernel. Changes of the running maximum are counted on such tiles."""


@dataclass(frozen=True)
class WeightError:
    """Bound of the relative error of the weights: exp(score error) - 1 is at most slope_i size_ij + intercept_i.

    ``size`` (B, H, R, N) is A or, where what is added to scores is rounded, more. All others are (B, H, R, 1).
    ``log`` and ``largest`` are the row's largest error before and after exponentiation, and ``factor`` is 1 +
    ``largest``; ``lost`` says where scores may overflow.
    """

    size: Tensor
    slope: Tensor
    intercept: Tensor
    log: Tensor
    largest: Tensor
    factor: Tensor
    lost: Tensor


def weight_error(
    e: Exact, arithmetic: Arithmetic, *, shift: Tensor, extra: Tensor, shift_terms: float
) -> WeightError:
    """Bound the errors of the weights exp(S - shift), shift (B, H, R) being the row maximum or, in a backward, lse.

    The dot product errs by head_dim * U * A. Four roundings err by 4 U |S| (sm_scale * log2 e, the product, the
    conversion of base, one to spare) and four by 4 U |S - shift| (the subtraction, log2 e, and the two of the
    rescaling arguments, which telescope): together at most 8 U A + 4 U |shift|. Then come one exp2, one tanh of a
    soft-cap, and what the caller adds: ``extra`` (B, H, R) and shift_terms * U |shift|.
    """
    a = arithmetic
    relative = a.score_accumulation(e.q.shape[-1]) + 8 * FP32_ROUNDOFF + 2 * a.operand_rounding
    lost = e.overflow
    offset = torch.add(extra, shift.abs(), alpha=(4 + shift_terms) * FP32_ROUNDOFF)
    offset.add_(a.exp_error + (a.tanh_error * e.softcap))
    if a.k_prescaled:
        # round(k * sm_scale * log2 e) errs relative to its size or, below the normal range, absolutely (in base 2).
        relative += a.weights.roundoff
        offset = offset + a.weights.underflow * math.log(2) * e.q.abs().sum(-1)
        top = largest(e.k.abs().flatten(-2), -1) * abs(e.sm_scale) / math.log(2)
        lost = lost | (top >= a.weights.maximum)
    if a.q_prescaled:
        relative += a.weights.roundoff
        offset = offset + a.weights.underflow * largest(e.k.abs().sum(-1), -1)
        top = e.q.abs().amax(-1) * abs(e.sm_scale) / math.log(2)
        lost = lost | (top >= a.weights.maximum)
    if a.qk_prescaled:
        operands = e.q.abs().sum(-1) + largest(e.k.abs().sum(-1), -1)
        of_score, below = scaled_by_root(a, e.sm_scale, operands, e.q.shape[-1])
        relative += of_score
        offset = offset + below
        top = torch.maximum(e.q.abs().amax(-1), largest(e.k.abs().flatten(-2), -1))
        lost = lost | (top * math.sqrt(abs(e.sm_scale) / math.log(2)) >= a.weights.maximum)
    if a.rounded_scores:
        # Five roundings: of an operand that is scaled, of the product, of the product once scaled, and of its distance
        # to the maximum (2 A); a soft-cap has three more. The exponential, the sum and the quotient round relative to
        # the weight.
        relative += (8 if e.softcap else 5) * a.weights.roundoff
        offset = offset + 4 * a.weights.roundoff + 2 * a.weights.underflow * max(1.0, abs(e.sm_scale))
        top = largest((e.q @ e.k.mT).abs(), -1)[..., 0] * max(1.0, abs(e.sm_scale))
        lost = lost | ~(top * (1 + 5 * a.weights.roundoff) < a.weights.maximum)
    size, top = e.score_size, e.largest_size
    if a.rounded_bias and e.added_size is not None:
        offset = offset + a.output.underflow * (2 + e.q.shape[-2] // e.group + e.k.shape[-2])
        most = largest(e.added_size, -1)[..., 0]
        lost = lost | ~(most * (1 + 3 * a.output.roundoff) / math.log(2) < a.output.maximum)
        size = _raised(e, e.added_size, shift, relative, a.output.roundoff)
        top = largest(size, -1)
    offset = offset[..., None]
    log = torch.add(offset, top if e.sink is None else torch.maximum(top, e.sink.abs()), alpha=relative)
    # NaN and infinity (an overflow of the score itself) become the largest error as well.
    cut = log.nan_to_num(nan=LARGEST_EXPONENT).clamp_max_(LARGEST_EXPONENT)
    grown = torch.expm1(cut)
    chord = grown / cut
    return WeightError(size, chord * relative, chord * offset, log, grown, 1 + grown, lost[..., None])


def _raised(e: Exact, added_size: Tensor, shift: Tensor, relative: float, roundoff: float) -> Tensor:
    """Return A (B, H, R, N), raised by what rounding ``added_size`` twice adds to the error of each score."""
    raised = torch.add(e.score_size, added_size, alpha=(2 * roundoff + roundoff**2) / relative)
    error = relative * raised
    least = torch.minimum(largest(e.scores - error, -1), shift[..., None])
    return torch.where(e.scores + error < least - SCORE_GAP, e.score_size, hide(raised, e.seen))


def scaled_by_root(a: Arithmetic, sm_scale: float, operands: Tensor, head_dim: int) -> tuple[float, Tensor]:
    """Return what a score errs by where q and k are scaled by a root and rounded: relative to A, and absolutely.

    ``operands`` (B, H, R) is sum |q| + sum |k|, of the largest k. With the root r of |sm_scale|, the product of
    q r (1 + a) + b and k r (1 + c) + d, where |a|, |c| <= u and |b|, |d| are at most the underflow eta, errs by
    (2 u + u^2) A, by (1 + u) eta r (sum |q| + sum |k|) and by head_dim eta^2. Where log2 e is under the root as well,
    b and d count in base 2, times the root of log2 e: less by the root of ln 2.
    """
    u, eta = a.weights.roundoff, a.weights.underflow
    return 2 * u + u * u, (1 + u) * eta * math.sqrt(abs(sm_scale)) * operands + head_dim * eta * eta


def rescalings(e: Exact, arithmetic: Arithmetic) -> Tensor:
    """Bound how often the running maximum of each row can change, (B, H, R); each change multiplies by a rounded exp2.

    A key tile changes the maximum only if it holds a record, a score above all before it. Records are counted on
    tiles of RECORD_TILE keys, each of which overlaps at most two of the kernel's tiles, and from either end, since
    kernels may walk the keys backwards.
    """
    seqlen_k = e.scores.shape[-1]
    most = math.ceil(seqlen_k / arithmetic.tile_min) + 1
    if most <= 4 or arithmetic.merged > 1:  # Parts of the keys have running maxima of their own.
        return torch.full_like(e.row_max, float(most))
    tiles = torch.nn.functional.pad(e.scores, (0, -seqlen_k % RECORD_TILE), value=-math.inf)
    tops = tiles.unflatten(-1, (-1, RECORD_TILE)).amax(-1)
    tops = torch.stack((tops, tops.flip(-1)))
    running = tops.cummax(-1).values
    before = torch.nn.functional.pad(running[..., :-1], (1, 0), value=-math.inf)
    # Scores that differ by float32 noise may be records in the kernel's order and not in ours.
    noise = 1e-5 * running.abs().clamp_min_(1.0)
    records = ((tops >= before - noise) & (tops > -math.inf)).sum(-1).amax(0)
    return (2.0 * records).clamp_max_(most)
