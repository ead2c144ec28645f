"""What is asked of an accelerator, whatever its type, and how ``torch.accelerator`` answers.

A stand-alone script may contain this whole module, so it needs torch and the standard library alone.
"""

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SCRATCH = 2**22
"""The float32 elements of a tensor that is changed again and again to keep a stream busy."""
CYCLES_OF_PASS = 2**19
"""About so many cycles of an accelerator pass as all elements of such a tensor are changed."""


class CaptureRefused(Exception):
    """A call can't be captured in a graph: it waits for the device, or copies from it."""


class Accelerator:
    """The accelerators of one type, of which a process uses the current one.

    What PyTorch can't tell of a type is None, and ``left_out`` has it in words. Methods raise what PyTorch raises of a
    device that is lost.

    Attributes:
        type: the type in PyTorch, such as "xpu".
        visible: the environment variable by which a process sees its own device alone; "" if processes see all.
        has_graphs: whether ``captured`` records calls.
        has_sanitizers: whether there are tools that watch its kernels.
        has_pinned_memory: whether it copies to pinned memory of the CPU while the process goes on.
    """

    visible = ""
    has_graphs = False
    has_sanitizers = False
    has_pinned_memory = False

    def __init__(self, device_type: str) -> None:
        self.type = device_type

    @property
    def module(self) -> Any:
        """PyTorch's module for the type, such as ``torch.xpu``."""
        return torch.get_device_module(self.type)

    def is_available(self) -> bool:
        """Whether this torch finds such a device here."""
        found = torch.accelerator.current_accelerator(check_available=True)
        return found is not None and found.type == self.type

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        return torch.accelerator.device_count()

    def name(self) -> str:
        """Return the name of the hardware, or the type where PyTorch does not know it."""
        return str(getattr(self.module, "get_device_name", lambda: self.type)())

    def use(self, device: str) -> None:
        """Make a device such as "xpu:1" the current one of this process, which runs kernels there from now on."""
        torch.accelerator.set_device_index(device)

    def current_device(self) -> int:
        """Return the number of the current device."""
        return torch.accelerator.current_device_index()

    def set_device(self, number: int) -> None:
        """Make another device the current one."""
        torch.accelerator.set_device_index(number)

    def beside(self, number: int) -> AbstractContextManager[Any]:
        """Return a context in which the device after the one with this number is the current one."""
        return torch.accelerator.device_index((number + 1) % self.device_count())

    def synchronize(self) -> None:
        """Wait until the current device has done all its work."""
        torch.accelerator.synchronize()

    def wait_for_launched(self) -> None:
        """Wait for the work that the default stream has by now, in a thread that has set no other stream."""
        reached = torch.Event(self.type, blocking=True)
        reached.record(torch.accelerator.current_stream())
        reached.synchronize()

    def current_stream(self) -> Any:
        """Return the current stream of the current device."""
        return torch.accelerator.current_stream()

    def set_stream(self, stream: Any) -> None:
        """Make another stream the current one."""
        torch.accelerator.set_stream(stream)

    def side_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which a new stream is the current one."""
        return torch.Stream(self.type)

    def keep_busy(self, cycles: int) -> None:
        """Give the current stream work for about so many cycles."""
        scratch = torch.zeros(SCRATCH, device=self.type)
        for _ in range(cycles // CYCLES_OF_PASS):
            scratch.add_(1.0)

    def captured(self, call: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Record a call on the current stream, and return what replays it with what it returned.

        Raises CaptureRefused.
        """
        raise CaptureRefused(f"there are no graphs of calls on {self.type}")

    def memory(self) -> tuple[int, int] | None:
        """Return the free bytes of the current device, and all that it has."""
        tell = self._memory_info
        return tell() if tell and self.tells_memory else None

    def total_memory(self, number: int) -> int | None:
        """Return the bytes of the device with a number, where it is known without using it."""
        return None

    def held(self, kind: str) -> int | None:
        """Return the bytes that are "allocated" for tensors of this process, or "reserved" for them by PyTorch."""
        if not self.tells_held:
            return None
        found: int = getattr(torch.accelerator, f"memory_{kind}")()
        return found

    def limit_memory(self, share: float) -> None:
        """Keep this process from taking more than a share of the memory, where PyTorch can do so."""
        getattr(self.module, "set_per_process_memory_fraction", lambda share: None)(share)

    def empty_cache(self) -> None:
        """Give memory back that PyTorch has kept for further tensors."""
        with suppress(RuntimeError):  # the backend's allocator keeps nothing that PyTorch knows of
            torch.accelerator.empty_cache()

    def generators(self) -> tuple[Any, ...]:
        """Return the random generators of the type, which have ``get_state`` and ``set_state``."""
        if found := getattr(self.module, "default_generators", ()):
            return tuple(found)
        states = [getattr(self.module, name, None) for name in ("get_rng_state", "set_rng_state")]
        return () if None in states else (SimpleNamespace(get_state=states[0], set_state=states[1]),)

    @cached_property
    def has_float64(self) -> bool:
        """Whether products and sums of float64 tensors can be computed there."""
        return _works(lambda: self._sum(torch.float64))

    @cached_property
    def has_streams(self) -> bool:
        """Whether another stream can be the current one."""

        def on_another() -> None:
            before = self.current_stream()
            with self.side_stream():
                self._sum(torch.float32)
            self.set_stream(before)

        return _works(on_another)

    @cached_property
    def has_events(self) -> bool:
        """Whether a thread can wait for what has been launched by now."""
        return _works(self.wait_for_launched)

    @cached_property
    def tells_memory(self) -> bool:
        """Whether it is known how much memory is free."""
        return self._memory_info is not None and _works(self._memory_info)

    @cached_property
    def tells_held(self) -> bool:
        """Whether it is known how much memory the tensors of this process have."""
        kept = torch.zeros(SCRATCH, device=self.type)
        return (
            _works(torch.accelerator.memory_allocated) and torch.accelerator.memory_allocated() >= kept.nbytes
        )

    def left_out(self) -> tuple[str, ...]:
        """Return what a run leaves out on this type of device, since PyTorch does not have it there, in words."""
        needs = {
            "calls on a side stream": self.has_streams,
            "calls in a graph": self.has_graphs,
            "laws that judge results where the kernel leaves them, for which it lacks float64": self.has_float64,
            "memory of the device that calls leave allocated": self.tells_held,
            "whether the memory of the device is full": self.tells_memory,
            "what calls do to its random generator": bool(self.generators()),
            "an early end of kernels that hang while they are launched": self.has_events,
        }
        return tuple(what for what, is_there in needs.items() if not is_there)

    @property
    def _memory_info(self) -> Callable[[], tuple[int, int]] | None:
        """What tells the memory of the current device, which an older torch has in the module of the type alone."""
        return getattr(torch.accelerator, "get_memory_info", None) or getattr(
            self.module, "mem_get_info", None
        )

    def _sum(self, dtype: torch.dtype) -> float:
        """Return the sum of a product that the current device computes."""
        ones: Tensor = torch.ones(2, 2, dtype=dtype, device=self.type)
        return float((ones @ ones).sum())


class NoAccelerator(Accelerator):
    """The CPU, which has no accelerator: there is nothing to wait for, and no memory but that of the machine."""

    has_streams = has_events = tells_memory = tells_held = False  # not to be found out
    has_float64 = True

    def __init__(self) -> None:
        super().__init__("cpu")

    def is_available(self) -> bool:
        """Whether there is one: always."""
        return True

    def device_count(self) -> int:
        """Return how many accelerators there are: none."""
        return 0

    def name(self) -> str:
        """Return the architecture of the machine."""
        return platform.machine()

    def use(self, device: str) -> None:
        """Do nothing: each process uses the CPU."""

    def synchronize(self) -> None:
        """Do nothing: what has been called has been done."""

    def empty_cache(self) -> None:
        """Do nothing: PyTorch keeps no memory of the machine."""


def _works(attempt: Callable[[], Any]) -> bool:
    """Whether PyTorch can do something on a device: a backend raises what it likes for what it lacks."""
    try:
        attempt()
    except Exception:
        return False
    return True
