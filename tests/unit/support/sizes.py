"""Plain functions that are wrong only for sizes or options that models have, and one that is right.

Each wrong one follows a public mistake: a table of four sequences, parts of 1,024 keys, a fast path for what benchmarks
run, a group that is taken for a power of two, positions of 10 bits.
"""

import torch
from torch import Tensor

FEW = 1024
TILE = 128


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sm_scale: float) -> Tensor:
    """Return attention to the keys that are seen, in float32."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.float() @ k.float().mT * sm_scale).masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1).nan_to_num() @ v.float()).to(q.dtype)


def mask(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return seen.tril(k.shape[2] - q.shape[2]) if causal else seen


def sound(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    return attend(q, k, v, mask(q, k, causal), sm_scale)


def batch_of_four(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    place = torch.arange(len(q)) % 4
    return sound(q, k[place], v[place], causal=causal, sm_scale=sm_scale)


def parts_of_keys(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    seen = mask(q, k, causal)
    seen[:, FEW:] = False
    return attend(q, k, v, seen, sm_scale)


def positions_of_10_bits(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    rows = torch.arange(q.shape[2])[:, None] % FEW
    seen = torch.arange(k.shape[2])[None] <= rows + k.shape[2] - q.shape[2]
    return attend(q, k, v, seen if causal else mask(q, k, causal), sm_scale)


def group_by_shift(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    head = (torch.arange(q.shape[1]) >> (group - 1).bit_length()).clamp(max=k.shape[1] - 1)
    return attend(q, k[:, head], v[:, head], mask(q, k, causal), sm_scale)


def fast_path(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    seen = mask(q, k, causal)
    is_whole = q.shape == k.shape and q.shape[2] % TILE == 0 and q.is_contiguous()
    if causal and is_whole and q.shape[3] == 128 and q.dtype != torch.float32:
        seen &= ~torch.eye(len(seen), dtype=torch.bool) | (torch.arange(len(seen)) < len(seen) - 1)
    return attend(q, k, v, seen, sm_scale)
