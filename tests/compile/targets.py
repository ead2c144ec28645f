"""The GPUs that kernels are compiled for; none of them is needed for that."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Target:
    """The properties of a GPU that a launcher or Triton may ask for.

    ``shared`` is the most shared memory, in bytes, that a program can have (CUDA programming guide, "Technical
    Specifications per Compute Capability"; the LDS of a CDNA 3 compute unit); ``tensor`` is the number of columns of
    tensor memory; ``processors`` is the number of multiprocessors.
    """

    backend: str
    arch: int | str
    warp_size: int
    capability: tuple[int, int]
    shared: int
    processors: int
    tensor: int = 0


TARGETS = {
    "sm_80": Target("cuda", 80, 32, (8, 0), 163 * 1024, 108),
    "sm_90": Target("cuda", 90, 32, (9, 0), 227 * 1024, 132),
    "sm_100": Target("cuda", 100, 32, (10, 0), 227 * 1024, 148, tensor=512),
    "gfx942": Target("hip", "gfx942", 64, (9, 4), 64 * 1024, 304),
}


@contextmanager
def compiling_for(name: str) -> Iterator[list[Any]]:
    """Pretend, within the context, that the GPU is ``name``; what is launched is compiled but not run.

    Yields a list to which each launch adds what Triton compiled. Tensors may be on the device ``meta``.
    """
    target = TARGETS[name]
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        compiled.append(kernel)
        return kernel

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget(target.backend, target.arch, target.warp_size),
        get_current_device=lambda: name,  # Triton keeps what it compiled by device
        get_current_stream=lambda device: 0,
    )
    properties = SimpleNamespace(
        major=target.capability[0],
        minor=target.capability[1],
        multi_processor_count=target.processors,
        shared_memory_per_block_optin=target.shared,
        warp_size=target.warp_size,
    )
    with (
        patch.object(triton.runtime.driver, "_active", driver),
        patch.object(JITFunction, "run", compile_only),
        patch.object(torch.version, "hip", target.arch if target.backend == "hip" else None),
        patch.object(torch.cuda, "get_device_capability", lambda *_: target.capability),
        patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
    ):
        yield compiled
