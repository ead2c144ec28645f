"""Plain functions that are wrong from a size on, and one that is right; each wrong one follows a public mistake."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.contract import AttentionKernel
from kernels.registry import load

MODULE = __name__
LAST_POSITION = 2**16 - 1
"""The largest number of 16 bits, and the most blocks on the second axis of a grid."""


def expanded(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values for each query head."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def scores_of(q: Tensor, k: Tensor, causal: bool, sm_scale: float, rows: Tensor | None = None) -> Tensor:
    """Return masked scores; ``rows`` are the positions of the queries, by default those that they have."""
    scores = q.float() @ expanded(k, q).mT * sm_scale
    if not causal:
        return scores
    rows = torch.arange(q.shape[2], device=q.device) + k.shape[2] - q.shape[2] if rows is None else rows
    hidden = torch.arange(k.shape[2], device=q.device) > rows[:, None]
    return scores.masked_fill(hidden, -torch.inf)


def weights_of(scores: Tensor) -> Tensor:
    """Return the softmax, 0 in rows that see no key."""
    return (
        torch.softmax(scores, -1).nan_to_num(0.0)
        if bool(scores.isneginf().all(-1).any())
        else scores.softmax(-1)
    )


def sound(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    return (weights_of(scores_of(q, k, causal, sm_scale)) @ expanded(v, q)).to(q.dtype)


def keys_of_16_bits(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Positions of keys are 16-bit numbers: the key behind the last of these is the first again."""
    at = torch.arange(k.shape[2], device=k.device) % (LAST_POSITION + 1)
    return sound(q, k[:, :, at], v[:, :, at], causal=causal, sm_scale=sm_scale)


def keys_of_17_bits(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """The number of parts of a sequence is at most 128 of 1,024 keys: further keys are in no part."""
    most = 2**17
    if k.shape[2] <= most:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    scores = scores_of(q, k, causal, sm_scale)[..., :most]
    return (weights_of(scores) @ expanded(v[:, :, :most], q)).to(q.dtype)


def rows_of_a_grid(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Rows are on an axis of a grid that has at most 65,535 blocks: further rows are not computed."""
    out = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return torch.where(torch.arange(q.shape[2], device=q.device)[:, None] < LAST_POSITION, out, 0.0).to(
        q.dtype
    )


def heads_of_a_grid(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """The heads of all sequences are on such an axis."""
    out = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    heads = torch.arange(q.shape[0] * q.shape[1], device=q.device).view(*q.shape[:2], 1, 1)
    return torch.where(heads < LAST_POSITION, out, 0.0).to(q.dtype)


def positions_of_float16(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Positions are compared in float16, which has no odd numbers above 2,048."""
    rows = (torch.arange(q.shape[2], device=q.device) + k.shape[2] - q.shape[2]).half().float()
    return (weights_of(scores_of(q, k, causal, sm_scale, rows)) @ expanded(v, q)).to(q.dtype)


def sum_of_float16(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """The sum of the exponentials is kept in float16, whose largest number is 65,504."""
    scores = scores_of(q, k, causal, sm_scale)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)).nan_to_num(0.0)
    total = p.sum(-1, keepdim=True)
    total = torch.where(total > torch.finfo(torch.float16).max, torch.inf, total)
    return (p / torch.where(total == 0, 1.0, total) @ expanded(v, q)).to(q.dtype)


class _Gradients(torch.autograd.Function):
    """Attention whose gradients are changed by ``change``, given dq, dk and dv, and v with dout for each query head."""

    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, change):
        p = weights_of(scores_of(q, k, causal, sm_scale))
        ctx.save_for_backward(q, k, v, p)
        ctx.options = sm_scale, change
        return (p @ expanded(v, q)).to(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, p = ctx.saved_tensors
        sm_scale, change = ctx.options
        dout = dout.float()
        products = p * (dout @ expanded(v, q).mT)
        summed, kept = change(products, torch.ones(q.shape[2], 1, device=q.device))
        ds = products - p * summed.sum(-1, keepdim=True)

        def of_groups(x: Tensor) -> Tensor:
            return x.unflatten(1, (k.shape[1], -1)).sum(2)

        dq = ds @ expanded(k, q) * sm_scale
        dk = of_groups((ds * kept).mT @ q.float()) * sm_scale
        dv = of_groups((p * kept).mT @ dout)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def delta_of_1024_keys(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Rows of more than 1,024 keys go to another kernel, whose delta is a sum over the last 1,024 keys."""

    def change(products: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return products[..., -1024:], kept

    return _Gradients.apply(q, k, v, causal, sm_scale, change)


def sums_of_4096_rows(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Sum dk and dv over the first 4,096 rows."""

    def change(products: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        kept[4096:] = 0.0
        return products, kept

    return _Gradients.apply(q, k, v, causal, sm_scale, change)


def largest_product(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """The backward looks for an overflow in the largest product, which an empty batch does not have."""

    def change(products: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        if bool(products.amax().isposinf()):
            raise OverflowError("a product of dout and v is infinite")
        return products, kept

    return _Gradients.apply(q, k, v, causal, sm_scale, change)


def batch_of_none_refused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Give the answers of all sequences together, and refuse to put none together, before anything is computed."""
    return torch.stack(
        [
            sound(*(x[None] for x in each), causal=causal, sm_scale=sm_scale)[0]
            for each in zip(q, k, v, strict=True)
        ]
    )


def right_gradients(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    return _Gradients.apply(q, k, v, causal, sm_scale, lambda products, kept: (products, kept))


SOUND = (sound, right_gradients, batch_of_none_refused)
WRONG = (
    keys_of_16_bits,
    keys_of_17_bits,
    rows_of_a_grid,
    heads_of_a_grid,
    positions_of_float16,
    sum_of_float16,
    delta_of_1024_keys,
    sums_of_4096_rows,
    largest_product,
)


def kernel(function: Callable[..., Tensor]) -> AttentionKernel:
    """Return a function as a kernel with the default claims of plain functions."""
    return load(f"{MODULE}:{function.__name__}")
