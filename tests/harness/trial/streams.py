"""Calls on a GPU in other places than usual: on a side stream, beside another current device, in a CUDA graph."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

SIDE, BESIDE, GRAPH = "on a side stream", "beside another current device", "in a CUDA graph"
"""The places of calls."""

BUSY_CYCLES = 2**26
"""Cycles for which the default stream is kept busy: 35 milliseconds, longer than it takes to launch a small call."""
SHORT_CYCLES = 2**23
"""Cycles for which the side stream is kept busy before it writes the inputs."""
WARM_UP = 2
"""Calls before one is captured, in which kernels are compiled and libraries make their workspaces."""

Results = Mapping[str, Tensor]


class CaptureRefused(Exception):
    """A call can't be captured in a CUDA graph: it waits for the device, or copies from it."""


def placed(place: str, call: Callable[[], Results], inputs: Sequence[Tensor]) -> Results:
    """Make a call in one of the places, or as usual if there is none, and return its tensors.

    Args:
        place: the name of a place, or "".
        call: makes the call.
        inputs: its tensors on the GPU, which have the same numbers in the end. They are written meanwhile.

    Raises CaptureRefused, and what the call raises.
    """
    if place == SIDE:
        return on_side_stream(call, inputs)
    if place == GRAPH:
        return in_graph(call, inputs)
    if place == BESIDE:
        with torch.cuda.device((inputs[0].device.index + 1) % torch.cuda.device_count()):
            return call()
    return call()


def on_side_stream(call: Callable[[], Results], inputs: Sequence[Tensor]) -> Results:
    """Make a call on a side stream that has only just written the inputs, while the default stream is busy.

    What runs on the default stream by mistake reads the inputs when they are there, but its results are late.
    """
    parts = [once(x) for x in inputs]
    numbers = [x.clone() for x in parts]
    for x in parts:
        x.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(SHORT_CYCLES)
            write(parts, numbers)
            return copied(call())
    finally:
        torch.cuda.synchronize()


def in_graph(call: Callable[[], Results], inputs: Sequence[Tensor]) -> Results:
    """Capture a call with other numbers, write the inputs, and return what a replay gives. Raises CaptureRefused."""
    parts = [once(x) for x in inputs]
    numbers = [x.clone() for x in parts]
    write(parts, [other_numbers(x) for x in numbers])
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(WARM_UP):
                call()
            # By PyTorch, so that what a kernel keeps of the numbers of a tensor and its version is out of date.
            write(parts, [other_numbers(other_numbers(x)) for x in numbers])
            torch.cuda.synchronize()
            results = captured(graph, call)
        write(parts, numbers)
        graph.replay()
        torch.cuda.synchronize()
        return copied(results)
    finally:
        write(parts, numbers)
        torch.cuda.synchronize()


def captured(graph: torch.cuda.CUDAGraph, call: Callable[[], Results]) -> Results:
    """Capture a call, and return the tensors that a replay writes. Raises CaptureRefused, after all is as before."""
    pool = torch.cuda.graph_pool_handle()
    try:
        # Other threads may allocate and compile meanwhile; the call itself may not wait for the device.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return call()
    except Exception as e:
        first = e.__context__ or e  # the end of a capture that has failed raises an exception as well
        recover(pool)
        keep(graph)
        raise CaptureRefused(f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0]}") from e


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


def once(x: Tensor) -> Tensor:
    """Return a view of a tensor with each of its elements once, where it is expanded."""
    return x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]


def other_numbers(x: Tensor) -> Tensor:
    """Return other numbers of the same kind; lengths, which are integers, are 1 at most."""
    if x.is_floating_point():
        return (0.375 * x.float().flip(-1)).to(x.dtype)
    return x.clamp(max=1)


def write(parts: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
    """Write numbers into tensors."""
    for x, value in zip(parts, numbers, strict=True):
        x.copy_(value)


def copied(results: Results) -> Results:
    """Return copies, made on the current stream, as whatever a caller launches next."""
    return {name: x.detach().clone() for name, x in results.items()}
