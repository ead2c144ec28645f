"""Stands for a kernel that is launched on a grid, as vLLM's Triton kernels are: it fills tensors of the caller."""

import torch
from torch import Tensor

from tests.unit.support.conventions.one_sequence import attend


@torch.no_grad()
def prefill(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool) -> None:
    """Fill ``out``, like q (batch, heads, seqlen, head_dim), and ``lse`` (batch, heads, seqlen) float32, natural.

    Rows that see no key are skipped: what was in ``out`` and ``lse`` stays there.
    """
    for b in range(len(q)):
        rows, keys, values = (x[b].transpose(0, 1) for x in (q, k, v))
        answer, natural = attend(rows, keys, values, scale, causal)
        answered = (natural != -torch.inf).all(-1)
        out[b, :, answered] = answer.transpose(0, 1)[:, answered]
        lse[b, :, answered] = natural.T[:, answered]
