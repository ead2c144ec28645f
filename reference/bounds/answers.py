"""Bounds of answers that are known without a softmax: means of values, single rows of v, and keys without weight.

*Means.* If q = 0, all scores are 0 and P is exactly 1 for each of the n keys that a row sees. If v has integers of at
most 8, P v and l are sums of integers below 2^24, which float32 holds exactly in any order. What is left is the
division by l, by div_error of the mean, and the store of out. Sums of rounded numbers are taken by three designs:

- P is divided by l before its cast (``Arithmetic.normalised_first``): it is 1 / n, rounded twice;
- partial results are divided by their own l and merged (``Arithmetic.partial_results``): ``forward.merge_error``;
- P is some other number than 1, and cast (``Arithmetic.rounded_largest_weight``): each rounds alike, and l does not;
- parts of the keys have an out and a lse each (``Arithmetic.merged``): the weight of each part errs by
  ``forward.part_error``, and so does the sum of these weights, since out may be divided by it. Where parts are merged
  by difference (``Arithmetic.difference_error``), a part of n_s keys moves the mean of the n_t keys so far by n_s / n_t
  of the distance to its own, which is in the end n_s / n of it: at most (1 + n_s / n_t) times the mean of |v|, summed
  over the parts at most 1 + ``PARTIAL_STORES`` times.

Their sums err by ``accumulate`` for each key, relative to the mean of |v|, and each cast of P may underflow. If P, l,
the quotient and a product are rounded to the format of out (``Arithmetic.rounded_scores``), or parts are stored in it
(``Arithmetic.rounded_partials``), that many roundoffs of it are added.

lse is log n, which errs by log_error, and by 3 U |lse| for two conversions of base and the sum with the maximum.

*Single rows of v.* If all weights of a row are 0 but one, which is exactly 1, out is a row of v without any rounding,
as v is in the format of out and a division by l = 1 is exact. If that weight is some other number P, as where the
maximum of a row is rounded up to an integer (``Arithmetic.rounded_reference``), out is fl(P v) / P in float32. The
product and the division give e = accumulate + div_error, relative to v, and a cast of P its roundoff. If e is less than
half a roundoff of the format of out, the store rounds to v itself, as v is in that format and its neighbours are at
least two such errors away; else the store adds a roundoff. P v may be flushed below 2^-126, which is twice as much
after a division by P >= 1/2. A weight is 0 where its score is ``SCORE_GAP`` below another one, except that exp2
computed as a polynomial ends at 2^-127 instead of 0 (``leftover``), and parts that are merged by difference leave
``Arithmetic.difference_error`` of the distance between two rows of v. A value below 2^-126 may be flushed to 0. If
operands are rounded (``Arithmetic.operand_floor``), subnormals may also be misread and miswritten, by up to 2^-125.
"""

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF, PARTIAL_STORES, Arithmetic
from reference.bounds.exact import FLOAT32_SAFE
from reference.bounds.forward import SUBNORMAL_FLUSH, merge_error, part_error


def keys_may_overflow(k: Tensor, sm_scale: float, a: Arithmetic) -> bool:
    """Whether a key may become infinite when it is scaled, so that its score is 0 * inf = NaN even where q is 0.

    The factor is up to |sm_scale| log2 e, which is below 2 |sm_scale|; k has any shape.
    """
    is_scaled = a.k_prescaled or a.qk_prescaled or a.rounded_scores
    top = 0.5 * a.weights.maximum if is_scaled else FLOAT32_SAFE
    return bool(k.double().abs().amax() * max(1.0, abs(sm_scale)) >= top)


def mean_bounds(
    mean: Tensor, size: Tensor, counts: Tensor, terms: int, a: Arithmetic
) -> tuple[Tensor, Tensor]:
    """Return the bounds of out and lse of a row whose scores are all 0, out being a mean of small integers.

    ``mean`` and ``size`` (batch, heads_q, seqlen_q, head_dim) are the means of v and of |v| over the keys that a row
    sees, ``counts`` their number, which broadcasts with (batch, heads_q, seqlen_q, 1), and ``terms`` is seqlen_k.
    The bound of lse has the shape of ``counts`` without its last dimension.
    """
    of_parts = float(part_error(a, 0.0, terms)) if a.merged > 1 else 0.0
    coarse = (4 * a.rounded_scores + PARTIAL_STORES * a.rounded_partials) * a.output.roundoff
    out = (a.div_error + a.output.roundoff * (1 + a.div_error)) * mean.abs() + a.output.underflow
    if a.normalised_first or a.partial_results or a.rounded_largest_weight or of_parts or coarse:
        relative = a.weights.roundoff + a.div_error + terms * a.accumulate + merge_error(a, terms)
        relative += 2 * of_parts + coarse + (1 + PARTIAL_STORES) * a.difference_error
        out = out + relative * size + a.weights.underflow * size * counts
    lse = counts[..., 0].log()
    error = a.log_error * lse.abs().clamp_min(1.0) + 3 * FP32_ROUNDOFF * lse.abs() + of_parts
    error = error + a.rounded_scores * a.weights.roundoff * (1 + lse.abs()) + a.lse_conversion * lse.abs()
    return out, torch.where(lse == -torch.inf, 0.0, error)


def row_bound(row: Tensor, largest: Tensor, terms: int, a: Arithmetic) -> Tensor:
    """Return the bound of an out that is one row of v, given that row, the largest |v|, and seqlen_k as ``terms``."""
    lost = row.abs().clamp_min(2.0**-125) if a.operand_floor else row.abs()
    left = leftover(terms) + 2 * a.difference_error
    bound = torch.where(row.abs() < SUBNORMAL_FLUSH, lost, 0.0) + left * largest
    of_weight = a.accumulate + a.div_error + a.rounded_largest_weight * a.weights.roundoff
    if not (a.rounded_reference or a.rounded_largest_weight) or of_weight < a.output.roundoff / 2:
        return bound
    return bound + (of_weight + a.output.roundoff * (1 + of_weight)) * row.abs() + 2 * a.output.underflow


def leftover(terms: int) -> float:
    """Return what ``terms`` weights that should be 0 may add up to."""
    return terms * SUBNORMAL_FLUSH
