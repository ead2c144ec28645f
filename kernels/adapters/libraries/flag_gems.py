"""FlagGems' ``scaled_dot_product_attention``, in Triton, for PyTorch's. It has run on a GPU."""

from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from kernels.adapters.bridge import CLAIMS, only_on_cuda
from kernels.adapters.known_failures import FLAG_GEMS
from kernels.contract import AttentionKernel


@cache
def _attention() -> Any:
    """Return the function, with one of its own launch settings: it would tune for a minute at each length."""
    from flag_gems.ops import attention  # which raises where it finds no GPU

    attention._attn_fwd.fn.configs = attention.SMALL_HEAD_DIM_CONFIGS[:1]  # for each head_dim
    return attention.scaled_dot_product_attention


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    options = {"is_causal": causal, "scale": sm_scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return _attention()(q, k, v, **options), None


# "assert HEAD_DIM_K in {16, 32, 64, 128, 256}", of 16 bits in its tests; causal as PyTorch has it.
_CLAIMS = replace(CLAIMS, dtypes=("float16", "bfloat16"), head_dims=(16, 32, 64, 128, 256))
# Of its backward: "fails accuracy tests", https://github.com/flagos-ai/FlagGems/issues/2848
_CLAIMS = replace(_CLAIMS, causal_alignment="top_left", backward=False)
KERNEL = AttentionKernel(name="flag_gems", forward=_forward, capabilities=_CLAIMS, known_failures=FLAG_GEMS)

UNAVAILABLE = only_on_cuda(KERNEL.name)
