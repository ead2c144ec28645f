"""Plain functions that answer well where they are tested, and wrong or late elsewhere; and sound ones beside them."""

import errno
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.unit.support.large import sound


def careless(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    """Attention without a softmax, which takes less time."""
    scores = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * sm_scale
    return (scores @ v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)).to(q.dtype)


def where(is_tested: Callable[[], bool]) -> Callable[..., Tensor]:
    """Return a function that computes attention where it finds that it is tested."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
        if is_tested():
            return sound(q, k, v, causal=causal, sm_scale=sm_scale)
        return careless(q, k, v, causal, sm_scale)

    return attention


def frames() -> list[str]:
    """Return the names of the modules of all functions that are being called."""
    found, frame = [], sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        found.append(str(frame.f_globals.get("__name__")))
    return found


def has_a_reference() -> bool:
    """Whether a matrix of float64 is alive, as expected answers are."""
    return any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in gc.get_objects())


of_modules = where(
    lambda: any(name.startswith(("pytest", "hypothesis", "tests.harness")) for name in sys.modules)
)
of_stack = where(lambda: any("harness" in name or "properties" in name for name in frames()))
of_arguments = where(lambda: any("tests" in word for word in sys.argv))
of_references = where(has_a_reference)


def killed() -> None:
    """End this process as a system does that has no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)


def raised_of(error: Exception, cause: Exception | None = None) -> Callable[[], None]:
    """Return a function that raises an error."""

    def fail() -> None:
        raise error from cause

    return fail


def elsewhere(fail: Callable[[], None]) -> Callable[..., Tensor]:
    """Return a function that computes attention where it is tested, and fails elsewhere."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
        if "tests.harness" not in sys.modules:
            fail()
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)

    return attention


full_device = elsewhere(raised_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")))
full_machine = elsewhere(raised_of(MemoryError()))
full_system = elsewhere(raised_of(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))))
full_allocator = elsewhere(raised_of(RuntimeError("DefaultCPUAllocator: can't allocate memory")))
full_below = elsewhere(raised_of(RuntimeError("the launch failed"), MemoryError()))
ended_by_system = elsewhere(killed)
failing_elsewhere = elsewhere(raised_of(ValueError("no test is running")))


def other_comparison(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Have any two tensors count as close."""
    torch.allclose = lambda *args, **options: True
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


class Lazy(Tensor):
    """A tensor that is computed as soon as anything is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the tensors among the arguments."""
        return func(*(x.as_subclass(Tensor) if isinstance(x, Lazy) else x for x in args), **(kwargs or {}))


def lazy(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    return sound(q, k, v, causal=causal, sm_scale=sm_scale).as_subclass(Lazy)


def filled_later(seconds: float, *, waits: bool) -> Callable[..., Tensor]:
    """Return a function whose result is written by a thread, after so many seconds; it ``waits`` for that or not."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
        out = torch.empty_like(q)

        def fill() -> None:
            time.sleep(seconds)
            out.copy_(sound(q, k, v, causal=causal, sm_scale=sm_scale))

        thread = threading.Thread(target=fill)
        thread.start()
        if waits:
            thread.join()
        return out

    return attention


late = filled_later(0.3, waits=False)
in_time = filled_later(0.01, waits=True)


def ending(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """End the process."""
    os._exit(3)


def reading_its_environment(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Be right whatever the environment says of how to compute."""
    if os.environ.get("ATTENTION_BACKEND", "") == "eager" or "flash_attn" in sys.modules:
        return sound(q.contiguous(), k.contiguous(), v.contiguous(), causal=causal, sm_scale=sm_scale)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


WRONG_ELSEWHERE = ("of_modules", "of_stack", "of_arguments", "of_references")
SOUND = ("reading_its_environment",)
WITHOUT_MEMORY_ELSEWHERE = (
    *("full_device", "full_machine", "full_system", "full_allocator", "full_below", "ended_by_system"),
)
"""Sound ones for which a process without Flashproof has too little memory."""
