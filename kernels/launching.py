"""What the launchers of Triton attention kernels share: strides, alignment, launch settings."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor


def check_settings(settings: Mapping[str, Any], declared: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a launch setting that is not one of its declared values, or is of another type."""
    for name, values in declared.items():
        if not any(type(settings[name]) is type(value) and settings[name] == value for value in values):
            raise ValueError(f"{name}: got {settings[name]!r}, expected one of {values}")


def launch(fn: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run ``programs`` programs of a kernel; do nothing if that is 0.

    They run on the device of the first argument, a tensor or the descriptor of one.
    """
    if programs == 0:
        return
    # If scores * scale - m were fused, the product would not be rounded as it was for the maximum m. The difference
    # could then be positive, and with huge scores so large that exp2 overflows.
    with torch.cuda.device_of(getattr(arguments[0], "base", arguments[0])):
        fn[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def dropout_arguments(dropout_p: float, dropout_seed: int) -> tuple[int, int, float]:
    """Return the seed, threshold and keep_scale that ``tiles.dropout_factors`` takes."""
    return dropout_seed, round(dropout_p * 2**32), 1.0 / (1.0 - dropout_p)


def row_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and row of each tensor, in elements."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def is_aligned(*tensors: Tensor) -> bool:
    """Whether every row of every tensor starts at a multiple of 16 bytes and is as many bytes wide."""
    return all(
        tensor.data_ptr() % 16 == 0
        and all(width * tensor.element_size() % 16 == 0 for width in (*tensor.stride()[:3], tensor.shape[3]))
        for tensor in tensors
    )


@cache
def padded_head_dim(head_dim: int) -> int:
    """Return the columns of a tile that holds rows of head_dim elements: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))
