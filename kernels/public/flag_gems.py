"""FlagGems' ``scaled_dot_product_attention``, in Triton, for PyTorch's. It has run on a GPU."""

from dataclasses import replace

from torch import Tensor

from kernels.contract import AttentionKernel
from kernels.public.bridge import CLAIMS, only_on_cuda


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    import flag_gems  # which raises where it finds no GPU

    is_grouped = q.shape[1] != k.shape[1]
    out = flag_gems.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=sm_scale, enable_gqa=is_grouped
    )
    return out, None


KERNEL = AttentionKernel(
    name="flag_gems",
    forward=_forward,
    capabilities=replace(
        CLAIMS,
        # "assert HEAD_DIM_K in {16, 32, 64, 128, 256}", of 16 bits in its tests; causal as PyTorch has it.
        dtypes=("float16", "bfloat16"),
        head_dims=(16, 32, 64, 128, 256),
        causal_alignment="top_left",
    ),
)

UNAVAILABLE = only_on_cuda(KERNEL.name)
