"""Stands for Megatron's core attention: sequences before the batch, and a mask that is True where a key is hidden."""

import torch
from torch import Tensor


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scale: float
) -> Tensor:
    """Return out (seqlen, batch, heads * head_dim); a row all of whose keys are hidden is NaN."""
    dtype = q.dtype
    q, k, v = (x.permute(1, 2, 0, 3).float() for x in (q, k, v))
    scores = q @ k.mT * scale
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask, -torch.inf)
    return (torch.softmax(scores, -1) @ v).to(dtype).permute(2, 0, 1, 3).flatten(2)
