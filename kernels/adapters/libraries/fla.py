"""flash-linear-attention's ``parallel_attn``, softmax attention in Triton. It has run on a GPU and on a CPU."""

from dataclasses import replace
from typing import Any

from fla.ops.attn import parallel_attn
from torch import Tensor

from kernels.adapters.bridge import CLAIMS
from kernels.contract import AttentionKernel


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, window: int = 0, sinks: Any = None
) -> tuple[Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = parallel_attn(q, k, v, scale=sm_scale, window_size=window or None, sink_bias=sinks)
    return out.transpose(1, 2), None


KERNEL = AttentionKernel(
    name="fla",
    forward=_forward,
    capabilities=replace(
        CLAIMS,
        dtypes=("float16", "bfloat16"),  # its tests have float16 alone
        # "If `None`, full causal attention is used"; q, k and v are `[B, T, ...]`.
        causal=(True,),
        unequal_lengths=False,
        # "each query at position i only attends to keys in `[i - window_size + 1, i]`"
        window=(0, 1, 33, 100),
        # "values of shape `[B, T, H, V]`"
        v_head_dim=(0, 16, 64, 128),
        # "Augments the softmax denominator with `exp(sink_bias[h])` without adding a corresponding key/value entry"
        sinks=True,
    ),
)
