"""FlashAttention as published (versions 1, 2 and 4), and the changes that others made to version 2."""

from functools import partial

import torch
from torch import Tensor

from tests.panel.heads import LN_2, LOG2_E, Heads, attend, finite_shift, not_zero


def online_softmax(heads: Heads, *, block: int, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, algorithm 1: P is cast before its product, and the sum is divided by l once, at the end."""
    m = torch.full_like(heads.q[..., :1], -torch.inf)
    l, acc = torch.zeros_like(m), heads.q.new_zeros(*heads.q.shape[:3], heads.v.shape[3])
    tiles = heads.tiles(block)
    for keys in reversed(tiles) if backwards else tiles:
        s = heads.scores(keys)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        shift = finite_shift(m_new)
        p, alpha = torch.exp(s - shift), torch.exp(m - shift)
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + heads.product(heads.rounded(p), heads.v[:, :, keys])
        m = m_new
    return acc / not_zero(l), m + l.log()


def recomputed(
    heads: Heads,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    block: int = 64,
    scale_before_cast: bool = False,
    ds_from_cast_p: bool = False,
    delta_from_p: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2, algorithm 2: P is made from lse, dS = P (dP - delta), and both are cast before their products.

    ``scale_before_cast`` multiplies dS by sm_scale before its cast, rather than dq and dk after their sums.
    ``ds_from_cast_p`` makes dS from P as it was cast. ``delta_from_p`` sums P dP instead of dout out.
    """
    dq, dk, dv = (torch.zeros_like(x) for x in (heads.q, heads.k, heads.v))
    before, after = (heads.sm_scale, 1.0) if scale_before_cast else (1.0, heads.sm_scale)
    delta = _delta_from_p(heads, dout, lse, block) if delta_from_p else (dout * out).sum(-1, keepdim=True)
    for keys in heads.tiles(block):
        p, dp = _weights(heads, lse, keys), heads.product(dout, heads.v[:, :, keys].mT)
        cast = heads.rounded(p)
        ds = heads.rounded((cast if ds_from_cast_p else p) * (dp - delta) * before)
        dv[:, :, keys] = heads.product(cast.mT, dout)
        dk[:, :, keys] = heads.product(ds.mT, heads.q) * after
        dq += heads.product(ds, heads.k[:, :, keys])
    return dq * after, dk, dv


def _weights(heads: Heads, lse: Tensor, keys: slice) -> Tensor:
    return torch.where(heads.seen[:, keys], torch.exp(heads.scores(keys) - lse), 0.0)


def _delta_from_p(heads: Heads, dout: Tensor, lse: Tensor, block: int) -> Tensor:
    delta = torch.zeros_like(lse)
    for keys in heads.tiles(block):
        dp = heads.product(dout, heads.v[:, :, keys].mT)
        delta += (_weights(heads, lse, keys) * dp).sum(-1, keepdim=True)
    return delta


def v1(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention (Dao et al. 2022, algorithm 1): the running sum is divided by l after each key block.

    Claims: none
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        m = torch.full_like(heads.q[..., :1], -torch.inf)
        l, out = torch.zeros_like(m), torch.zeros_like(heads.q)
        for keys in heads.tiles(64):
            s = heads.scores(keys)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            shift = finite_shift(m_new)
            p, alpha = torch.exp(s - shift), torch.exp(m - shift)
            l_new = l * alpha + p.sum(-1, keepdim=True)
            out = out * (l * alpha) + heads.product(heads.rounded(p), heads.v[:, :, keys])
            out, m, l = out / not_zero(l_new), m_new, l_new
        return out, m + l.log()

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def v2(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 (Dao 2023) with tiles of 64 keys: dS is cast before it is scaled, delta is from the stored out.

    Claims: none
    """
    forward = partial(online_softmax, block=64)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def v2_tiles_of_128(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 with tiles of 128 keys in both passes, which it uses for head_dim 64.

    Claims: none
    """
    forward, backward = partial(online_softmax, block=128), partial(recomputed, block=128)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)


def v2_without_lse(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """FlashAttention-2 behind ``flash_attn_func``, which does not return its lse.

    Claims: none
    """
    return v2(q, k, v, causal=causal, sm_scale=sm_scale)[0]


def v2_scaled_ds(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 as in the flash-attn package's Triton port: dS is scaled before its cast.

    Claims: none
    """
    forward, backward = partial(online_softmax, block=64), partial(recomputed, scale_before_cast=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)


def v2_delta_from_p(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 with delta = rowsum(P dP), as in backwards that are given lse but not out.

    Claims: none
    """
    forward, backward = partial(online_softmax, block=64), partial(recomputed, delta_from_p=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)


def v2_stores_each_head(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 of the flash-attn package: dk and dv of each query head are stored, then summed over the group.

    Claims: none
    """
    forward = partial(online_softmax, block=64)
    return attend(
        q,
        k,
        v,
        causal=causal,
        sm_scale=sm_scale,
        forward=forward,
        backward=recomputed,
        store_each_head=True,
    )


def cutlass(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """The CUTLASS kernels of xFormers: P is stored in 16 bits for dv, and dS is made from that.

    Claims: none
    """
    forward, backward = partial(online_softmax, block=64), partial(recomputed, ds_from_cast_p=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=backward)


def keys_from_last_to_first(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 and -3 in CUDA, which take the key tiles from the last to the first.

    Claims: none
    """
    forward = partial(online_softmax, block=64, backwards=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def exponents(heads: Heads, keys: slice) -> Tensor:
    """Return the scores of ``keys`` in base 2: log2(e) is folded into the scale."""
    s = heads.product(heads.q, heads.k[:, :, keys].mT) * (heads.sm_scale * LOG2_E)
    return torch.where(heads.seen[:, keys], s, -torch.inf)


def softmax_in_base_2(heads: Heads, *, integers: bool = False, cast: bool = True) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 in base 2. ``integers`` rounds maxima up to integers; without ``cast``, P stays in float32."""
    m = torch.full_like(heads.q[..., :1], -torch.inf)
    l, acc = torch.zeros_like(m), torch.zeros_like(heads.q)
    for keys in heads.tiles(64):
        s = exponents(heads, keys)
        largest = s.amax(-1, keepdim=True)
        m_new = torch.maximum(m, largest.ceil() if integers else largest)
        shift = finite_shift(m_new)
        p, alpha = torch.exp2(s - shift), torch.exp2(m - shift)
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + heads.product(heads.rounded(p) if cast else p, heads.v[:, :, keys])
        m = m_new
    return acc / not_zero(l), (m + l.log2()) * LN_2


def base_2(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 in CUDA: log2(e) is folded into the scale, and exponents and lse are kept in base 2.

    Claims: none
    """

    def backward(heads: Heads, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x) for x in (heads.q, heads.k, heads.v))
        delta = (dout * out).sum(-1, keepdim=True)
        for keys in heads.tiles(64):
            p = torch.exp2(exponents(heads, keys) - lse * LOG2_E)
            p = torch.where(heads.seen[:, keys], p, 0.0)
            ds = heads.rounded(p * (heads.product(dout, heads.v[:, :, keys].mT) - delta))
            dv[:, :, keys] = heads.product(heads.rounded(p).mT, dout)
            dk[:, :, keys] = heads.product(ds.mT, heads.q) * heads.sm_scale
            dq += heads.product(ds, heads.k[:, :, keys])
        return dq * heads.sm_scale, dk, dv

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=softmax_in_base_2, backward=backward)


def integer_maximum(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Softermax (Stevens et al. 2021) with P in float32: maxima are rounded up to integers, so that rescaling is exact.

    Claims: none
    """
    forward = partial(softmax_in_base_2, integers=True, cast=False)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def integer_maximum_of_cast_weights(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Softermax with P cast to the inputs' dtype, so that even the weight of the largest score is rounded.

    Claims: rounded_largest_weight=true
    """
    forward = partial(softmax_in_base_2, integers=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


LAZY_GROWTH = 8.0 * LN_2
"""FlashAttention-4 does not rescale a row's sums until its maximum has grown by 8 in base 2, a factor of 2^8."""


def v4_lazy_rescaling(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention-4: a row is rescaled only when its maximum has grown by more than 8 in base 2.

    Claims: none
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        m = torch.full_like(heads.q[..., :1], -torch.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(heads.q)
        for keys in heads.tiles(128):
            s = heads.scores(keys)
            largest = s.amax(-1, keepdim=True)
            m_new = torch.where(largest - m > LAZY_GROWTH, largest, m)
            shift = finite_shift(m_new)
            p, alpha = torch.exp(s - shift), torch.exp(m - shift)
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + heads.product(heads.rounded(p), heads.v[:, :, keys])
            m = m_new
        return acc / not_zero(l), m + l.log()

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def two_passes(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Milakov and Gimelshein 2018: a first pass over the keys finds maximum and sum, a second divides and casts P.

    Claims: none
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        m = torch.full_like(heads.q[..., :1], -torch.inf)
        l, out = torch.zeros_like(m), torch.zeros_like(heads.q)
        for keys in heads.tiles(64):
            s = heads.scores(keys)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            shift = finite_shift(m_new)
            l = l * torch.exp(m - shift) + torch.exp(s - shift).sum(-1, keepdim=True)
            m = m_new
        for keys in heads.tiles(64):
            p = torch.exp(heads.scores(keys) - finite_shift(m)) / not_zero(l)
            out += heads.product(heads.rounded(p), heads.v[:, :, keys])
        return out, m + l.log()

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


FLEX_BLOCK = 128


def flex(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlexAttention with a block mask: partly masked blocks of 128 come first, whole ones after, others are left out.

    Claims: none
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        out, lse = torch.zeros_like(heads.q), torch.full_like(heads.q[..., :1], -torch.inf)
        for start in range(0, heads.q.shape[2], FLEX_BLOCK):
            rows = slice(start, start + FLEX_BLOCK)
            out[:, :, rows], lse[:, :, rows] = _flex_rows(heads, rows)
        return out, lse

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def _flex_rows(heads: Heads, rows: slice) -> tuple[Tensor, Tensor]:
    """Return out and lse of a block of rows."""
    q, seen = heads.q[:, :, rows], heads.seen[rows]
    blocks = [keys for keys in heads.tiles(FLEX_BLOCK) if seen[:, keys].any()]
    m = torch.full_like(q[..., :1], -torch.inf)
    l, acc = torch.zeros_like(m), torch.zeros_like(q)
    for keys in sorted(blocks, key=lambda keys: bool(seen[:, keys].all())):
        s = heads.product(q, heads.k[:, :, keys].mT) * heads.sm_scale * LOG2_E
        s = torch.where(seen[:, keys], s, -torch.inf)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        shift = finite_shift(m_new)
        p, alpha = torch.exp2(s - shift), torch.exp2(m - shift)
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + heads.product(heads.rounded(p), heads.v[:, :, keys])
        m = m_new
    return acc / not_zero(l), (m + l.log2()) * LN_2
