"""Element-wise rounding-error bounds for attention kernels: how far a correct kernel may be from float64.

There are two rules. The *deterministic* bound (rule 1) holds for every input: it adds up the worst case of every
rounding that the kernel's ``Arithmetic`` admits. The *probable* bound (rule 2) is tighter where there are
many terms: casts of unequal values, and the steps of a float32 sum, are treated as independent, so that
their sum grows like a square root (Higham & Mary 2019; Ipsen & Zhou 2020, arXiv 1906.10465). Rule 2 holds on
fresh random data and must not be used on data picked by a search. In both rules, errors of scores, of dP and of
exponentials count in full, because they may all have the same sign, as where tensor cores truncate.

Notation, in every module here: S = sm_scale * q k^T, A = |sm_scale| |q| |k|^T, P = softmax(S), l the sum of
exponentials that softmax divides by, dP = dout v^T, dS = P (dP - delta), U = 2^-24, u the roundoff of the cast of
P and dS. Query heads are folded into rows (``reference.heads``): the shape (batch, heads_kv, rows, seqlen_k), with
rows = group * seqlen_q, is written (B, H, R, N). D is head_dim: for q, k, dq and dk that of q, for v, out, dout and dv
that of v.
"""

from reference.bounds.backward import GradientBounds, backward_bounds
from reference.bounds.exact import Exact, exact
from reference.bounds.forward import ForwardBounds, forward_bounds, fused_overflow

__all__ = [
    "Exact",
    "ForwardBounds",
    "GradientBounds",
    "backward_bounds",
    "exact",
    "forward_bounds",
    "fused_overflow",
]
