"""Poisoned memory shows what is left unwritten, and what is written beside an allocation."""

import ctypes
import os
import signal

import pytest
import torch

from tests.harness.device.poison import PoisonedAllocations, after_fence, behind_fence


def fence_of(x: torch.Tensor, *, is_before: bool) -> int:
    """Return the address beside a tensor that may not be touched."""
    return x.data_ptr() - 1 if is_before else x.data_ptr() + x.nbytes


def signal_of_reading(address: int) -> int:
    """Return the signal that ends a copy of this process if it reads an address, else 0."""
    if not (pid := os.fork()):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 1)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("is_before", [False, True])
def test_a_fence_is_behind_memory_or_before_it(is_before: bool) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    copy = (after_fence if is_before else behind_fence)(x.mT)
    assert torch.equal(copy, x.mT)
    with PoisonedAllocations(float("nan"), fenced=True, is_before=is_before):
        fresh = torch.empty(5, dtype=torch.float16)
    assert fresh.isnan().all()
    for tensor in (copy, fresh):
        assert signal_of_reading(fence_of(tensor, is_before=is_before)) == signal.SIGSEGV
        assert signal_of_reading(tensor.data_ptr()) == 0
