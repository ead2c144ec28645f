"""What a kernel reads that takes one tensor's strides for another's."""

import torch
from torch import Tensor


def read_by_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The entries of ``x`` found by other strides; NaN throughout where these lead out of its storage."""
    last = x.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)
    )
    if last >= x.untyped_storage().nbytes() // x.element_size():
        return torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
    return x.as_strided(x.shape, strides)
