"""Memory that tells: what a kernel's launcher allocates is filled with poison and lies between guard zones."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GUARD_BYTES = 4096
"""On either side of an allocation; also keeps its alignment."""

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class PoisonedAllocations(TorchDispatchMode):
    """Within it, uninitialised tensors are filled with ``value`` and guarded.

    Allocations inside of PyTorch's own operators do not pass here and stay as they are.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.guarded: list[tuple[Tensor, int, int]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells torch.compile to compile as if there were no mode; else it refuses, and goes on refusing."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Fill and guard what comes from an allocating operator."""
        result = func(*args, **(kwargs or {}))
        if func not in _EMPTY or not result.is_floating_point() or result.numel() == 0:
            return result
        item = result.element_size()
        inside = result.untyped_storage().nbytes() // item
        guard = GUARD_BYTES // item
        storage = torch.full((inside + 2 * guard,), self.value, dtype=result.dtype, device=result.device)
        self.guarded.append((storage, guard, guard + inside))
        # A tensor of its own, not a view, for autograd treats views that a Function returns specially; and on a
        # storage that begins where it does, for autograd takes offsets into its own allocations as absolute.
        fresh = torch.empty(0, dtype=result.dtype, device=result.device)
        window = storage.untyped_storage()[GUARD_BYTES : GUARD_BYTES + inside * item]
        return fresh.set_(window, result.storage_offset(), result.shape, result.stride())

    def broken_guards(self) -> int:
        """How many guard elements no longer hold the poison."""
        broken = 0
        for storage, first, last in self.guarded:
            for zone in (storage[:first], storage[last:]):
                same = zone.isnan() if self.value != self.value else zone == storage.new_tensor(self.value)
                broken += int((~same).sum())
        return broken
