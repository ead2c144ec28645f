"""Which accelerators there are, and what is asked of the one of a device.

A stand-alone script may contain this whole module, so it needs torch and the standard library alone, beside
``interface`` and ``cuda``.
"""

from functools import cache

import torch

from tests.harness.accelerators.cuda import Cuda
from tests.harness.accelerators.interface import Accelerator, NoAccelerator

OF_CUDA, OF_CPU = Cuda(), NoAccelerator()
OWN_INTERFACES: dict[str, Accelerator] = {"cpu": OF_CPU, "none": OF_CPU, OF_CUDA.type: OF_CUDA}
"""By type, the devices that are not reached by ``torch.accelerator``; a process that calls no kernel has "none"."""


def accelerator_of(device: str | torch.device) -> Accelerator:
    """Return what is asked of a device, such as "cpu", "cuda:1" or "xpu"."""
    return _of_type(str(device).partition(":")[0])


@cache
def _of_type(device_type: str) -> Accelerator:
    return OWN_INTERFACES.get(device_type) or Accelerator(device_type)


def in_use() -> Accelerator | None:
    """Return the accelerator that this process uses already, if it does."""
    if OF_CUDA.is_initialized():
        return OF_CUDA
    found = torch.accelerator.current_accelerator()
    if found is None or found.type == OF_CUDA.type:
        return None
    return accelerator_of(found.type) if torch._C._accelerator_isAllocatorInitialized() else None


def available() -> tuple[str, ...]:
    """Return the types of devices on which this torch runs kernels here, the one that is taken by default first."""
    found = torch.accelerator.current_accelerator(check_available=True)
    other = [] if found is None else [found.type]
    return tuple(dict.fromkeys([*([OF_CUDA.type] if OF_CUDA.is_available() else []), *other, "cpu"]))
