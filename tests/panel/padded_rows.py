"""Packed sequences in buffers of a fixed size: rows behind the last one have results and gradients of 0."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.panel.eager import float32

CLAIMS = ("ragged=packed", "rows_behind=zero")
"""The claims of ``of_fixed_size``."""

Parts = list[tuple[slice, slice]]
"""The rows and the keys of each sequence."""


class _Packed(torch.autograd.Function):
    """Attention of each sequence by itself, with buffers of zeros for all rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], parts: Parts) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.options, ctx.parts = options, parts
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        lse = torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
        for rows, keys in parts:
            of_one = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
            out[:, :, rows], lse[:, :, rows] = float32(*of_one, **options)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        for rows, keys in ctx.parts:
            given = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
            of_one = [x.detach().requires_grad_() for x in given]
            with torch.enable_grad():
                out, _lse = float32(*of_one, **ctx.options)
            found = torch.autograd.grad(out, of_one, dout[:, :, rows])
            dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = found
        return dq, dk, dv, None, None


def of_fixed_size(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """Each sequence by itself, in buffers that a CUDA graph could keep."""
    options = {"causal": causal, "sm_scale": sm_scale}
    if cu_seqlens_q is None or cu_seqlens_k is None:
        parts = [(slice(0, q.shape[2]), slice(0, k.shape[2]))]
    else:
        cuts = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
        parts = [(slice(*rows), slice(*keys)) for rows, keys in cuts]
    out, lse = _Packed.apply(q, k, v, options, parts)
    return out, lse
