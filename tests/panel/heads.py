"""What the panel's PyTorch designs share: the heads of a call in float32, and an autograd function for own backwards.

Each design rounds where its GPU original does: values are float32 tensors, and a cast to the inputs' dtype and
back stands for storing them in that dtype.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

LOG2_E = 1.0 / math.log(2.0)
LN_2 = math.log(2.0)


@dataclass(frozen=True)
class Heads:
    """One call, with k and v repeated so that each query head has its own.

    Attributes:
        q: (batch, heads_q, seqlen_q, head_dim) float32.
        k, v: (batch, heads_q, seqlen_k, head_dim) float32.
        seen: (seqlen_q, seqlen_k) bool, True where a query sees a key.
        sm_scale: the factor of the products of q and k.
        dtype: the dtype of the inputs, out and gradients.
        product: the function that multiplies two float32 matrices.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor
    sm_scale: float
    dtype: torch.dtype
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul

    def rounded(self, x: Tensor) -> Tensor:
        """Return float32 ``x`` with its values rounded to the inputs' dtype."""
        return x.to(self.dtype).float()

    def scores(self, keys: slice = slice(None)) -> Tensor:
        """Return the scaled scores of ``keys``, (batch, heads_q, seqlen_q, keys) float32, -inf where not seen."""
        s = self.product(self.q, self.k[:, :, keys].mT) * self.sm_scale
        return torch.where(self.seen[:, keys], s, -torch.inf)

    def tiles(self, size: int) -> list[slice]:
        """Return slices of ``size`` keys that cover all keys; the last may be shorter."""
        seqlen_k = self.k.shape[2]
        return [slice(start, min(start + size, seqlen_k)) for start in range(0, seqlen_k, size)]


Forward = Callable[[Heads], tuple[Tensor, Tensor]]
"""A function from heads to out (like q) and lse (batch, heads_q, seqlen_q, 1), in float32, before out is stored."""

Backward = Callable[[Heads, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""A function from heads, dout, the stored out and lse to dq, dk and dv of each query head, in float32 and scaled."""


Stored = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""A function from q, k, v, causal and sm_scale to out, as it is stored, and lse (batch, heads_q, seqlen_q)."""


@dataclass(frozen=True)
class Options:
    """The arguments of a call other than tensors, and whether dk and dv of each query head are stored on their own."""

    causal: bool
    sm_scale: float
    store_each_head: bool = False


Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor, Tensor]]
"""A function from dout, q, k, v, out, lse and the options of a call to dq, dk and dv as they are stored."""


def seen_keys(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return which keys each query sees, (seqlen_q, seqlen_k) bool; a causal mask is aligned at the bottom right."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    every = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    return every.tril(seqlen_k - seqlen_q) if causal else every


def for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Return k or v with each head repeated for the query heads of q that read it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def heads_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Heads:
    """Return the heads of a call, in float32."""
    k, v = (for_each_query_head(x, q).float() for x in (k, v))
    return Heads(q.float(), k, v, seen_keys(q, k, causal), sm_scale, q.dtype)


def not_zero(l: Tensor) -> Tensor:
    """Return softmax sums that can be divided by: 1 for a row that sees no key."""
    return l.masked_fill(l == 0.0, 1.0)


def finite_shift(m: Tensor) -> Tensor:
    """Return row maxima that can be subtracted: 0 for a row that has seen no key, as -inf - -inf is NaN."""
    return m.masked_fill(m == -torch.inf, 0.0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    forward: Forward,
    backward: Backward,
    store_each_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a design that has a backward of its own.

    ``store_each_head`` rounds dk and dv of each query head to the inputs' dtype before the sum over a group.
    """

    def launch(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
        out, lse = forward(heads_of(q, k, v, causal, sm_scale))
        return out.to(q.dtype), lse[..., 0].contiguous()

    options = Options(causal, sm_scale, store_each_head)
    return _Attention.apply(q, k, v, options, launch, partial(_each_head, backward))


def attend_by_launch(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, launch: Stored, backward: Backward
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a design whose forward is a kernel, and whose backward is written in PyTorch."""
    return _Attention.apply(q, k, v, Options(causal, sm_scale), launch, partial(_each_head, backward))


def attend_by_launches(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, launch: Stored, gradients: Gradients
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a design whose forward and backward are both kernels."""
    return _Attention.apply(q, k, v, Options(causal, sm_scale), launch, gradients)


def _each_head(
    backward: Backward, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, o: Options
) -> tuple[Tensor, Tensor, Tensor]:
    heads = heads_of(q, k, v, o.causal, o.sm_scale)
    dq, dk, dv = backward(heads, dout.float(), out.float(), lse[..., None])
    if o.store_each_head:
        dk, dv = heads.rounded(dk), heads.rounded(dv)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, v, ctx.options, launch, ctx.gradients = arguments
        out, lse = launch(q, k, v, ctx.options.causal, ctx.options.sm_scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *dout_and_dlse: Any) -> tuple[Tensor | None, ...]:
        dq, dk, dv = ctx.gradients(dout_and_dlse[0], *ctx.saved_tensors, ctx.options)
        return dq, dk, dv, None, None, None
