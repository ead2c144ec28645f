"""SageAttention 1's ``sageattn``, in Triton, which quantises q and k to 8-bit integers. It has run on a GPU."""

from dataclasses import replace

from sageattention import sageattn
from torch import Tensor

from kernels.adapters.bridge import CLAIMS, only_on_cuda
from kernels.adapters.known_failures import SAGEATTENTION
from kernels.contract import AttentionKernel


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    return sageattn(q, k, v, is_causal=causal, sm_scale=sm_scale), None


KERNEL = AttentionKernel(
    name="sageattention",
    forward=_forward,
    known_failures=SAGEATTENTION,
    capabilities=replace(
        CLAIMS,
        # "headdim should be in [64, 96, 128]"
        head_dims=(64, 96, 128),
        # Causal is "only applicable when qo_len == kv_len".
        causal_unequal_lengths=False,
        backward=False,
    ),
)

UNAVAILABLE = only_on_cuda(KERNEL.name)
