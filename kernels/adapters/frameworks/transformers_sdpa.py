"""transformers' ``sdpa_attention_forward``, which the models call that have ``attn_implementation="sdpa"``.

It has run on a CPU and a GPU.
"""

from dataclasses import replace
from types import SimpleNamespace

from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kernels.adapters import known_failures
from kernels.adapters.bridge import SDPA
from kernels.contract import AttentionKernel


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    layer = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1])
    out, _ = sdpa_attention_forward(layer, q, k, v, None, scaling=sm_scale, is_causal=causal)
    return out.transpose(1, 2), None


KERNEL = AttentionKernel(
    name="transformers_sdpa",
    forward=_forward,
    known_failures=known_failures.TRANSFORMERS_SDPA,
    # Causal is the flag for a prefill; one that continues a cache comes with a mask. "Not in decoding phase (otherwise
    # we want full attention on the single query token)".
    capabilities=replace(SDPA, causal_unequal_lengths=False),
)
