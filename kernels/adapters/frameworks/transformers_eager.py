"""transformers' ``eager_attention_forward`` of Llama, which most of its models share. It has run on a CPU and a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import eager_attention_forward

from kernels.adapters.bridge import CLAIMS
from kernels.contract import AttentionKernel
from kernels.contract.parsing import parse_claims


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    layer = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    mask = None
    if causal:  # transformers.masking_utils.eager_mask: 0 where a key is seen, the smallest number elsewhere
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        hidden = hidden.triu(1 + k.shape[2] - q.shape[2])
        mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)[
            None, None
        ]
    out, _ = eager_attention_forward(layer, q, k, v, mask, scaling=sm_scale)
    return out.transpose(1, 2), None


KERNEL = AttentionKernel(
    name="transformers_eager",
    forward=_forward,
    # "torch.matmul(query, key_states.transpose(2, 3)) * scaling" is rounded to the inputs' dtype. No query is ahead of
    # all keys in its models.
    capabilities=replace(parse_claims(["rounded_scores=true"], CLAIMS), causal_unequal_lengths=False),
)
