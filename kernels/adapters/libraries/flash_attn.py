"""The package flash-attn, FlashAttention-2's ``flash_attn_varlen_func``. It has not been run yet."""

from dataclasses import replace
from typing import Any

from flash_attn import flash_attn_varlen_func
from torch import Tensor

from kernels.adapters.bridge import CLAIMS, only_on_cuda, packed
from kernels.contract import AttentionKernel

_NAMES = {
    "causal": "causal",
    "sm_scale": "softmax_scale",
    "softcap": "softcap",
    "alibi_slopes": "alibi_slopes",
}


def _forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    sides = tuple(options.pop(x, 0) - 1 for x in ("window", "window_right"))  # -1: "infinite context window"
    scores = {name: options.pop(x) for x, name in _NAMES.items() if x in options}
    rows, lengths = packed(q, k, v, **options)
    out = flash_attn_varlen_func(*rows, *lengths, window_size=sides, **scores)
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2), None


_WINDOWS = (0, 2, 33, 100)
# "fp16 and bf16", "All head dimensions up to 256"; "Anything > 0 activates softcapping attention"; a window is
# "[i + seqlen_k - seqlen_q - window_size[0], i + seqlen_k - seqlen_q + window_size[1]] inclusive".
_CLAIMS = replace(
    CLAIMS, dtypes=("float16", "bfloat16"), head_dims=tuple(range(8, 257, 8)), softcap=(0.0, 20.0)
)
_CLAIMS = replace(
    _CLAIMS, window=_WINDOWS, window_right=_WINDOWS, alibi_slopes=True, ragged=("packed",), rows_behind="any"
)
KERNEL = AttentionKernel(name="flash_attn", forward=_forward, capabilities=_CLAIMS)
UNAVAILABLE = only_on_cuda(KERNEL.name)
