"""PyTorch's FlexAttention compiled to C++ for the CPU, where it gives no gradients. It has run there."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.adapters.bridge import CLAIMS
from kernels.adapters.known_failures import FLEX_COMPILED
from kernels.contract import AttentionKernel


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    sizes, offset = (q.shape[2], k.shape[2]), torch.tensor(k.shape[2] - q.shape[2])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + offset

    mask = create_block_mask(visible, None, None, *sizes, device=q.device) if causal else None
    grouped = q.shape[1] != k.shape[1]
    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=1024):
        return _compiled()(q, k, v, block_mask=mask, scale=sm_scale, enable_gqa=grouped), None


KERNEL = AttentionKernel(
    name="torch_flex_compiled",
    forward=_forward,
    known_failures=FLEX_COMPILED,
    capabilities=replace(CLAIMS, head_dims=(64, 128), backward=False),
)

UNAVAILABLE = {(KERNEL.name, "cuda"): "is flex_attention there, which is compiled"}
