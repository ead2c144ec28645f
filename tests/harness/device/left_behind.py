"""What equal calls leave behind: state of the process that is changed, tensors in shared memory, and what grows."""

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness.accelerators.lookup import in_use
from tests.harness.device.process_state import put_back

FEW = 2
"""Calls after each of which something more must be left, before more calls are made to see whether that goes on."""
SERIES = 4
"""What grows must do so in each of so many series of equal calls."""
CALLS = 72
"""Calls of a series: a cache of 256 results is full before the last one ends."""
CALLS_AGAIN = 8
"""Calls of the only series where something is known to grow with the calls of a kernel."""
MOST_SECONDS = 8.0
"""Seconds that all of these may take. If a call is slower, it is not judged by what grows."""
ONCE_A_CALL = 0.9
"""A leak leaves something in this share of the calls at least: memory that was free before may be taken first."""

FILES, THREADS = "/proc/self/fd", "/proc/self/task"
"""Folders with an entry for each open file, and for each thread, of this process."""
MANY = 512
"""A process with more files or threads may soon get no further ones."""
LEAST_BYTES = 512
"""The bytes of the smallest allocation of PyTorch on a GPU."""
OF_GPU = "memory of the GPU allocated each time"
"""What is left behind by a call that allocates memory of a GPU which is never given back."""
OWN = ("out", "lse")
"""Tensors that are a caller's own. Autograd may return dout itself as a gradient, which is PyTorch's custom."""
OF_EARLIER = "{} in the memory that an earlier call returned, where writing to either changes both"
"""What is left behind by a call that returns the same memory again."""


class Storages(TorchDispatchMode):
    """A context that notes the memory of what PyTorch's operators return, by weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[int, StorageWeakRef] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile to compile as if there were no mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tells PyTorch not to import torch._dynamo for the mode."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the storages of what an operator returns."""
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta:
                noted = StorageWeakRef(x.untyped_storage())
                self.noted.setdefault(noted.cdata, noted)
        return result

    def alive(self) -> int:
        """Return how many of the noted storages are still there, and forget all others."""
        self.noted = {key: x for key, x in self.noted.items() if not x.expired()}
        return len(self.noted)


Results = Mapping[str, Tensor]
"""The tensors of a call by name: q, k and v that it is given, and what it returns."""
Call = Callable[[Storages], Results]
"""Makes a call in a context that notes its tensors."""


def left_behind(call: Call, *, may_draw: bool, known: set[str] | None = None) -> list[str]:
    """Return what equal calls leave behind, each in words that follow "a call leaves", apart from the first call.

    That may import modules, load libraries, fill caches and start threads that stay.

    Args:
        call: makes the same call again, in a context that notes its tensors, and returns them.
        may_draw: whether it has dropout, for which a kernel may draw a seed from the random generators.
        known: what grows with the calls of the kernel, as far as other calls have shown; what this one shows is added.
    """
    storages, names = Storages(), set[str]()
    with put_back(set()):
        first = call(storages)
    with put_back(names):
        second = call(storages)
    changed = sorted(name for name in names if not (may_draw and "random generator" in name))
    found = [f"{' and '.join(changed)} changed"] if changed else []
    found += shared(second)
    found += [
        OF_EARLIER.format(name)
        for name in OWN
        if name in first and name in second and overlap(first[name], second[name])
    ]
    del first, second
    return [*found, *growing(call, storages, set() if known is None else known)]


def shared(results: Results) -> list[str]:
    """Return which of the tensors that a caller owns lie in memory of other tensors of the call, in words."""
    pairs = [(name, other) for name in OWN for other in ("q", "k", "v")] + [OWN]
    return [
        f"{name} in memory of {other}, where writing to {name} changes {other}"
        for name, other in pairs
        if name in results and other in results and overlap(results[name], results[other])
    ]


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether any byte belongs to elements of both tensors; tensors that lie interleaved share none."""
    if x.device != y.device or not (x.numel() and y.numel()):
        return False
    (x_first, x_last), (y_first, y_last) = _ends(x), _ends(y)
    if x_last < y_first or y_last < x_first:
        return False
    return bool(torch.isin(_bytes(x), _bytes(y)).any())


def _ends(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and the last byte of a tensor."""
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (steps + 1) * x.element_size() - 1


def _bytes(x: Tensor) -> Tensor:
    """Return the addresses of all bytes of a tensor, on the CPU, without those that are of several elements."""
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if stride:
            places = places[..., None] + torch.arange(size, dtype=torch.int64, device="cpu") * stride
    within = torch.arange(x.element_size(), dtype=torch.int64, device="cpu")
    return x.data_ptr() + places[..., None] * x.element_size() + within


def entries(folder: str) -> int:
    """Return how many entries a folder has."""
    return sum(1 for _ in Path(folder).iterdir())


def is_used_up() -> bool:
    """Whether calls have left so many files or threads in this process that others may get none."""
    return max(map(entries, (FILES, THREADS))) > MANY


def growing(call: Call, storages: Storages, known: set[str]) -> list[str]:
    """Return what grows with each of many equal calls, in words: open files, threads, and memory of tensors.

    ``storages`` has noted those of calls before. For what is ``known`` to grow, few calls are enough.
    """
    watches: dict[str, Callable[[], int]] = {
        "a file open each time": partial(entries, FILES),
        "a thread running each time": partial(entries, THREADS),
        "a tensor in memory each time": storages.alive,
    }
    if accelerator := in_use():  # a library may allocate memory by other ways than PyTorch's operators
        watches[OF_GPU] = lambda: (accelerator.held("allocated") or 0) // LEAST_BYTES

    def steps(calls: int) -> dict[str, int]:
        before = {name: read() for name, read in watches.items()}
        with put_back(set()):
            for _ in range(calls):
                call(storages)
        if suspects:
            gc.collect()
        return {name: read() - before[name] for name, read in watches.items()}

    suspects: list[str] = []
    start = time.perf_counter()
    suspects = [name for name, step in steps(FEW).items() if step >= FEW]
    if (time.perf_counter() - start) / FEW * SERIES * CALLS > MOST_SECONDS:
        return []
    series = [CALLS_AGAIN] if known.issuperset(suspects) else [CALLS] * SERIES
    for calls in series:
        grown = steps(calls) if suspects else {}
        suspects = [name for name in suspects if grown[name] >= ONCE_A_CALL * calls]
    known.update(suspects)
    # Tensors on a GPU are told as tensors, where PyTorch's operators have made them.
    return [name for name in suspects if name != OF_GPU or len(suspects) == 1]
