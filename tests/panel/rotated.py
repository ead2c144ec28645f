"""Attention that rotates q and k by their positions itself (Su et al. 2021, arXiv 2104.09864), as fused kernels do."""

import torch
from torch import Tensor

from tests.panel.appended import in_pages
from tests.panel.eager import float32
from tests.panel.flash import online_softmax, recomputed
from tests.panel.heads import Options, attend_by_launches, heads_of

CLAIMS = ("rotary=halves,interleaved",)
"""The claims of ``eager`` and ``fused``."""
APPENDED = ("ragged=paged,append", "rotary=halves,interleaved")
"""The claims of ``appended``."""


def rotated(x: Tensor, first: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x (batch, heads, rows, head_dim), rotated in float32, in its own dtype.

    The rows of each sequence have the positions from ``first`` on, (batch or 1,). cos and sin are (positions,
    rotary_dim // 2).
    """
    half = cos.shape[1]
    at = first[:, None] + torch.arange(x.shape[2], device=x.device)
    cos, sin = cos[at][:, None].float(), sin[at][:, None].float()
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :].float()
    if interleaved:
        x1, x2 = turning[..., 0::2], turning[..., 1::2]
    else:
        x1, x2 = turning[..., :half], turning[..., half:]
    pairs = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned, rest), -1).to(x.dtype)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate all rows of q and k, and take a softmax over whole rows in float32; gradients through autograd."""
    if rotary_cos is not None and rotary_sin is not None:
        tables = rotary_cos, rotary_sin, rotary_interleaved
        first = torch.tensor([k.shape[2] - q.shape[2]], device=q.device)
        q, k = rotated(q, first, *tables), rotated(k, torch.zeros_like(first), *tables)
    return float32(q, k, v, causal=causal, sm_scale=sm_scale)


def appended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and new keys by their places in their sequences, and append the keys to a cache in pages."""
    if rotary_cos is not None and rotary_sin is not None:
        tables = rotary_cos, rotary_sin, rotary_interleaved
        if cache_seqlens is None or k_new is None:
            return eager(
                q,
                k,
                v,
                causal=causal,
                sm_scale=sm_scale,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                rotary_interleaved=rotary_interleaved,
            )
        q = rotated(q, cache_seqlens + k_new.shape[2] - q.shape[2], *tables)
        k_new = rotated(k_new, cache_seqlens, *tables)
    return in_pages(
        q,
        k,
        v,
        causal=causal,
        sm_scale=sm_scale,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        k_new=k_new,
        v_new=v_new,
    )


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 on rows that are rotated in both passes; the backward rotates gradients by opposite angles."""
    first = torch.tensor([k.shape[2] - q.shape[2]], device=q.device)
    start = torch.zeros_like(first)

    def turned(x: Tensor, first: Tensor, sign: float) -> Tensor:
        """Return rows rotated forward, or back if ``sign`` is -1."""
        if rotary_cos is None or rotary_sin is None:
            return x
        return rotated(x, first, rotary_cos, sign * rotary_sin, rotary_interleaved)

    def launch(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
        """Return out as it is stored, and lse."""
        heads = heads_of(turned(q, first, 1.0), turned(k, start, 1.0), v, causal, sm_scale)
        out, lse = online_softmax(heads, block=64)
        return out.to(q.dtype), lse[..., 0].contiguous()

    def gradients(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, o: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q and k before the rotation, and that of v."""
        heads = heads_of(turned(q, first, 1.0), turned(k, start, 1.0), v, o.causal, o.sm_scale)
        dq, dk, dv = recomputed(heads, dout.float(), out.float(), lse[..., None])
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
        dq, dk = turned(dq, first, -1.0), turned(dk, start, -1.0)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    return attend_by_launches(q, k, v, causal=causal, sm_scale=sm_scale, launch=launch, gradients=gradients)
