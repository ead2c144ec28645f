"""The state of a process that a kernel may change for what runs after it: what it is called, how it is read and put.

The default dtype, the precision of products or a random generator decide what a later call computes, and what the
results of that call are compared with. So a call leaves all of them as they were before it.
"""

import ctypes
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.harness.accelerators.interface import Accelerator
from tests.harness.accelerators.lookup import in_use

WORDS = 624
"""The numbers of 32 bits in the state of a Mersenne Twister."""
PYTHONS_OWN: random.Random = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind functions such as ``random.random``. Its state follows the header of the object."""
NUMPYS_OWN = np.random.get_bit_generator()  # type: ignore[attr-defined]  # which NumPy's types leave out
"""The generator behind functions such as ``numpy.random.rand``."""
CURRENT_FOLDER = "/proc/self/cwd"
"""A link to the current folder, which can be read even if that folder is gone."""

PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
"""Backends and operations, each of which has a precision of float32 arithmetic in PyTorch."""
AUTOCAST = ("cpu", "cuda")
"""The types of devices whose autocast is a piece of state in any process."""
AUTOCAST_FLAGS: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (torch.is_autocast_enabled, torch.set_autocast_enabled),
    (torch.get_autocast_dtype, torch.set_autocast_dtype),
)
"""The functions of PyTorch that read and put the state of autocast for a type of device."""


@dataclass(frozen=True)
class Piece:
    """A piece of state, or a part of one: several parts have one name. ``put`` takes what ``read`` has returned.

    Many modules change what is ``of_imports`` as they are imported. That happens once in a process, and stays. Values
    of the same ``effect`` are different in writing alone.
    """

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], object]
    of_imports: bool = False
    effect: Callable[[Any], Any] = lambda value: value


@contextmanager
def put_back(names: set[str]) -> Iterator[None]:
    """Put back in the end what is changed meanwhile, and add the names of these pieces of state to ``names``."""
    pieces = (*PIECES, *pieces_of(accelerator)) if (accelerator := in_use()) else PIECES
    modules, before = len(sys.modules), [(piece, piece.read()) for piece in pieces]
    try:
        yield
    finally:
        has_imported = len(sys.modules) > modules
        for piece, value in before:
            now = piece.read()
            if now == value or (piece.of_imports and has_imported):
                continue
            if piece.effect(now) != piece.effect(value):
                names.add(piece.name)
            piece.put(value)


def _flag(name: str, owner: Any, attribute: str) -> Piece:
    """Return an attribute of an object as a piece of state."""
    return Piece(name, partial(getattr, owner, attribute), partial(setattr, owner, attribute))


def _older(read: Callable[[], Any], put: Callable[[Any], object]) -> Piece:
    """Return an older flag for the precision of products, which is None where PyTorch refuses to read it.

    It does so where newer flags have been put that do not agree with each other.
    """

    def found() -> Any:
        with suppress(RuntimeError):
            return read()
        return None

    return Piece("the precision of float32 products", found, lambda value: value is None or put(value))


def _generator_of_torch(name: str, generator: Any) -> Piece:
    def put(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Piece(name, lambda: generator.get_state().numpy().tobytes(), put)


def _twister(name: str, address: int, put: Callable[[list[int]], object]) -> Piece:
    """Return a Mersenne Twister: its words with its place among them, which ``put`` takes in their order in memory.

    They are read from there, since Python and NumPy take ten and a hundred times as long to make objects of them.
    """
    size = 4 * (WORDS + 1)
    return Piece(
        name,
        partial(ctypes.string_at, address, size),
        lambda state: put(np.frombuffer(state, np.uint32).tolist()),
    )


def _put_pythons(state: list[int]) -> None:
    place, *words = state
    random.setstate((random.Random.VERSION, (*words, place), None))


def _put_numpys(state: list[int]) -> None:
    *words, place = state
    np.random.set_state(("MT19937", np.array(words, np.uint32), place, 0, 0.0))


def _default_device() -> torch.device | None:
    """Return the default device; None if none was set, where PyTorch need not look for it in every call."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


_modes: list[torch.inference_mode] = []


def _put_inference_mode(value: bool) -> None:
    mode = torch.inference_mode(value)
    mode.__enter__()
    _modes.append(mode)  # a mode is in force only as long as its object exists


def _put_warnings(filters: tuple[Any, ...]) -> None:
    warnings.resetwarnings()  # so that what was decided by the filters until now is forgotten
    warnings.filters = list(filters)


def _environment() -> dict[bytes, bytes]:
    """Return the variables as they are stored: to decode all of them takes far longer."""
    found: dict[bytes, bytes] = os.environ._data.copy()  # type: ignore[attr-defined]
    return found


def _put_environment(variables: dict[bytes, bytes]) -> None:
    for name in _environment().keys() - variables.keys():
        del os.environb[name]
    os.environb.update(variables)


def _put_folder(path: str) -> None:
    with suppress(OSError):  # the folder is gone
        os.chdir(path)


CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn

PIECES = (
    Piece("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Piece("torch's default device", _default_device, torch.set_default_device),
    # Inference mode comes first, because it changes grad mode.
    Piece("inference mode", torch.is_inference_mode_enabled, _put_inference_mode),
    Piece("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _generator_of_torch("PyTorch's random generator", torch.default_generator),
    _twister("Python's random generator", id(PYTHONS_OWN) + object.__basicsize__, _put_pythons),
    _twister("NumPy's random generator", NUMPYS_OWN.ctypes.state_address, _put_numpys),
    # The older flags come first, because they change the newer ones.
    _older(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _older(torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
    *(
        Piece(
            "the precision of float32 products",
            partial(torch._C._get_fp32_precision_getter, *where),
            partial(torch._C._set_fp32_precision_setter, *where),
            effect=lambda value: "ieee" if value == "none" else value,
        )
        for where in PRECISIONS
    ),
    *(
        _flag("the precision of 16-bit products", CUDA.matmul, attribute)
        for attribute in (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )
    ),
    *(
        _flag("the flags of cuDNN", CUDNN, attribute)
        for attribute in ("enabled", "benchmark", "benchmark_limit", "deterministic")
    ),
    *(
        Piece("the kernels that SDPA may use", read, put)
        for read, put in (
            (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp),
            (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp),
            (CUDA.math_sdp_enabled, CUDA.enable_math_sdp),
            (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp),
            (CUDA.fp16_bf16_reduction_math_sdp_allowed, CUDA.allow_fp16_bf16_reduction_math_sdp),
        )
    ),
    Piece(
        "deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1]),
    ),
    _flag("deterministic algorithms", torch.utils.deterministic, "fill_uninitialized_memory"),
    Piece(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda flags: torch.set_anomaly_enabled(*flags),
    ),
    *(
        Piece("autocast", partial(read, device_type), partial(put, device_type))
        for device_type in AUTOCAST
        for read, put in AUTOCAST_FLAGS
    ),
    Piece("autocast", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Piece("the number of threads", torch.get_num_threads, torch.set_num_threads),
    # Nothing tells whether numbers below the smallest normal one are flushed to 0 but such a number.
    Piece("the flushing of denormals", lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal),
    Piece("the filters of warnings", lambda: (*warnings.filters,), _put_warnings, of_imports=True),
    Piece("environment variables", _environment, _put_environment, of_imports=True),
    Piece("the current folder", partial(os.readlink, CURRENT_FOLDER), _put_folder),
)


def pieces_of(accelerator: Accelerator) -> tuple[Piece, ...]:
    """Return the pieces that a process has once it uses an accelerator."""
    streams = (Piece("the current stream", accelerator.current_stream, accelerator.set_stream),)
    has_autocast = accelerator.type not in AUTOCAST and torch.amp.is_autocast_available(accelerator.type)
    return (
        Piece("the current GPU", accelerator.current_device, accelerator.set_device),
        *(streams if accelerator.has_streams else ()),
        *(_generator_of_torch("the random generator of the GPU", x) for x in accelerator.generators()),
        *(
            Piece("autocast", partial(read, accelerator.type), partial(put, accelerator.type))
            for read, put in (AUTOCAST_FLAGS if has_autocast else ())
        ),
    )
