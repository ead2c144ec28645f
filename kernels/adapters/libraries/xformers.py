"""xFormers' ``memory_efficient_attention``, by the operator that it chooses itself. It has not been run yet."""

from dataclasses import replace

from torch import Tensor
from xformers.ops import LowerTriangularMask, memory_efficient_attention

from kernels.adapters.bridge import CLAIMS, only_on_cuda
from kernels.contract import AttentionKernel


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = LowerTriangularMask() if causal else None
    return memory_efficient_attention(q, k, v, mask, scale=sm_scale).transpose(1, 2), None


KERNEL = AttentionKernel(
    name="xformers",
    forward=_forward,
    capabilities=replace(
        CLAIMS,
        # The operators of xformers refuse a head_dim in 16 bits if "query.shape[-1] % 8 != 0".
        head_dims=(16, 32, 64, 96, 128, 256),
        # "value: Tensor of shape [B, Mkv, H, Kv]"
        v_head_dim=(0, 32, 64, 128),
        # LowerTriangularMask: "A query Q cannot attend to a key which is farther from the initial key than Q is from
        # the initial query."
        causal_alignment="top_left",
        # "MQA/GQA is an experimental feature supported only for the forward pass".
        grouped_heads=False,
    ),
)

UNAVAILABLE = only_on_cuda(KERNEL.name)
