"""Attention over parts of the keys, whose results are merged through their lse: split-KV, cascade, ring."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.panel.flash import online_softmax, recomputed
from tests.panel.heads import Heads, attend, finite_shift, heads_of, not_zero


def of_keys(heads: Heads, keys: slice) -> tuple[Tensor, Tensor]:
    """Return out and lse of FlashAttention-2 over these keys alone."""
    values = {**vars(heads), "k": heads.k[:, :, keys], "v": heads.v[:, :, keys]}
    return online_softmax(Heads(**{**values, "seen": heads.seen[:, keys]}), block=64)


def equal_parts(heads: Heads, parts: int) -> list[slice]:
    """Return ``parts`` slices of equal length that cover the keys; the last may be shorter, or left out if empty."""
    return heads.tiles(max(1, math.ceil(heads.k.shape[2] / parts)))


def merged(outs: list[Tensor], lses: list[Tensor], *, normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sum of the parts' outs with weights exp(lse of the part - lse of all), and the lse of all.

    The weights sum to 1 but for rounding. ``normalised`` divides the sum of outs by the sum of the weights.
    """
    lse = torch.stack(lses).logsumexp(0)
    weights = torch.exp(torch.stack(lses) - lse.masked_fill(lse == -torch.inf, 0.0))
    out = (weights * torch.stack(outs)).sum(0)
    return out / not_zero(weights.sum(0)) if normalised else out, lse


def split(
    heads: Heads, *, parts: int, stored_in_dtype: bool = False, normalised: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend parts of equal length; out of each is kept in float32 or stored in the inputs' dtype, then merged."""
    results = [of_keys(heads, keys) for keys in equal_parts(heads, parts)]
    if not results:
        return of_keys(heads, slice(0, 0))
    outs = [heads.rounded(out) if stored_in_dtype else out for out, _ in results]
    return merged(outs, [lse for _, lse in results], normalised=normalised)


def split_4(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Flash-Decoding in CUDA: 4 splits in float32, summed with weights exp(lse of the split - lse), not divided again.

    Claims: none
    """
    forward = partial(split, parts=4)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def split_8(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashInfer's merge of states: the weighted sum of 8 splits in float32 is divided by the sum of the weights.

    Claims: none
    """
    forward = partial(split, parts=8, normalised=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def split_4_in_16_bits(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Split-KV of paged attention kernels that store each split's out in the inputs' dtype.

    Claims: rounded_partials=true
    """
    forward = partial(split, parts=4, stored_in_dtype=True, normalised=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def cascade(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Cascade attention of vLLM: a prefix of whole pages and the rest, both stored in the inputs' dtype, then merged.

    Claims: rounded_partials=true
    """

    def forward(heads: Heads) -> tuple[Tensor, Tensor]:
        at = heads.k.shape[2] // 2 // 16 * 16
        results = [of_keys(heads, keys) for keys in (slice(0, at), slice(at, None))]
        outs, lses = [heads.rounded(out) for out, _ in results], [lse for _, lse in results]
        return merged(outs, lses, normalised=True)

    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function from out and lse of the keys so far, and out and lse of a part, to out and lse of all of these keys."""


def summed(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse after a part: out is the mean of the two, each weighted by the exponential of its lse."""
    both = torch.logaddexp(lse, part_lse)
    share = torch.exp(part_lse - both.masked_fill(both == -torch.inf, 0.0))
    rest = torch.exp(lse - both.masked_fill(both == -torch.inf, 0.0))
    return rest * out + share * part, both


def moved(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse after a part: out moves by the share of the part in the distance between the two.

    A row that has seen no key yet takes those of the part, and one that sees no key of the part keeps its own.
    """
    first, last = lse == -torch.inf, part_lse == -torch.inf
    apart = (part_lse - lse).masked_fill(first | last, 0.0)
    new = out - torch.sigmoid(apart) * (out - part)
    new_lse = lse - torch.nn.functional.logsigmoid(-apart)
    out, lse = torch.where(last, out, new), torch.where(last, lse, new_lse)
    return torch.where(first, part, out), torch.where(first, part_lse, lse)


def ring_forward(heads: Heads, merge: Merge, *, stored_in_dtype: bool) -> tuple[Tensor, Tensor]:
    """Attend on four devices, each of which has a part of the keys, and merge one part after the other."""
    out, lse = torch.zeros_like(heads.q), torch.full_like(heads.q[..., :1], -torch.inf)
    for keys in equal_parts(heads, 4):
        part, part_lse = of_keys(heads, keys)
        out, lse = merge(out, lse, heads.rounded(part) if stored_in_dtype else part, part_lse)
    return out, lse


def ring(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Ring attention (Liu et al. 2023) over four devices, with out and lse accumulated in float32.

    Claims: none
    """
    forward = partial(ring_forward, merge=summed, stored_in_dtype=False)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def ring_of_stored_parts(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Ring attention in which each step's out comes from a FlashAttention call, which stores it in the inputs' dtype.

    Claims: rounded_partials=true
    """
    forward = partial(ring_forward, merge=summed, stored_in_dtype=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def ring_by_difference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """PyTorch's context parallel attention: each step moves out by sigmoid(lse of the part - lse) to the part.

    Claims: merged_by_difference=true
    """
    forward = partial(ring_forward, merge=moved, stored_in_dtype=False)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def ring_of_stored_parts_by_difference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """ring-flash-attention: the same, where each part comes from a FlashAttention call that stores it in 16 bits.

    Claims: rounded_partials=true, merged_by_difference=true
    """
    forward = partial(ring_forward, merge=moved, stored_in_dtype=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)


def differentiated_ring(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """The same merges over eight parts, each a softmax in float32, with gradients by autograd through all of them.

    Claims: merged_by_difference=true
    """
    heads = heads_of(q, k, v, causal, sm_scale)
    out, lse = torch.zeros_like(heads.q), torch.full_like(heads.q[..., :1], -torch.inf)
    for keys in equal_parts(heads, 8):
        s = heads.scores(keys)
        top = finite_shift(s.detach().amax(-1, keepdim=True))
        p = torch.exp(s - top)
        l = p.sum(-1, keepdim=True)
        part_lse = (top + not_zero(l).log()).masked_fill(l == 0.0, -torch.inf)
        out, lse = moved(out, lse, p @ heads.v[:, :, keys] / not_zero(l), part_lse)
    return out.to(q.dtype), lse[..., 0]
