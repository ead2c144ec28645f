"""ONNX Runtime's ``Attention`` of opset 24 with a cache outside of it, on the CPU provider. It has run on a CPU.

``nonpad_kv_seqlen`` has the lengths of the sequences; without a cache, they are those of k.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.adapters.bridge import COPIED, only_on_cpu
from kernels.adapters.pytorch.masks import blank
from kernels.adapters.runtimes.onnx_operator import attention
from kernels.contract import AttentionKernel
from kernels.contract.parsing import parse_claims


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, cache_seqlens: Any = None
) -> tuple[Tensor, None]:
    lengths = torch.full((len(q),), k.shape[2]) if cache_seqlens is None else cache_seqlens.long()
    # It says nothing of what padding may hold, and a weight of 0 times NaN is NaN.
    is_key = torch.arange(k.shape[2]) < lengths[:, None]
    cached = (blank(x, is_key) for x in (k, v))
    return attention(q, *cached, None, None, None, lengths, is_causal=int(causal), scale=sm_scale)


# "offset = nonpad_kv_seqlen - q_sequence_length (per batch)"; a fully-masked row "produces a zero output row".
_CLAIMS = (
    "rounded_scores=true",
    "sm_scale=positive",
    "dtypes=float16,float32",
    "ragged=cache",
    "backward=false",
)
_ALL = parse_claims(_CLAIMS, COPIED)
KERNEL = AttentionKernel(name="onnxruntime_cache", forward=_forward, capabilities=_ALL)

UNAVAILABLE = only_on_cpu(KERNEL.name)
