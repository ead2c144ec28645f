"""``torch.nn.attention.varlen.varlen_attn``, FlashAttention on packed sequences. It has not been run yet."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from kernels.contract import AttentionKernel
from kernels.public.bridge import CLAIMS, only_on_cuda, packed


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, window: int = 0, **sequences: Any
) -> tuple[Tensor, None]:
    rows, lengths = packed(q, k, v, **sequences)
    attention: Any = varlen_attn
    sides = (window - 1 if window else -1, 0 if causal else -1)
    out = attention(*rows, *lengths, scale=sm_scale, window_size=sides, enable_gqa=q.shape[1] != k.shape[1])
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2), None


KERNEL = AttentionKernel(
    name="torch_varlen",
    forward=_forward,
    capabilities=replace(
        CLAIMS,
        # Those of FlashAttention.
        dtypes=("float16", "bfloat16"),
        head_dims=(16, 32, 64, 96, 128, 192, 256),
        # "(-1, 0) for causal attention, or (W, 0) for causal attention with sliding window of size W"
        window=(0, 2, 33, 100),
        ragged=("packed",),
    ),
)

UNAVAILABLE = only_on_cuda(KERNEL.name)
