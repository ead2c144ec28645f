"""Poisoned memory: what a kernel's launcher allocates is filled with poison and lies between guard zones.

On the CPU it may end at a fence instead, pages that nobody may touch, or begin behind one. Reading past the end or
before the beginning then ends the process, even if the value that is read is not used and so shows in no result.
"""

import ctypes
import math
import mmap
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.layouts import changed_together, span

GUARD_BYTES = 4096
"""Size of the guard zone on either side of an allocation, which also keeps the alignment of the allocation."""

FENCE_BYTES = 2**24
"""Size of a fence, a multiple of that of pages: wrong strides lead further than to the next element."""

ALIGNMENT = 16
"""Bytes: compilers load as much at once from addresses that are multiples of it, and less from others."""

FINITE_POISON = 1280.0
"""A number to fill memory with, beside NaN: far from typical inputs, and exact in every dtype."""
UNWRITTEN = {torch.float16: 0x7E55, torch.bfloat16: 0x7FD5, torch.float32: 0x7FC0A5A5}
"""By dtype, the bits of the NaN that memory is filled with: other numbers do not make this one."""

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


NO_NUMBERS = (torch.bool, *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
"""The dtypes of counters, flags, indices and bytes that are viewed as another dtype."""


class PoisonedAllocations(TorchDispatchMode):
    """A context in which uninitialised tensors are filled with ``value`` and guarded, or ``fenced`` (on the CPU).

    A fence is behind the tensors or, if ``is_before``, before them.
    A dtype that can't hold the value, as 8-bit formats may not, is filled with its largest number instead. Integers
    have all bits set if the value is NaN, as which such bytes count in any other dtype, and are 0 for any other value.
    Allocations within PyTorch's own operators are not intercepted and stay as they are.
    """

    def __init__(self, value: float, *, fenced: bool = False, is_before: bool = False) -> None:
        super().__init__()
        if "torch._dynamo" in sys.modules:  # a kernel may be compiled, but not what fills its memory
            uncompiled = torch.compiler.disable(type(self).__torch_dispatch__)
            self.__torch_dispatch__ = MethodType(uncompiled, self)  # type: ignore[method-assign]
        self.value = value
        self.fenced, self.is_before = fenced, is_before
        self.guarded: list[tuple[Tensor, int, int]] = []
        self.unwritten: dict[int, int] = {}
        """By the address of an allocation that is kept to the end, the bits of the NaN that it is filled with."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile to compile as if there were no mode; otherwise it refuses, and goes on refusing."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tells PyTorch not to import torch._dynamo for each mode, which takes about as long as to import torch."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Fill and guard what an allocating operator returns."""
        result = func(*args, **(kwargs or {}))
        if func not in _EMPTY or not has_memory(result) or not is_filled(result.dtype):
            return result
        item = result.element_size()
        inside = result.untyped_storage().nbytes() // item
        if self.fenced:
            storage = fenced_storage(inside, result.dtype, is_before=self.is_before)
            fill(storage, self.value)
            return storage.as_strided(result.shape, result.stride(), result.storage_offset())
        guard = GUARD_BYTES // item
        storage = torch.empty(inside + 2 * guard, dtype=result.dtype, device=result.device)
        fill(storage, self.value)
        self.guarded.append((storage, guard, guard + inside))
        # The result is a tensor of its own, because autograd treats views that a Function returns specially. It begins
        # where its storage begins, because autograd takes offsets into its own allocations as absolute.
        fresh = torch.empty(0, dtype=result.dtype, device=result.device)
        window = storage.untyped_storage()[GUARD_BYTES : GUARD_BYTES + inside * item]
        if math.isnan(self.value) and result.dtype in UNWRITTEN:
            self.unwritten[window.data_ptr()] = UNWRITTEN[result.dtype]
        return fresh.set_(window, result.storage_offset(), result.shape, result.stride())

    def broken_guards(self) -> int:
        """Return how many guard elements no longer hold the poison."""
        broken = 0
        for storage, first, last in self.guarded:
            value = filler(self.value, storage.dtype)
            for zone in (storage[:first], storage[last:]):
                same = zone.isnan() if math.isnan(value) else zone == torch.full_like(zone, value)
                broken += int((~same).sum())
        return broken


def fill(storage: Tensor, value: float) -> None:
    """Fill a flat tensor with a value as far as its dtype has it: see ``filler``."""
    if math.isnan(value) and storage.dtype in UNWRITTEN:
        of_size = torch.int16 if storage.dtype.itemsize == 2 else torch.int32
        storage.view(of_size).fill_(UNWRITTEN[storage.dtype])
    else:
        storage.fill_(filler(value, storage.dtype))


def has_memory(x: Tensor) -> bool:
    """Whether a tensor has bytes of its own. One that a compiler traces a kernel by has none."""
    return type(x) is Tensor and not x.is_meta and x.numel() > 0


def is_filled(dtype: torch.dtype) -> bool:
    """Whether uninitialised tensors of a dtype are filled: those of complex and quantised numbers are not."""
    return dtype.is_floating_point or dtype in NO_NUMBERS


def filler(value: float, dtype: torch.dtype) -> float:
    """Return what memory of a dtype is filled with: the value, but no more than the dtype's largest number.

    Of integers it is -1, which has all bits set, or 0.
    """
    if dtype in NO_NUMBERS:
        all_set = {torch.bool: True, torch.uint8: 255}
        return all_set.get(dtype, -1) if math.isnan(value) else 0
    return value if math.isnan(value) else min(value, torch.finfo(dtype).max)


def behind_fence(x: Tensor) -> Tensor:
    """Return a copy on the CPU with the same strides, whose last element is the last that may be touched."""
    return _copied(x, fenced_storage(span(x), x.dtype))


def after_fence(x: Tensor) -> Tensor:
    """Return a copy on the CPU with the same strides, whose first element is the first that may be touched."""
    return _copied(x, fenced_storage(span(x), x.dtype, is_before=True))


def alone(x: Tensor) -> Tensor:
    """Return a copy with the same strides and alignment in an allocation that ends with its last element."""
    before = x.data_ptr() % ALIGNMENT // x.element_size()
    return _copied(x, torch.empty(before + span(x), dtype=x.dtype, device=x.device)[before:])


def inputs_copied(
    copy: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> list[Tensor]:
    """Return copies of the inputs; v stays the first columns of k if it is."""
    return [copy(q), *changed_together(k, v, copy, copy), copy(dout)]


def _copied(x: Tensor, storage: Tensor) -> Tensor:
    """Return a copy with the same strides that begins where a flat tensor begins."""
    copy = storage.as_strided(x.shape, x.stride())
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())
    copy[once].copy_(x[once])
    return copy


def fenced_storage(elements: int, dtype: torch.dtype, *, is_before: bool = False) -> Tensor:
    """Return a flat tensor of zeros between pages that can be neither read nor written.

    It ends where such pages begin or, if the fence ``is_before`` it, begins where such pages end.
    """
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    page, size = mmap.PAGESIZE, elements * dtype.itemsize
    end = FENCE_BYTES + -(-size // page) * page
    pages = mmap.mmap(-1, end + FENCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    for fence in (address, address + end):
        if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(FENCE_BYTES), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    first = FENCE_BYTES if is_before else end - size
    return torch.frombuffer(pages, dtype=dtype, count=elements, offset=first)
