"""Attention to q and k of 8 bits, and to v of 8 or 16 bits, with scales for each head, as inference engines call it."""

from typing import Any

import torch
from torch import Tensor

from tests.panel.heads import LN_2, LOG2_E, finite_shift, for_each_query_head, not_zero, seen_keys
from tests.panel.scores import ALL_CLAIMS, capped, everything

OF_INPUTS = ("fp8_inputs=qk,qkv", "dtypes=bfloat16", "backward=false")
DEQUANTISED = (*OF_INPUTS, *(claim for claim in ALL_CLAIMS if claim != "bias_gradient=true"), "v_in_k=true")
"""The claims of ``dequantised``."""
TILED = (*OF_INPUTS, "softcap=0,1.5,20")
"""The claims of ``tiled``."""

KEYS = 32
"""The keys of a tile of ``tiled``."""
OF_WEIGHTS = 2.0**8
"""P is multiplied by this before its cast to 8 bits, as in FlashAttention-3, so that small weights keep their bits."""


def in_16_bits(x: Tensor, scale: Tensor) -> Tensor:
    """Return what 8-bit numbers (batch, heads, rows, head_dim) stand for, with scales (batch, heads_kv)."""
    by_head = scale.repeat_interleave(x.shape[1] // scale.shape[1], 1)
    return (x.float() * by_head[..., None, None]).to(torch.bfloat16)


def dequantised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Multiply the numbers by their scales, and go on as in any other call, in float32 and over whole rows."""
    if q_scale is not None and k_scale is not None:
        q, k = in_16_bits(q, q_scale), in_16_bits(k, k_scale)
    if v_scale is not None:
        v = in_16_bits(v, v_scale)
    return everything(q, k, v, causal=causal, sm_scale=sm_scale, **options)


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    softcap: float = 0.0,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-3: scales multiply scores and out alone, and P is cast to v's dtype, be it of 8 bits or not."""
    seen = seen_keys(q, k, causal)
    rows, keys, values = q.float(), *(for_each_query_head(x.float(), q) for x in (k, v))
    one = torch.ones(1, 1, 1, 1, device=q.device)
    of_scores, of_out, of_weights = one, one, 1.0
    if q_scale is not None and k_scale is not None:
        of_scores = for_each_query_head(q_scale * k_scale, q)[..., None, None]
    if v_scale is not None:
        of_out, of_weights = for_each_query_head(v_scale, q)[..., None, None], OF_WEIGHTS
    acc = torch.zeros(*q.shape[:3], v.shape[3], device=q.device)
    m = torch.full_like(acc[..., :1], -torch.inf)
    l = torch.zeros_like(m)
    for at in range(0, k.shape[2], KEYS):
        tile = slice(at, min(at + KEYS, k.shape[2]))
        s = capped(rows @ keys[:, :, tile].mT * (of_scores * sm_scale), softcap) * LOG2_E
        s = s.masked_fill(~seen[:, tile], -torch.inf)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, alpha = torch.exp2(s - finite_shift(m_new)), torch.exp2(m - finite_shift(m_new))
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + (p * of_weights).to(v.dtype).float() @ values[:, :, tile]
        m = m_new
    out = acc / (not_zero(l) * of_weights) * of_out
    return out.to(torch.bfloat16), (m + l.log2())[..., 0] * LN_2
