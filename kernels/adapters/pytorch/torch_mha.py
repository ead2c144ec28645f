"""``torch.nn.MultiheadAttention``'s fast path. It has run on a CPU.

The fast path is for self-attention, of one tensor. That is q, k and v side by side here, as heads of which projections
with weights 0 and 1 pick the queries, keys and values; the scale is a weight too. The heads left over have values 0.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import MultiheadAttention

from kernels.adapters.bridge import COPIED
from kernels.adapters.known_failures import TORCH_MHA
from kernels.contract import AttentionKernel
from kernels.contract.parsing import parse_claims


@torch.no_grad()
def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    (_, heads, n, d), width = q.shape, q.shape[1] * q.shape[3]
    layer = MultiheadAttention(3 * width, 3 * heads, batch_first=True, dtype=q.dtype, device=q.device).eval()
    one = torch.eye(width, dtype=q.dtype, device=q.device)
    layer.in_proj_weight.zero_()
    for place, factor in enumerate((sm_scale * math.sqrt(d), 1.0, 1.0)):
        layer.in_proj_weight[3 * place * width :][:width, place * width :][:, :width] = factor * one
    layer.out_proj.weight.copy_(torch.eye(3 * width))
    x = torch.cat([y.transpose(1, 2).flatten(2) for y in (q, k, v)], -1)
    mask = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1) if causal else None
    out, _ = layer(x, x, x, attn_mask=mask, is_causal=causal, need_weights=False)
    return out[..., :width].unflatten(-1, (heads, d)).transpose(1, 2).clone(), None


# The fast path is for "self attention". The weight of a scale is rounded, and q is multiplied by it. The projections
# multiply NaN and infinity of other heads by 0.
_CLAIMS = replace(COPIED, unequal_lengths=False, grouped_heads=False, backward=False, head_dims=(16, 32, 64))
_CLAIMS = parse_claims(["operand_rounding=2^-22", "nonfinite=none"], replace(_CLAIMS, dtypes=("float32",)))
KERNEL = AttentionKernel(name="torch_mha", forward=_forward, capabilities=_CLAIMS, known_failures=TORCH_MHA)
