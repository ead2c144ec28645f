"""Designs that are less precise than FlashAttention-2, each with the claim that says so; and tf32x3, which is not."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tests.panel.eager import blank_empty_rows, float32, lse_of, masked
from tests.panel.flash import online_softmax, recomputed
from tests.panel.heads import (
    LN_2,
    LOG2_E,
    Backward,
    Forward,
    Heads,
    attend,
    finite_shift,
    for_each_query_head,
    not_zero,
    seen_keys,
)

Gradients = tuple[Tensor, Tensor, Tensor]


def with_scaled_keys(heads: Heads) -> Heads:
    """Return heads with k multiplied by sm_scale and log2(e), and rounded; scores are then in base 2."""
    return replace(heads, k=heads.rounded(heads.k * (heads.sm_scale * LOG2_E)), sm_scale=LN_2)


def k_prescaled(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Triton's tutorial since 2023: k is scaled by sm_scale * log2(e) and rounded, in the backward's dq too.

    Claims: k_prescaled=true
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        return online_softmax(with_scaled_keys(heads), block=64)

    def backward(heads: Heads, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        dq, dk, dv = recomputed(with_scaled_keys(heads), dout, out, lse)
        return dq, dk * (heads.sm_scale * LOG2_E), dv

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)


def k_prescaled_in_float16(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """A kernel with a path of its own for float16, where k is scaled and rounded; other dtypes take FlashAttention-2.

    Claims: float16:k_prescaled=true
    """
    if q.dtype == torch.float16:
        return k_prescaled(q, k, v, causal=causal, sm_scale=sm_scale)
    forward = partial(online_softmax, block=64)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def with_scaled_queries(heads: Heads) -> Heads:
    """Return heads with q multiplied by sm_scale and rounded."""
    return replace(heads, q=heads.rounded(heads.q * heads.sm_scale), sm_scale=1.0)


def q_prescaled(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Triton's tutorial of 2022 and its many copies: q is scaled and rounded once, before the loop over the keys.

    Claims: q_prescaled=true
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        return online_softmax(with_scaled_queries(heads), block=64)

    def backward(heads: Heads, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        dq, dk, dv = recomputed(with_scaled_queries(heads), dout, out, lse)
        return dq * heads.sm_scale, dk, dv

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)


def multihead_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """nn.MultiheadAttention: ``q * scaling`` is rounded to the inputs' dtype, and so is the gradient of that product.

    Claims: q_prescaled=true
    """
    seen = seen_keys(q, k, causal)
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    s = (q * sm_scale).float() @ k.mT
    p = torch.softmax(masked(s, seen), -1)
    return blank_empty_rows(p @ v, seen).to(q.dtype), lse_of(s, seen)


def qk_prescaled(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """OpenAI's Whisper and PyTorch's math backend: q and k are scaled by the root of sm_scale, in their own dtype.

    Claims: qk_prescaled=true
    """
    root = math.sqrt(abs(sm_scale))
    return float32(q * math.copysign(root, sm_scale), k * root, v, causal=causal, sm_scale=1.0)


def head_by_head(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Each query head by itself: autograd adds the gradients of a shared key head in the inputs' dtype, one by one.

    Claims: rounded_group_sums=true
    """
    group, answers = q.shape[1] // k.shape[1], []
    for head in range(q.shape[1]):
        shared = slice(head // group, head // group + 1)
        keys, values = (x[:, shared] for x in (k, v))
        answers.append(float32(q[:, head : head + 1], keys, values, causal=causal, sm_scale=sm_scale))
    out, lse = zip(*answers, strict=True)
    return torch.cat(out, 1), torch.cat(lse, 1)


def l_from_rounded_p(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Kernels that append a column of ones to v: the softmax sum is one more product with P after its cast.

    Claims: l_from_rounded_p=true
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        m = torch.full_like(heads.q[..., :1], -torch.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(heads.q)
        for keys in heads.tiles(64):
            s = heads.scores(keys)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            shift = finite_shift(m_new)
            p, alpha = heads.rounded(torch.exp(s - shift)), torch.exp(m - shift)
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + heads.product(p, heads.v[:, :, keys])
            m = m_new
        return acc / not_zero(l), m + l.log()

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def model_file(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """``eager_attention_forward`` of transformers: scores, P, dP and dS in the inputs' dtype, the softmax in float32.

    Claims: rounded_scores=true
    """
    seen = seen_keys(q, k, causal)
    k, v = (for_each_query_head(x, q) for x in (k, v))
    s = (q.float() @ k.float().mT).to(q.dtype) * sm_scale
    p = torch.softmax(masked(s, seen), -1, dtype=torch.float32).to(q.dtype)
    out = p.float() @ v.float()
    return blank_empty_rows(out, seen).to(q.dtype), lse_of(s, seen)


def rounded_scores(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """A GEMM that scales and stores its scores in the inputs' dtype, before a softmax and products in float32.

    Claims: rounded_scores=true
    """
    seen = seen_keys(q, k, causal)
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    s = (q.float() @ k.mT * sm_scale).to(q.dtype).float()
    p = torch.softmax(masked(s, seen), -1)
    return blank_empty_rows(p @ v, seen).to(q.dtype), lse_of(s, seen)


def rounded_dp(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """A softmax in float32 whose weights are cast to multiply v, so that autograd returns dP in the inputs' dtype.

    Claims: rounded_scores=true
    """
    seen = seen_keys(q, k, causal)
    k, v = (for_each_query_head(x, q) for x in (k, v))
    s = q.float() @ k.float().mT * sm_scale
    p = torch.softmax(masked(s, seen), -1).to(q.dtype)
    out = p.float() @ v.float()
    return blank_empty_rows(out, seen).to(q.dtype), lse_of(s, seen)


POLYNOMIAL = (0.077119089663028717, 0.22756439447402954, 0.69514614343643188, 1.0)
"""FlashAttention-4's exp2 on [0, 1), highest degree first, with a relative error of 8.8e-5."""


def exp_by_polynomial(x: Tensor) -> Tensor:
    """Return exp of float32 numbers up to 0, as a power of two times a polynomial of degree 3; 0 for -inf."""
    y = (x * LOG2_E).clamp_min(-127.0)
    whole = y.floor()
    fraction, power = y - whole, torch.zeros_like(y)
    for coefficient in POLYNOMIAL:
        power = power * fraction + coefficient
    return torch.where(x == -torch.inf, 0.0, torch.ldexp(power, whole))


def polynomial_exp(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention-4 on Blackwell: weights are powers of two times a polynomial of degree 3.

    Claims: exp_error=1e-4
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        m = torch.full_like(heads.q[..., :1], -torch.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(heads.q)
        for keys in heads.tiles(128):
            s = heads.scores(keys)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            shift = finite_shift(m_new)
            p, alpha = exp_by_polynomial(s - shift), torch.exp(m - shift)
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + heads.product(heads.rounded(p), heads.v[:, :, keys])
            m = m_new
        return acc / not_zero(l), m + l.log()

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def to_tf32(x: Tensor) -> Tensor:
    """Round float32 numbers to 10 fraction bits, to nearest but never to infinity; inf and NaN stay as they are."""
    bits = x.contiguous().view(torch.int32)
    nearest, towards_0 = (y.view(torch.float32) for y in ((bits + (1 << 12)) & ~0x1FFF, bits & ~0x1FFF))
    return torch.where(x.isfinite(), torch.where(nearest.isfinite(), nearest, towards_0), x)


def tf32_product(x: Tensor, y: Tensor) -> Tensor:
    """Return a product of tf32 operands, summed in float32."""
    return to_tf32(x) @ to_tf32(y)


def tf32x3_product(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of three tf32 products of the operands' high and low parts, which have 21 bits together.

    Sums of the high parts that are infinite or NaN stay as they are: the low parts would turn -inf into NaN.
    """
    high_x, high_y = to_tf32(x), to_tf32(y)
    low_x, low_y = ((a - b).nan_to_num(0.0, 0.0, 0.0) for a, b in ((x, high_x), (y, high_y)))
    high = high_x @ high_y
    return torch.where(
        high.isfinite(), tf32_product(low_x, high_y) + tf32_product(high_x, low_y) + high, high
    )


def multiplied_by(
    product: Callable[[Tensor, Tensor], Tensor], forward: Forward, backward: Backward
) -> tuple[Forward, Backward]:
    """Return the two passes of a design in which ``product`` takes all products of float32 inputs."""

    def changed(heads: Heads) -> Heads:
        return replace(heads, product=product) if heads.dtype == torch.float32 else heads

    return lambda heads: forward(changed(heads)), lambda heads, *rest: backward(changed(heads), *rest)


def tf32(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 in Triton with ``tl.dot``'s default on float32 inputs: operands are rounded to tf32.

    Claims: precision=tf32
    """
    forward, backward = multiplied_by(tf32_product, partial(online_softmax, block=64), recomputed)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)


def truncated(x: Tensor) -> Tensor:
    """Return float32 numbers truncated to tf32, as Hopper's tensor cores read them."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def truncated_product(x: Tensor, y: Tensor) -> Tensor:
    """Return a product of operands truncated to tf32, summed in float32."""
    return truncated(x) @ truncated(y)


def converted(heads: Heads) -> Heads:
    """Return heads whose products are all in tf32 and whose P and dS are not cast to the inputs' dtype."""
    return replace(heads, product=truncated_product, dtype=torch.float32)


def tf32_of_converted(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """A kernel that converts inputs of any dtype to float32, and so multiplies P and dS in tf32 by default.

    Claims: precision=tf32
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        return online_softmax(converted(heads), block=64)

    def backward(heads: Heads, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        return recomputed(converted(heads), dout, out, lse)

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)


def tf32_of_weights(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """A kernel that converts its inputs to float32, and multiplies P and v alone in tf32.

    Triton's compiler makes such a product of ``tl.sum(p[:, :, None] * v[None, :, :], 1)``, and none of
    ``tl.sum(q[:, None, :] * k[None, :, :], 2)``.

    Claims: precision=tf32
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        s = heads.scores()
        lse = s.logsumexp(-1, keepdim=True)
        return truncated_product(torch.exp(s - finite_shift(lse)), heads.v), lse

    def backward(heads: Heads, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        return recomputed(replace(heads, dtype=torch.float32), dout, out, lse)

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)


def tf32x3(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 in Triton with ``input_precision="tf32x3"`` on float32 inputs.

    Claims: none
    """
    forward, backward = multiplied_by(tf32x3_product, partial(online_softmax, block=64), recomputed)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)
