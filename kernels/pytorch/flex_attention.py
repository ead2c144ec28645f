"""PyTorch's ``flex_attention``: compiled to Triton on CUDA; eager on the CPU, where it has no backward.

Causal masks and the patterns of ``reference.mask_pattern`` are block masks, aligned bottom-right; lse comes from
``return_aux`` and is a natural logarithm.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from kernels.contract import AttentionKernel, Capabilities, Launch, flash_arithmetic
from kernels.pytorch import known_failures
from reference.arithmetic import Arithmetic
from reference.mask_pattern import MaskPattern

_COMPILATIONS = 1024
"""The limit of compilations that Dynamo is given. Even with dynamic shapes a new dtype, head count or head_dim
compiles again, and past its own limit of 8 Dynamo raises an error or runs flex_attention uncompiled.
"""


@cache
def _attention(device_type: str) -> Callable[..., Any]:
    if device_type == "cpu":  # compiling needs a C++ compiler there; PyTorch itself warns that this is eager
        return flex_attention
    return torch.compile(flex_attention, dynamic=True)


def _causal_mask(seqlen_q: int, seqlen_k: int, device: torch.device) -> BlockMask:
    # The offset is a tensor, because a captured integer would be a constant: another one would compile anew.
    offset = torch.tensor(seqlen_k - seqlen_q, device=device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + offset

    return create_block_mask(visible, None, None, seqlen_q, seqlen_k, device=device)


def _pattern_mask(
    seqlen_q: int, seqlen_k: int, device: torch.device, causal: bool, pattern: MaskPattern
) -> BlockMask:
    """Return the mask of any pattern, as one function that is compiled once: what is not asked for has no effect."""
    everything = seqlen_q + seqlen_k
    sizes = (
        seqlen_k - seqlen_q,
        1 if causal else everything,
        pattern.window or everything,
        pattern.window_right or everything,
        pattern.chunk or 1,
        not pattern.chunk,
        pattern.first_keys,
        pattern.prefix,
    )
    offset, after, window, right, chunk, is_whole, first_keys, prefix = (
        torch.tensor(size, device=device) for size in sizes
    )

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        here = query + offset
        in_chunk = is_whole | (torch.floor_divide(here, chunk) == torch.floor_divide(key, chunk))
        near = (here - key < window) & (key - here < right) & in_chunk
        return ((near | (key < first_keys)) & (key - here < after)) | (key < prefix)

    return create_block_mask(visible, None, None, seqlen_q, seqlen_k, device=device)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, **pattern: int
) -> tuple[Tensor, Tensor]:
    size = q.shape[2], k.shape[2], q.device
    mask = _causal_mask(*size) if causal else None
    if pattern:
        mask = _pattern_mask(*size, causal, MaskPattern(**pattern))
    with torch._dynamo.config.patch(recompile_limit=_COMPILATIONS, accumulated_recompile_limit=_COMPILATIONS):
        out, aux = _attention(q.device.type)(
            q,
            k,
            v,
            block_mask=mask,
            scale=sm_scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    return out, aux.lse


def _arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    """FlashAttention-2's arithmetic; PyTorch's casts round to nearest on the CPU as well.

    Few queries against many keys are split over the keys ("flex decoding").
    """
    return replace(flash_arithmetic(dtype, "cuda", launch), partial_results=True)


KERNEL = AttentionKernel(
    name="flex_attention",
    forward=_forward,
    known_failures=known_failures.FLEX_ATTENTION,
    capabilities=Capabilities(
        # On CUDA: "embedding dimension of the query, key, and value must be at least 16". All larger ones are
        # taken, but each is a compilation of its own, so only a few are claimed.
        head_dims=(64, 128),
        # "value (Tensor): Value tensor; shape (B, Hkv, S, Ev)", beside a query and a key of (..., E).
        v_head_dim=(0, 64, 128),
        # Not documented: max() over no key raises before any kernel runs.
        min_seqlen=1,
        window=(0, 1, 33, 100),
        window_right=(0, 9, 40),
        chunk=(0, 16, 48, 128),
        first_keys=(0, 1, 4),
        prefix=(0, 5, 70),
        # Claimed nowhere.
        deterministic=(),
        validates=False,
        arithmetic=_arithmetic,
    ),
)

UNAVAILABLE: Mapping[tuple[str, str], str] = {
    (
        KERNEL.name,
        "cpu",
    ): "FlexAttention does not support backward on CPU (forward alone: --claims backward=false)",
}
