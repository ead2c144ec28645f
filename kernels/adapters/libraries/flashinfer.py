"""FlashInfer's ``single_prefill_with_kv_cache``, called for each element of a batch. It has not been run yet."""

from dataclasses import replace

import torch
from flashinfer import single_prefill_with_kv_cache
from torch import Tensor

from kernels.adapters.bridge import CLAIMS, only_on_cuda
from kernels.contract import AttentionKernel


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, window: int = 0, softcap: float = 0.0
) -> tuple[Tensor, None]:
    options = {"sm_scale": sm_scale, "window_left": window - 1, "logits_soft_cap": softcap or None}
    calls = (
        single_prefill_with_kv_cache(*(x.transpose(0, 1) for x in each), causal=causal, **options)
        for each in zip(q, k, v, strict=True)
    )
    return torch.stack(list(calls)).transpose(1, 2), None


KERNEL = AttentionKernel(
    name="flashinfer",
    forward=_forward,
    capabilities=replace(
        CLAIMS,
        # Its tests have these; the corner is that of torch.tril(..., diagonal=(kv_len - qo_len)) in its documentation.
        dtypes=("float16", "bfloat16"),
        head_dims=(64, 128, 256),
        # "The left (inclusive) window size for the attention window"
        window=(0, 2, 33, 100),
        # "logits_soft_cap x tanh(x / logits_soft_cap), where x is the input logits"
        softcap=(0.0, 20.0, 50.0),
        backward=False,
    ),
)

UNAVAILABLE = only_on_cuda(KERNEL.name)
