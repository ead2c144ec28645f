"""Calls on a GPU in other places than usual: on a side stream, beside another current device, in a CUDA graph."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from tests.harness.accelerators.interface import Accelerator
from tests.harness.accelerators.lookup import accelerator_of

SIDE, BESIDE, GRAPH = "on a side stream", "beside another current device", "in a CUDA graph"
"""The places of calls."""

BUSY_CYCLES = 2**26
"""Cycles for which the default stream is kept busy: 35 milliseconds, longer than it takes to launch a small call."""
SHORT_CYCLES = 2**23
"""Cycles for which the side stream is kept busy before it writes the inputs."""
WARM_UP = 2
"""Calls before one is captured, in which kernels are compiled and libraries make their workspaces."""

Results = Mapping[str, Tensor]


def places(accelerator: Accelerator) -> tuple[str, ...]:
    """Return the names of the places that there are on a type of accelerator here."""
    there = {
        SIDE: accelerator.has_streams,
        BESIDE: accelerator.device_count() > 1,
        GRAPH: accelerator.has_graphs,
    }
    return tuple(place for place, is_there in there.items() if is_there)


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
        with accelerator_of(inputs[0].device).beside(inputs[0].device.index):
            return call()
    return call()


def on_side_stream(call: Callable[[], Results], inputs: Sequence[Tensor]) -> Results:
    """Make a call on a side stream that has only just written the inputs, while the default stream is busy.

    What runs on the default stream by mistake reads the inputs when they are there, but its results are late.
    """
    accelerator, parts = accelerator_of(inputs[0].device), [once(x) for x in inputs]
    numbers = [x.clone() for x in parts]
    for x in parts:
        x.zero_()
    accelerator.synchronize()
    accelerator.keep_busy(BUSY_CYCLES)
    try:
        with accelerator.side_stream():
            accelerator.keep_busy(SHORT_CYCLES)
            write(parts, numbers)
            return copied(call())
    finally:
        accelerator.synchronize()


def in_graph(call: Callable[[], Results], inputs: Sequence[Tensor]) -> Results:
    """Capture a call with other numbers, write the inputs, and return what a replay gives. Raises CaptureRefused."""
    accelerator, parts = accelerator_of(inputs[0].device), [once(x) for x in inputs]
    numbers = [x.clone() for x in parts]
    write(parts, [other_numbers(x) for x in numbers])
    usual = accelerator.current_stream()
    try:
        with accelerator.side_stream():
            accelerator.current_stream().wait_stream(usual)
            for _ in range(WARM_UP):
                call()
            # By PyTorch, so that what a kernel keeps of the numbers of a tensor and its version is out of date.
            write(parts, [other_numbers(other_numbers(x)) for x in numbers])
            accelerator.synchronize()
            replay, results = accelerator.captured(call)
        write(parts, numbers)
        replay()
        accelerator.synchronize()
        return copied(results)
    finally:
        write(parts, numbers)
        accelerator.synchronize()


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
