"""``keras.ops.dot_product_attention`` on the backend torch, with gradients by autograd. It has run on a CPU."""

import os
from dataclasses import replace

from torch import Tensor

from kernels.adapters import known_failures
from kernels.adapters.bridge import SDPA
from kernels.contract import AttentionKernel

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when Keras is imported

import keras


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = keras.ops.dot_product_attention(q, k, v, scale=sm_scale, is_causal=causal)
    return out.transpose(1, 2), None


KERNEL = AttentionKernel(
    name="keras",
    forward=_forward,
    known_failures=known_failures.FLASH_ON_CPU,
    # "Whether to apply causal mask", which its code makes of torch.tril of ones (q_len, kv_len).
    capabilities=replace(SDPA, causal_alignment="top_left"),
)
