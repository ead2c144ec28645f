"""What the launchers of Triton attention kernels share: strides, alignment, launch settings."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

Result = TypeVar("Result")


def check_settings(settings: Mapping[str, Any], declared: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a launch setting that is not one of its declared values, or is of another type."""
    for name, values in declared.items():
        if not any(type(settings[name]) is type(value) and settings[name] == value for value in values):
            raise ValueError(f"{name}: got {settings[name]!r}, expected one of {values}")


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """Make a function return what it has returned for arguments that don't differ for it, which saves microseconds.

    It may look at the dtype, device, shape and strides of a tensor, and at its start modulo 16 bytes, but not at the
    numbers in it. For other arguments than dense tensors, numbers, strings, dtypes and None it has to raise an
    exception. Nothing is remembered of meta tensors, which stand for tensors on one GPU after another where kernels are
    only compiled.
    """
    results: dict[Any, Result] = {}

    @wraps(function)
    def remembering(*arguments: Any, **settings: Any) -> Result:
        key = (
            *settings,
            *[
                (x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16)
                if isinstance(x, Tensor) and x.layout == torch.strided
                else (type(x), x if isinstance(x, float | int | str | torch.dtype) else None)
                for x in (*arguments, *settings.values())
            ],
        )
        try:
            return results[key]
        except KeyError:
            result = function(*arguments, **settings)
        if not any(isinstance(x, Tensor) and x.is_meta for x in arguments):
            if len(results) >= MOST_REMEMBERED:
                results.clear()
            results[key] = result
        return result

    return remembering


MOST_REMEMBERED = 512
"""How many results a function remembers before it forgets all of them."""


_COMPILED: dict[Any, tuple[Any, list[Any]]] = {}
"""What Triton compiled, and the constants in the order of the kernel, by the kernel and all that it depends on."""


def launch(fn: Any, programs: int, *arguments: Any, **constants: Any) -> Any:
    """Run ``programs`` programs of a kernel that ``tiles.kernel`` made; do nothing if that is 0.

    They run on the device of the first argument, a tensor or the descriptor of one. Triton looks at every argument to
    find what it compiled for such values, which takes longer than the launch itself. These kernels depend on less, so
    what was compiled for a GPU is looked up here. It is returned.
    """
    if programs == 0:
        return None
    tensor = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0].base
    if not tensor.is_cuda:
        return _launch_by_triton(fn, programs, arguments, constants)
    device = tensor.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(fn, programs, *arguments, **constants)
    key = (fn.fn, device, *map(_compiled_for, arguments), *constants, *constants.values())
    if found := _COMPILED.get(key):
        compiled, ordered = found
        _launch_compiled(device, programs, compiled, ordered, arguments)
    else:
        compiled = _launch_by_triton(fn, programs, arguments, constants)
        _COMPILED[key] = compiled, [constants[name] for name in fn.arg_names[len(arguments) :]]
    return compiled


def _launch_by_triton(fn: Any, programs: int, arguments: Sequence[Any], constants: Mapping[str, Any]) -> Any:
    """Launch a kernel, or run it in Triton's interpreter, and return what was compiled."""
    # If scores * scale - m were fused, the product would not be rounded as it was for the maximum m. The difference
    # could then be positive, and with huge scores so large that exp2 overflows.
    options = {**constants, "enable_fp_fusion": False}
    return fn[(programs,)](*arguments, **options)


def _launch_compiled(
    device: int, programs: int, compiled: Any, constants: Sequence[Any], arguments: Sequence[Any]
) -> None:
    """Launch what Triton compiled, as ``compiled[programs, 1, 1]`` does, but call hooks only if there are any."""
    if has_hooks():
        compiled[programs, 1, 1](*arguments, *constants)
        return
    stream = triton.runtime.driver.active.get_current_stream(device)
    handles = (compiled.function, compiled.packed_metadata)
    compiled.run(programs, 1, 1, stream, *handles, None, None, None, *arguments, *constants)


def has_hooks() -> bool:
    """Whether someone, such as a profiler, has Triton tell of each launch."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


def _compiled_for(argument: Any) -> Any:
    """Return what a kernel that ``tiles.kernel`` made is compiled for: the type of an argument, and nothing else."""
    if type(argument) is int:
        return -(2**31) <= argument < 2**31
    if isinstance(argument, Tensor):
        return argument.dtype
    if (kind := getattr(argument, "kind", None)) is not None:  # of ``hopper.Tiles``
        return kind
    if (block := getattr(argument, "block_shape", None)) is not None:
        return argument.base.dtype, tuple(block)
    return type(argument)


def new_results(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate out, of the shape of q and this dtype, and lse, both contiguous."""
    batch, heads, seqlen, head_dim = q.shape  # PyTorch reads sizes faster one by one than as a torch.Size
    out = torch.empty(batch, heads, seqlen, head_dim, dtype=dtype, device=q.device)
    return out, torch.empty(batch, heads, seqlen, dtype=torch.float32, device=q.device)


def dropout_arguments(dropout_p: float, dropout_seed: int) -> tuple[int, int, float]:
    """Return the seed, threshold and keep_scale that ``tiles.dropout_factors`` takes."""
    return dropout_seed, round(dropout_p * 2**32), 1.0 / (1.0 - dropout_p)


def row_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and row of each tensor, in elements."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def bias_strides(bias: Tensor | None, q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and row of a bias, 0 where it has one of all; 0 throughout without a bias."""
    return (0, 0, 0) if bias is None else bias.expand(*q.shape[:3], k.shape[2]).stride()[:3]


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
    # AMD's gfx942 has version 9.4 too, so a GPU of AMD is ruled out first.
    return device.type in ("cuda", "meta") and not torch.version.hip and _properties(device).major == 9


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return _properties(device).multi_processor_count


def _properties(device: torch.device) -> Any:
    """Return PyTorch's properties of a GPU, which are kept, as it takes microseconds to ask for them."""
    # A device without an index is the current one, or that of meta tensors, which tests compile for one GPU or another.
    return torch.cuda.get_device_properties(device) if device.index is None else _kept_properties(device)


_kept_properties = cache(torch.cuda.get_device_properties)
