"""CUDA, and ROCm, which PyTorch calls CUDA too: the only module that names ``torch.cuda``.

A stand-alone script may contain this whole module, so it needs torch and the standard library alone, beside
``interface``.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from tests.harness.accelerators.interface import Accelerator, CaptureRefused

RELAXED = 2
"""The number of ``CU_STREAM_CAPTURE_MODE_RELAXED``: other threads may record a CUDA graph meanwhile."""


class Cuda(Accelerator):
    """GPUs that PyTorch reaches by ``torch.cuda``. All that is asked of an accelerator can be had there."""

    visible = "CUDA_VISIBLE_DEVICES"
    has_graphs = True
    has_sanitizers = True
    has_pinned_memory = True
    has_float64 = has_streams = has_events = tells_memory = tells_held = True

    def __init__(self) -> None:
        super().__init__("cuda")

    def is_available(self) -> bool:
        """Whether this torch finds such a device here."""
        return torch.cuda.is_available()

    def is_initialized(self) -> bool:
        """Whether this process uses one already."""
        return torch.cuda.is_initialized()

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        return torch.cuda.device_count()

    def name(self) -> str:
        """Return the name of the hardware."""
        return torch.cuda.get_device_name()

    def use(self, device: str) -> None:
        """Make a device the current one of this process, and have float32 products computed in float32."""
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False

    def current_device(self) -> int:
        """Return the number of the current device."""
        return torch.cuda.current_device()

    def total_memory(self, number: int) -> int | None:
        """Return the bytes of the GPU with a number."""
        return int(torch.cuda.get_device_properties(number).total_memory)

    def set_device(self, number: int) -> None:
        """Make another device the current one."""
        torch.cuda.set_device(number)

    def beside(self, number: int) -> AbstractContextManager[Any]:
        """Return a context in which the device after the one with this number is the current one."""
        return torch.cuda.device((number + 1) % torch.cuda.device_count())

    def synchronize(self) -> None:
        """Wait until the current device has done all its work."""
        torch.cuda.synchronize()

    def wait_for_launched(self) -> None:
        """Wait for the work that the default stream has by now.

        In the mode that is set first, this does not spoil a CUDA graph that another thread records.
        """
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
        reached = torch.cuda.Event(blocking=True)
        reached.record(torch.cuda.default_stream())
        reached.synchronize()

    def current_stream(self) -> Any:
        """Return the current stream of the current device."""
        return torch.cuda.current_stream()

    def set_stream(self, stream: Any) -> None:
        """Make another stream the current one."""
        torch.cuda.set_stream(stream)

    def side_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which a new stream is the current one."""
        return torch.cuda.stream(torch.cuda.Stream())

    def keep_busy(self, cycles: int) -> None:
        """Give the current stream work for so many cycles."""
        torch.cuda._sleep(cycles)

    def captured(self, call: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Capture a call in a CUDA graph, and return what replays it, and the tensors that a replay writes.

        Raises CaptureRefused, after all is as before.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # Other threads may allocate and compile meanwhile; the call itself may not wait for the device.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = call()
        except Exception as e:
            first = e.__context__ or e  # the end of a capture that has failed raises an exception as well
            recover(pool)
            keep(graph)
            raise CaptureRefused(f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0]}") from e
        return graph.replay, results

    def memory(self) -> tuple[int, int]:
        """Return the free bytes of the current device, and all that it has."""
        return torch.cuda.mem_get_info()

    def held(self, kind: str) -> int:
        """Return the bytes that are "allocated" for tensors of this process, or "reserved" for them by PyTorch."""
        # ``torch.cuda.memory_allocated`` makes a flat copy of all statistics, which takes longer than a small kernel.
        found = torch.cuda.memory_stats_as_nested_dict().get(f"{kind}_bytes")
        return found["all"]["current"] if found else 0

    def limit_memory(self, share: float) -> None:
        """Keep this process from taking more than a share of the memory."""
        torch.cuda.set_per_process_memory_fraction(share)

    def empty_cache(self) -> None:
        """Give memory back that PyTorch has kept for further tensors."""
        torch.cuda.empty_cache()

    def generators(self) -> tuple[Any, ...]:
        """Return the random generators of all devices."""
        return tuple(torch.cuda.default_generators)


def recover(pool: tuple[int, int]) -> None:
    """End a capture that has failed, whose memory pool PyTorch leaves open, and whose random generators capture on.

    Another capture, which ends well, has generators out of that state.
    """
    device = torch.cuda.current_device()
    for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with suppress(
            Exception
        ):  # the capture has ended the pool itself, or PyTorch calls this by another name
            getattr(torch._C, end)(device, pool)
    other = torch.cuda.CUDAGraph()
    with suppress(Exception), torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(other):
        torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def keep(graph: torch.cuda.CUDAGraph) -> None:
    """Let a graph live as long as the process: the end of one whose capture has failed may end the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
