"""The gradient of sinks, and its bound.

The sink s of a head is the score of one more key whose value is 0, so that its dP is 0 and its dS is -p (delta - g),
where p = exp(s - lse), and g is the gradient of lse. dsinks is the sum of these over the rows of the head, of all
sequences. p errs relatively by expm1 of 4 U (|s| + |lse|), of the error of lse where that is not the kernel's own,
and by 16 U for exp, the division by l and the product; where P is cast before dS is made of it, by that cast as well.
Terms of rows that see no key are 0. A sum of n terms in float32 errs by n U times the sum of their sizes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF, Arithmetic
from reference.bounds.exact import Exact
from reference.bounds.forward import SUBNORMAL_FLUSH
from reference.heads import unfold


@dataclass(frozen=True)
class OfSinks:
    """What dsinks is made of, beside the sinks.

    ``delta`` (B, H, R, 1) has the gradient of lse subtracted, and ``shift`` (B, H, R) is the lse that weights are made
    of; each has its error.
    """

    delta: Tensor
    delta_error: Tensor
    shift: Tensor
    shift_error: Tensor | float


def sinks_gradient(e: Exact, x: OfSinks, a: Arithmetic, casts: int, lost: Tensor) -> dict[str, Tensor]:
    """Return dsinks (heads_q,) and its bound by rule 1, in float64, by the names of ``GradientBounds``.

    dS of other keys errs by so many ``casts``, of which the last is its own. ``lost`` (B, H, R, 1) are the rows in
    which a product may overflow. Raises ValueError for a call without sinks.
    """
    if e.sink is None:
        raise ValueError("of_sinks: got True without sinks, expected a call with sinks")
    heads_q, shift = e.group * e.k.shape[1], x.shift[..., None]
    extra = x.shift_error[..., None] if isinstance(x.shift_error, Tensor) else x.shift_error
    p = (e.sink - shift).exp().masked_fill(e.empty[..., None], 0.0)
    relative = torch.expm1(4 * FP32_ROUNDOFF * (e.sink.abs() + shift.abs()) + extra + 16 * FP32_ROUNDOFF)
    relative = relative + (casts - 1) * a.weights.roundoff
    if a.rounded_scores:
        relative = relative + 4 * a.weights.roundoff
    size = p * x.delta.abs()
    error = relative * size + p * (1 + relative) * x.delta_error + SUBNORMAL_FLUSH
    value, size, error, overflows = (
        unfold(y.expand_as(shift), heads_q).sum((0, 2, 3)) for y in (-p * x.delta, size, error, lost.double())
    )
    terms = shift.numel() // max(1, heads_q)
    error = error + (terms + 1) * FP32_ROUNDOFF * (size + error)
    return {"dsinks": value, "dsinks_bound": error.masked_fill_(overflows > 0, math.inf)}
