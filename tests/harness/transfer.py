"""Copies of tensors between the CPU, where small problems are made and judged, and the GPU on which a kernel runs.

Processes that share a GPU wait for each other at every step of a comparison. On the CPU each has a core of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strategies.case import Case

MOST_WORK = 2**22
"""Above so many multiplications in a product of q and k, a GPU judges faster than a core, though others wait for it."""


def home_of(case: Case, device: str) -> str:
    """Return where the tensors of a case are made and judged, if its kernel runs on ``device``."""
    work = case.scores * case.head_dim
    is_huge = "huge" in case.layouts
    return device if work > MOST_WORK or is_huge else "cpu"


@dataclass
class Copies:
    """Copies, on one device, of the storages of tensors on the CPU, so that views stay views with the same strides."""

    device: str
    storages: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, x: Tensor) -> Tensor:
        """Return the tensor on the device: with its strides, its offset, and what lies around it in storage."""
        key = x.untyped_storage().data_ptr(), x.dtype
        if key not in self.storages:
            whole = x.new_empty(0).set_(x.untyped_storage())
            self.storages[key] = whole, whole.to(self.device, non_blocking=True, copy=True)
        return self.storages[key][1].as_strided(x.shape, x.stride(), x.storage_offset())

    def write_back(self) -> None:
        """Write to the storages on the CPU what was written to their copies."""
        fresh = on_cpu([copy for _, copy in self.storages.values()])
        for (whole, _), now in zip(self.storages.values(), fresh, strict=True):
            whole.copy_(now)


def on_cpu(found: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device on the CPU, after waiting for the device once."""
    pinned = torch.cuda.is_available()  # memory to which a GPU copies while this process goes on
    copies = [torch.empty_like(x, device="cpu", pin_memory=pinned).copy_(x, non_blocking=True) for x in found]
    if pinned:
        torch.cuda.synchronize()
    return copies
