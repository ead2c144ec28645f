"""What PyTorch's kernels are told of masks: which keys a row sees by its place, and keys that are padding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference.mask_pattern import MaskPattern

PATTERNS: dict[str, Any] = {
    "window": (0, 1, 33, 100),
    "window_right": (0, 9, 40),
    "chunk": (0, 16, 48, 128),
    "first_keys": (0, 1, 4),
    "prefix": (0, 5, 70),
}
"""Claims of the sizes of a mask's pattern, for a kernel that takes any mask."""


def sees(
    causal: bool, pattern: MaskPattern, longest: int, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of a row's diagonal and a key's place that says whether the row sees the key.

    ``longest`` is at least any distance of the two. The sizes are tensors and what is not asked for has no effect, so
    that the function is compiled once: a captured integer would be a constant, and another one would compile anew.
    """
    sizes = (
        1 if causal else longest,
        pattern.window or longest,
        pattern.window_right or longest,
        pattern.chunk or 1,
        not pattern.chunk,
        pattern.first_keys,
        pattern.prefix,
    )
    after, window, right, chunk, is_whole, first_keys, prefix = (
        torch.tensor(size, device=device) for size in sizes
    )

    def is_seen(diagonal: Tensor, key: Tensor) -> Tensor:
        in_chunk = is_whole | (torch.floor_divide(diagonal, chunk) == torch.floor_divide(key, chunk))
        near = (diagonal - key < window) & (key - diagonal < right) & in_chunk
        return ((near | (key < first_keys)) & (key - diagonal < after)) | (key < prefix)

    return is_seen


def blank(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return keys or values (batch, heads_kv, seqlen_k, head_dim) with 0 where they are padding.

    PyTorch says nothing of what masked keys may hold, and a weight of 0 times NaN is NaN.
    """
    return x if key_padding_mask is None else x.masked_fill(~key_padding_mask[:, None, :, None], 0.0)
