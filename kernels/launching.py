"""What the launchers of Triton attention kernels share: strides, alignment, launch settings."""

import math
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


_COMPILED: dict[Any, Any] = {}
"""What Triton compiled, by the kernel and all that it depends on."""


def launch(fn: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run ``programs`` programs of a kernel that ``tiles.kernel`` made; do nothing if that is 0.

    They run on the device of the first argument, a tensor or the descriptor of one. Triton looks at every argument to
    find what it compiled for such values, which takes longer than the launch itself. These kernels depend on less, so
    what was compiled for a GPU is looked up here.
    """
    if programs == 0:
        return
    tensor = getattr(arguments[0], "base", arguments[0])
    # If scores * scale - m were fused, the product would not be rounded as it was for the maximum m. The difference
    # could then be positive, and with huge scores so large that exp2 overflows.
    options = {**constants, "enable_fp_fusion": False}
    with torch.cuda.device_of(tensor):
        if not tensor.is_cuda:
            fn[(programs,)](*arguments, **options)
            return
        key = (fn, tensor.device, *map(_compiled_for, arguments), *options.items())
        if compiled := _COMPILED.get(key):
            rest = (constants[name] for name in fn.arg_names[len(arguments) :])
            compiled[(programs, 1, 1)](*arguments, *rest)
        else:
            _COMPILED[key] = fn[(programs,)](*arguments, **options)


def _compiled_for(argument: Any) -> Any:
    """Return what a kernel that ``tiles.kernel`` made is compiled for: the type of an argument, and nothing else."""
    if isinstance(argument, Tensor):
        return argument.dtype
    if type(argument) is int:
        return -(2**31) <= argument < 2**31
    if (block := getattr(argument, "block_shape", None)) is not None:
        return argument.base.dtype, tuple(block), getattr(argument, "layout", None)
    return type(argument)


def dropout_arguments(dropout_p: float, dropout_seed: int) -> tuple[int, int, float]:
    """Return the seed, threshold and keep_scale that ``tiles.dropout_factors`` takes."""
    return dropout_seed, round(dropout_p * 2**32), 1.0 / (1.0 - dropout_p)


def row_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and row of each tensor, in elements."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def is_aligned(*tensors: Tensor) -> bool:
    """Whether every row of every tensor starts at a multiple of 16 bytes and is as many bytes wide."""
    for tensor in tensors:
        batch, head, row, _ = tensor.stride()
        if tensor.data_ptr() % 16 or math.gcd(batch, head, row, tensor.shape[3]) * tensor.element_size() % 16:
            return False
    return True


@cache
def padded_head_dim(head_dim: int) -> int:
    """Return the columns of a tile that holds rows of head_dim elements: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU."""
    # The capability is asked for meta tensors too, which stand for a GPU in tests that only compile. AMD's gfx942
    # would answer 9.4, so a GPU of AMD is ruled out first.
    if device.type == "cpu" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9
