"""What a kernel reads if it uses the strides of one tensor for another."""

import torch
from torch import Tensor


def read_by_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the entries of ``x`` that other strides lead to; NaN throughout if these lead out of its storage."""
    last = x.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)
    )
    if last >= x.untyped_storage().nbytes() // x.element_size():
        return torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
    return x.as_strided(x.shape, strides)
