"""Copies of tensors between the CPU, where small problems are made and judged, and the GPU on which a kernel runs.

Processes that share a GPU wait for each other at every step of a comparison. On the CPU each has a core of its own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strategies.case import Case
from strategies.layouts import Window
from tests.harness.accelerators.lookup import accelerator_of

MOST_PRODUCTS = 2**22
"""A case of more products (``Case.products``) is judged faster by a GPU that processes share than by a core."""


def home_of(case: Case, device: str) -> str:
    """Return where the tensors of a case are made and judged, if its kernel runs on ``device``."""
    is_huge = "huge" in case.layouts
    is_large = case.products > MOST_PRODUCTS or is_huge
    return device if is_large and accelerator_of(device).has_float64 else "cpu"


@dataclass
class Copies:
    """Copies, on one device, of the storages of tensors on the CPU, so that views stay views with the same strides.

    Of a storage of one of the ``windows``, the part of its tensor is copied; what lies around that is ``margin`` on the
    device, where it needs no transfer.
    """

    device: str
    windows: Iterable[Window] = ()
    margin: float = math.nan
    copied: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By address and dtype of a storage: a flat view of the part that is copied, and the same view of the copy."""

    def __post_init__(self) -> None:
        self.parts = {window.storage.data_ptr(): window.part for window in self.windows}

    def of(self, x: Tensor) -> Tensor:
        """Return the tensor on the device: with its strides, its offset, and what lies around it in storage."""
        address = x.untyped_storage().data_ptr()
        if (address, x.dtype) not in self.copied:
            whole = x.new_empty(0).set_(x.untyped_storage())
            part = self.parts.get(address, slice(None))
            copy = torch.empty_like(whole, device=self.device)
            if address in self.parts:
                copy.fill_(self.margin)
            copy[part].copy_(whole[part], non_blocking=True)
            self.copied[address, x.dtype] = whole[part], copy[part]
        copy = self.copied[address, x.dtype][1]
        return copy.as_strided(x.shape, x.stride(), x.storage_offset())

    def write_back(self) -> None:
        """Write to the storages on the CPU what was written to the copied parts of them."""
        fresh = on_cpu([copy for _, copy in self.copied.values()])
        for (part, _), now in zip(self.copied.values(), fresh, strict=True):
            part.copy_(now)


def on_cpu(found: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device on the CPU, after waiting for the device once."""
    accelerator = accelerator_of(next((x.device for x in found), "cpu"))
    pinned = accelerator.has_pinned_memory
    copies = [torch.empty_like(x, device="cpu", pin_memory=pinned).copy_(x, non_blocking=True) for x in found]
    accelerator.synchronize()
    return copies
