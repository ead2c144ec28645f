"""transformers' ``flex_attention_forward``, which the models call that have ``attn_implementation="flex_attention"``.

It compiles PyTorch's FlexAttention. It has run on a GPU. Its lse is rounded to the dtype of v.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import causal_mask_function

from kernels.adapters.bridge import CLAIMS, only_on_cuda
from kernels.adapters.pytorch import known_failures
from kernels.contract import AttentionKernel


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, softcap: float = 0.0
) -> tuple[Tensor, None]:
    sizes = (q.shape[2], k.shape[2])
    mask = create_block_mask(causal_mask_function, None, None, *sizes, device=q.device) if causal else None
    layer = SimpleNamespace(training=q.requires_grad)
    attention = partial(flex_attention_forward, layer, scaling=sm_scale, softcap=softcap or None)
    return attention(q, k, v, mask)[0].transpose(1, 2), None


KERNEL = AttentionKernel(
    name="transformers_flex",
    forward=_forward,
    # Its mask for "causal" is `kv_idx <= q_idx`, which models shift by the length of their cache.
    capabilities=replace(CLAIMS, head_dims=(64, 128), causal_alignment="top_left", softcap=(0.0, 20.0, 50.0)),
    known_failures=known_failures.FLEX_ATTENTION,
)

UNAVAILABLE = only_on_cuda(KERNEL.name)
