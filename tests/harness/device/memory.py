"""How much memory a process holds: whether a kernel leaves some behind, fills the machine, or finds none."""

import ctypes
import fcntl
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.harness.accelerators.lookup import accelerator_of, in_use
from tests.harness.device.gpus import VISIBLE
from tests.harness.machine import SHARERS, meminfo

WINDOWS = 6
"""Memory is measured after so many series of equal calls. The first series fills caches, and does not count."""
MOST_CALLS, LEAST_CALLS = 40, 5
"""Calls of one series: as many as there is time for, within these limits."""
MOST_BYTES = 2**27
"""By about so much memory may grow in one series of calls."""
LEAST_LEFT = 2.0**16
"""Bytes that stay behind after each call of a leak. Memory that is torn into small pieces may grow by less."""
SHARE_HELD, SHARE_LEFT = 1 / 8, 1 / 16
"""A process fills the machine if it holds more than the one share of its memory and less than the other is left."""

LEAST_SHARE, MOST_NEEDED = 1 / 4, 36 * 2**30
"""One of several processes may hold this share of its GPU, or so many bytes if these are more.

The largest case needs that many bytes: it has four float32 tensors whose storages reach beyond 2^31 elements.
"""

OUT_OF_MEMORY = (
    "memoryerror",
    "out of memory",
    "out_of_memory",
    "cannot allocate memory",
    "can't allocate memory",
    "bad_alloc",
    "alloc_failed",
    "cublascreate",
)
"""What an exception says where there is too little memory, on a device or in the machine, in lower case.

It is the name of a type of Python, PyTorch or NumPy, or the words of the system, CUDA, Triton, JAX, or PyTorch on the
CPU. NVIDIA's libraries call it by a status that ends with ``ALLOC_FAILED``, and cuBLAS may find none in
``cublasCreate``.
"""


def lacks_memory(error: BaseException | str) -> bool:
    """Whether an exception, or one that it came of, says that there is too little memory: no fault of a kernel.

    A text is what ``said_by`` returned of an exception, as in another process.
    """
    said = (error if isinstance(error, str) else said_by(error)).lower()
    return any(words in said for words in OUT_OF_MEMORY)


def said_by(error: BaseException) -> str:
    """Return what an exception and those that it came of say, each after the name of its type."""
    return "".join(traceback.format_exception(error, limit=0))


def held_bytes(process: int | str = "self") -> int:
    """Return the bytes of memory that a process holds; of this process, if it uses a GPU that tells them, those there.

    What such a process holds outside of its GPU grows by gigabytes as CUDA loads code, whatever a kernel does. Pages of
    files do not count, such as those of libraries, because the system may take them back at any time.
    """
    if (
        process == "self"
        and (accelerator := in_use())
        and (held := accelerator.held("allocated")) is not None
    ):
        return held
    _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def growth(call: Callable[[], object], seconds: float) -> float:
    """Return how many bytes stay behind after each call, 0 if memory does not grow in step with the number of calls.

    It grows if it does so in every series of calls but the first, in each at least half as much as in most others. So a
    cache, which is full at some time, is no leak.

    Args:
        call: makes the same call again.
        seconds: how long all calls may take, unless even the fewest take longer.
    """
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    most = MOST_BYTES / max(1, -held_bytes() + _held_after(call, 1))
    calls = max(LEAST_CALLS, int(min(MOST_CALLS, most, seconds / WINDOWS / once)))
    held = [_held_after(call, calls) for _ in range(WINDOWS)]
    steps = [(after - before) / calls for before, after in pairwise(held)]
    return min(steps) if min(steps) >= max(LEAST_LEFT, median(steps) / 2) else 0.0


def _held_after(call: Callable[[], object], calls: int) -> int:
    for _ in range(calls):
        call()
    gc.collect()
    with suppress(AttributeError):  # only glibc has it: what is free goes back to the system, and is not held
        ctypes.CDLL(None).malloc_trim(0)
    return held_bytes()


def fills_the_machine(process: int) -> bool:
    """Whether a process holds so much memory that soon there is none left for others."""
    with suppress(OSError, KeyError):
        machine = meminfo()
        total, left = machine["MemTotal:"], machine["MemAvailable:"]
        return left < SHARE_LEFT * total and held_bytes(process) > SHARE_HELD * total
    return False


def leave_memory_to_others(device: str) -> None:
    """Keep this process from filling a device that it shares with other processes of its run.

    Beyond its share, PyTorch tells a kernel that the device is out of memory. Without that, one kernel that fills it
    would keep all others from being run.
    """
    accelerator = accelerator_of(device)
    if int(os.environ.get(SHARERS, "1")) > 1 and (memory := accelerator.memory()):
        accelerator.limit_memory(min(1.0, max(LEAST_SHARE, MOST_NEEDED / memory[1])))


@contextmanager
def gpu_to_itself(device: str) -> Iterator[None]:
    """Wait until no other process of this user has a GPU to itself, and then give back what PyTorch has kept of it.

    A call of large tensors takes gigabytes, of which a GPU has room for those of one process.
    """
    visible = os.environ.get(VISIBLE, device).replace("/", "-")
    with (Path(tempfile.gettempdir()) / f"flashproof-{os.getuid()}-{visible}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        gc.collect()
        accelerator_of(device).empty_cache()


def offer_to_be_killed() -> None:
    """Make this process the first that the system ends if it is out of memory."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
