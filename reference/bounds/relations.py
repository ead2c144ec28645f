"""Bounds of equations between the results of several calls, given the bounds of each call.

*Sums.* If an exact result is the sum of the exact results of parts, what a kernel returns for the whole differs from
the sum of what it returns for the parts by no more than their bounds add up to, by the triangle inequality. Gradients
are such a sum if dout is: at the same q, k and v, dP = dout v^T, delta = rowsum(dout * out) and dS = P (dP - delta) are
linear in dout, and so are all gradients. The bound of each call must then hold for its own forward's errors too
(``backward_bounds`` with ``forward``). So are dk and dv of a key head, over the query heads that share it.

*Merging.* With s running over two parts of the keys, out = sum_s w_s out_s, where w_s = exp(lse_s - lse). An error e_s
of lse_s moves weight from one part to the other. As w_1 = 1 / (1 + exp(lse_2 - lse_1)), it changes by at most
w_1 w_2 (exp(e_1 + e_2) - 1), and out by that times |out_1 - out_2|. The errors of out_s enter with the wrong weights,
w_s (1 + e_1 + e_2) to first order; ``SECOND_ORDER`` covers the rest while e_1 + e_2 is below 0.14. lse errs by no
more than the larger of e_1 and e_2, because its derivatives are the weights w_s, whose sum is 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.arithmetic import Arithmetic
from reference.bounds.forward import ForwardBounds
from reference.bounds.identities import SECOND_ORDER
from reference.bounds.scores import LARGEST_EXPONENT


def sum_bound(bounds: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """Return how far a result may be from the sum of the results for its parts, shaped like these.

    ``bounds`` are those of the whole and of the parts, and ``parts`` the kernel's own results. The bound is inf where a
    part is infinite: if it overflows the output's format, the sum need not.
    """
    total = bounds[0]
    for bound in bounds[1:]:
        total = total + bound
    return total.masked_fill(torch.stack([part.isinf() for part in parts]).any(0), torch.inf)


def merged_bounds(
    whole: ForwardBounds, parts: Sequence[ForwardBounds], outs: Tensor, weights: Tensor
) -> ForwardBounds:
    """Return how far a call's out and lse may be from those merged from calls for two parts of its keys.

    Bounds are shaped like out and lse. ``outs`` (2, batch, heads_q, seqlen_q, head_dim) and ``weights`` (2, batch,
    heads_q, seqlen_q) are what is merged, in float64. Bounds are inf in rows in which float32 may overflow, in the
    whole or in a part.
    """
    error = torch.stack([part.lse for part in parts]).sum(0)
    moved = torch.expm1(error.clamp_max(LARGEST_EXPONENT)) * weights.prod(0).clamp_max(1.0)
    of_outs = (weights.clamp_max(1.0)[..., None] * torch.stack([part.out for part in parts])).sum(0)
    of_parts = of_outs * (1 + error[..., None]) + moved[..., None] * (outs[0] - outs[1]).abs()
    lost = torch.stack([b.lse.isposinf() | b.out.isposinf().any(-1) for b in (whole, *parts)]).any(0)
    merged = ForwardBounds(
        out=whole.out + SECOND_ORDER * of_parts,
        lse=whole.lse + torch.maximum(parts[0].lse, parts[1].lse),
    )
    return merged.unknown_in(lost)


def only_exponents_change(q: Tensor, k: Tensor, sm_scale: float, factor: float, a: Arithmetic) -> bool:
    """Whether every rounding of a forward stays the same if ``factor`` moves from sm_scale to q.

    The factor is a power of two of a few bits, so that all numbers on the way keep their significant bits, unless one
    of them leaves the normal range with only one of the two scales, or is rounded between the two multiplications.
    """
    scaled = a.k_prescaled or a.q_prescaled or a.qk_prescaled
    if scaled or a.rounded_scores or not 2.0**-60 < abs(sm_scale) < 2.0**60:
        return False
    sizes = [x.double().abs() for x in (q, k)]
    smallest_q, smallest_k = (float(torch.where(x > 0, x, torch.inf).amin()) for x in sizes)
    holds = bool(((q * factor).double() == q.double() * factor).all())
    return holds and smallest_q * smallest_k > 2.0**-100
