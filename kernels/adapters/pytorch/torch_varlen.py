"""``torch.nn.attention.varlen.varlen_attn``, FlashAttention on packed sequences. It has run on a GPU."""

from dataclasses import replace
from inspect import signature
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from kernels.adapters.bridge import CLAIMS, only_on_cuda, packed
from kernels.adapters.known_failures import TORCH_VARLEN
from kernels.contract import AttentionKernel

_GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, window: int = 0, **sequences: Any
) -> tuple[Tensor, None]:
    given, sides = packed(q, k, v, **sequences), (window - 1, 0 if causal else -1)  # -1 stands for no limit
    out: Any = varlen_attn(*given[0], *given[1], scale=sm_scale, window_size=sides, **_GROUPED)
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2), None


KERNEL = AttentionKernel(
    name="torch_varlen",
    forward=_forward,
    known_failures=TORCH_VARLEN,
    capabilities=replace(
        CLAIMS,
        dtypes=("float16", "bfloat16"),  # of FlashAttention, as the head dims are
        head_dims=(16, 32, 64, 96, 128, 192, 256),
        window=(0, 2, 33, 100),  # "(W, 0) for causal attention with sliding window of size W"
        grouped_heads=bool(_GROUPED),
        ragged=("packed",),
        rows_behind="any",  # as FlashAttention-2 has it: they are left as they were
    ),
)

UNAVAILABLE = only_on_cuda(KERNEL.name)
