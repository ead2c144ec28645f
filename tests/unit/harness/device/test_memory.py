"""How much memory a process holds: what a leak is and what a cache is, and who fills the machine."""

import os
from collections import deque
from collections.abc import Callable

import pytest
import torch

from tests.harness.device import memory
from tests.harness.device.memory import fills_the_machine, growth, held_bytes, lacks_memory, said_by
from tests.unit.support.calling import DEVICE

SIZE = 2**20


def keeping(most: int | None) -> Callable[[], None]:
    """Return a function that keeps a megabyte of each call, but of no more than the last ``most``."""
    kept: deque[torch.Tensor] = deque(maxlen=most)
    return lambda: kept.append(torch.ones(SIZE, dtype=torch.uint8, device=DEVICE))


def test_what_every_call_leaves_behind_is_measured() -> None:
    assert growth(keeping(None), 1.0) == pytest.approx(SIZE, rel=0.1)


@pytest.mark.parametrize("most", [0, 1, 30, 100])
def test_a_cache_that_is_full_at_some_time_is_no_leak(most: int) -> None:
    assert growth(keeping(most), 1.0) == 0.0


def test_a_call_that_needs_memory_once_hides_no_leak() -> None:
    keep, calls, once = keeping(None), iter(range(10**6)), list[torch.Tensor]()

    def call() -> None:
        keep()
        if next(calls) == 3 * memory.MOST_CALLS:
            once.append(torch.ones(100 * SIZE, dtype=torch.uint8, device=DEVICE))

    assert growth(call, 1.0) == pytest.approx(SIZE, rel=0.1)


def test_only_a_process_that_holds_much_fills_a_machine_with_little_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not fills_the_machine(os.getpid())
    monkeypatch.setattr(memory, "SHARE_LEFT", 1.0)
    assert not fills_the_machine(os.getpid())
    monkeypatch.setattr(memory, "SHARE_HELD", 0.0)
    assert fills_the_machine(os.getpid())
    assert held_bytes(os.getpid()) > SIZE


def test_of_a_process_on_a_gpu_only_the_memory_of_the_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    statistics = {"allocated_bytes": {"all": {"current": SIZE}}}
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda: statistics)
    assert held_bytes() == SIZE
    assert held_bytes(os.getpid()) > SIZE


def of(cause: Exception) -> Exception:
    """Return an exception that another one caused."""
    error = RuntimeError("the launch failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("no room"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes"),
        of(torch.OutOfMemoryError("no room")),
        of(of(MemoryError())),
    ],
)
def test_too_little_memory_is_seen_by_types_words_and_causes(error: Exception) -> None:
    assert lacks_memory(error)
    assert lacks_memory(said_by(error))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OSError(2, "No such file or directory"),
        of(ValueError("the workspace is too small")),
    ],
)
def test_other_errors_lack_no_memory(error: Exception) -> None:
    assert not lacks_memory(error)
