"""vLLM's ``context_attention_fwd``, in Triton, for prefills. It has run on a GPU, without its package."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.ops.triton_prefill_attention import context_attention_fwd

from kernels.adapters.bridge import CLAIMS, only_on_cuda, packed
from kernels.adapters.known_failures import PREFILLS
from kernels.contract import AttentionKernel


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, **sequences: Any
) -> tuple[Tensor, None]:
    rows, (starts, _, longest, _) = packed(q, k, v, **sequences)
    out = torch.empty_like(rows[0])
    context_attention_fwd(*rows, out, starts[:-1], starts.diff(), longest, causal, softmax_scale=sm_scale)
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2), None


KERNEL = AttentionKernel(
    name="vllm",
    forward=_forward,
    known_failures=PREFILLS,
    capabilities=replace(
        CLAIMS,
        # "q, k, v: [b * s, head, head_dim]", of which one tensor of lengths and one of starts tell.
        unequal_lengths=False,
        ragged=("packed",),
        backward=False,
    ),
)

UNAVAILABLE = only_on_cuda(KERNEL.name)
