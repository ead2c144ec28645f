"""Attention that does more to scores than scaling them: soft-caps, ALiBi, biases and sinks, in several designs."""

from typing import Any

import torch
from torch import Tensor

from tests.panel.eager import blank_empty_rows, lse_of, masked
from tests.panel.heads import LN_2, LOG2_E, finite_shift, for_each_query_head, not_zero, seen_keys
from tests.panel.masks import CLAIMS as MASK_CLAIMS
from tests.panel.masks import seen_keys as pattern_seen

CLAIMS = ("softcap=0,1.5,20,50", "alibi_slopes=true", "bias=all", "bias_gradient=true", "sinks=true")
"""The claims of the functions of this module."""

APPROXIMATE = "tanh_error=2^-10"
"""What ``approximate`` claims beside its soft-caps."""

IN_16_BITS = (*CLAIMS[1:4], "rounded_bias=true")
"""The claims of ``in_16_bits``."""

ALL_CLAIMS = (*CLAIMS, *MASK_CLAIMS)
"""The claims of ``everything``."""

KEYS = 32
"""The keys of a tile of ``tiled``."""


def capped(x: Tensor, softcap: float) -> Tensor:
    """Return scaled products after the soft-cap; 0 stands for none."""
    return torch.tanh(x / softcap) * softcap if softcap else x


def added(q: Tensor, k: Tensor, slopes: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return what is added to capped scores in float32; it broadcasts to (batch, heads_q, seqlen_q, seqlen_k)."""
    total = q.new_zeros(1, 1, 1, 1, dtype=torch.float32) if bias is None else bias.float()
    if slopes is None:
        return total
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    here = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
    distance = (here - torch.arange(seqlen_k, device=q.device)).abs()
    return total - slopes[:, None, None] * distance


def scores_of(
    q: Tensor, k: Tensor, sm_scale: float, softcap: float, alibi_slopes: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return all scores in float32, for k with a head for each query head."""
    return capped(q.float() @ k.mT * sm_scale, softcap) + added(q, k, alibi_slopes, bias)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GPT-OSS in model files: sinks are one more column of the scores, which is left out after the softmax."""
    seen = seen_keys(q, k, causal)
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    s = masked(scores_of(q, k, sm_scale, softcap, alibi_slopes, bias), seen)
    lse = lse_of(s, seen)
    if sinks is not None:
        s = torch.cat((s, sinks[None, :, None, None].expand(*s.shape[:-1], 1)), -1)
        lse = torch.logaddexp(lse, sinks[:, None])
    p = torch.softmax(s, -1)[..., : k.shape[2]]
    return blank_empty_rows(p @ v, seen).to(q.dtype), lse


def expanded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """T5 in model files: the bias is expanded to all scores first, so that each score's gradient is in 16 bits."""
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    options: dict[str, Any] = {"softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks}
    return eager(q, k, v, causal=causal, sm_scale=sm_scale, bias=bias, **options)


def gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sinks on top of a kernel that has none: out is multiplied by sigmoid(lse - sink)."""
    seen = seen_keys(q, k, causal)
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    s = masked(scores_of(q, k, sm_scale, softcap, alibi_slopes, bias), seen)
    lse = torch.logsumexp(s, -1)
    out = torch.exp(s - lse[..., None]) @ v
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks[:, None])[..., None]
        lse = torch.logaddexp(lse, sinks[:, None])
    return blank_empty_rows(out, seen).to(q.dtype), lse.detach().masked_fill(~seen.any(-1), -torch.inf)


def first_state(rows: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the running maximum, in base 2, and the running sum of ``tiled`` before the first key."""
    nothing = torch.zeros_like(rows[..., :1])
    if sinks is None:
        return nothing - torch.inf, nothing
    return nothing + sinks[:, None, None] * LOG2_E, nothing + 1.0


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2's loop in base 2, which begins with the sinks; a soft-cap is made of a sigmoid."""
    seen = seen_keys(q, k, causal)
    total = added(q, k, alibi_slopes, bias).expand(-1, -1, q.shape[2], k.shape[2])
    rows, keys, values = q.float(), *(for_each_query_head(x.float(), q) for x in (k, v))
    m, l = first_state(rows.detach(), sinks)
    acc = torch.zeros_like(rows)
    for at in range(0, k.shape[2], KEYS):
        tile = slice(at, min(at + KEYS, k.shape[2]))
        x = rows @ keys[:, :, tile].mT * sm_scale
        x = (2 * torch.sigmoid(2 * x / softcap) - 1) * softcap if softcap else x
        s = torch.where(seen[:, tile], (x + total[..., tile]) * LOG2_E, -torch.inf)
        m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        p, alpha = torch.exp2(s - finite_shift(m_new)), torch.exp2(m - finite_shift(m_new))
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ values[:, :, tile]
        m = m_new
    lse = (m + l.detach().log2())[..., 0] * LN_2
    return (acc / not_zero(l)).to(q.dtype), lse


def everything(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    window: int = 0,
    window_right: int = 0,
    chunk: int = 0,
    first_keys: int = 0,
    prefix: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every change of scores under every pattern of masks; the sum of exponentials is written out."""
    seen = pattern_seen(q, k, causal, window, window_right, chunk, first_keys, prefix)
    keys, values = (for_each_query_head(x.float(), q) for x in (k, v))
    s = scores_of(q, keys, sm_scale, softcap, alibi_slopes, bias)
    s = s.masked_fill(~seen, -torch.inf)
    m = (
        s.detach().amax(-1, keepdim=True)
        if k.shape[2]
        else torch.full_like(s.detach().sum(-1, True), -torch.inf)
    )
    if sinks is not None:
        column = sinks[:, None, None]
        m = torch.maximum(m, column)
    p = torch.exp(s - finite_shift(m))
    l = p.sum(-1, keepdim=True)
    if sinks is not None:
        l = l + torch.exp(column - m)
    return (p @ values / not_zero(l)).to(q.dtype), (m + l.detach().log())[..., 0]


def in_16_bits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ROCm's kernels in Triton: a bias and slopes are multiplied by log2(e) and kept in the inputs' dtype."""
    seen = seen_keys(q, k, causal)
    keys, values = (for_each_query_head(x.float(), q) for x in (k, v))
    slopes = None if alibi_slopes is None else (alibi_slopes * LOG2_E).to(q.dtype).float()
    of_pairs = None if bias is None else bias * LOG2_E
    s = (q.float() @ keys.mT * (sm_scale * LOG2_E) + added(q, k, slopes, of_pairs)) * LN_2
    p = torch.softmax(masked(s, seen), -1)
    return blank_empty_rows(p @ values, seen).to(q.dtype), lse_of(s, seen)


class _ApproximateTanh(torch.autograd.Function):
    """``tanh.approx.f32``, which errs by 2^-11 of its result (PTX ISA): here its last 12 bits are 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.result = (torch.tanh(x).view(torch.int32) & -(1 << 12)).view(torch.float32)
        return ctx.result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 - ctx.result.square())


def approximate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """FlashAttention's soft-cap on a GPU: the tanh is approximate."""
    seen = seen_keys(q, k, causal)
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    x = q.float() @ k.mT * sm_scale
    s = _ApproximateTanh.apply(x / softcap) * softcap if softcap else x
    p = torch.softmax(masked(s, seen), -1)
    return blank_empty_rows(p @ v, seen).to(q.dtype), lse_of(s, seen)
