"""What a kernel raises: a finding, or a reason for which the case can't be run here."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract import AttentionKernel
from strategies.case import Case
from tests.harness.accelerators.interface import CaptureRefused
from tests.harness.device.sync import device_is_full
from tests.harness.law import law_named
from tests.harness.trial import trial
from tests.harness.trial.trial import CannotRun, LawBroken, Trial
from tests.unit.support.sound import CLAIMS

BLAS = "at::cuda::blas::bgemm<float> argument ldb must be positive and less than 2147483647 but got {}"


def trial_of(message: str) -> Trial:
    """Return a trial of a kernel that raises a RuntimeError with this message."""

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise RuntimeError(message)

    return Trial(AttentionKernel(name="raising", forward=forward, capabilities=CLAIMS), Case(), "cpu", 4.0)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 8.00 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[Errno 12] Cannot allocate memory",
        BLAS.format(2147483712),
    ],
)
def test_what_the_machine_has_no_room_or_no_product_for_is_no_finding(message: str) -> None:
    with pytest.raises(CannotRun, match=r"memory|strides"):
        trial_of(message).forward()


@pytest.mark.parametrize(
    ("device", "left", "is_full"),
    [("cuda:0", 2**20, True), ("cuda:0", 2**30, False), ("cuda:0", None, False), ("cpu", 2**20, False)],
)
def test_a_device_is_full_if_it_answers_that_hardly_any_memory_is_left(
    monkeypatch: pytest.MonkeyPatch, device: str, left: int | None, is_full: bool
) -> None:
    def mem_get_info() -> tuple[int, int]:
        if left is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return left, 2**36

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert device_is_full(device) == is_full


def test_what_a_kernel_raises_on_a_full_device_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "device_is_full", lambda device: True)
    with pytest.raises(CannotRun, match="no memory left"):
        trial_of("no valid execution plan").forward()


@pytest.mark.parametrize("message", ["index out of range", BLAS.format(0), BLAS.format(-2147483712)])
def test_any_other_exception_is_one(message: str) -> None:
    with pytest.raises(LawBroken, match="the kernel raised RuntimeError"):
        trial_of(message).forward()


@pytest.mark.parametrize(
    "cause", [torch.OutOfMemoryError("no room"), RuntimeError("operation not permitted")]
)
def test_a_graph_for_which_there_is_no_memory_is_not_refused(cause: Exception) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise CaptureRefused("no graph") from cause

    kernel = AttentionKernel(name="raising", forward=forward, capabilities=CLAIMS)
    lacks_memory = isinstance(cause, torch.OutOfMemoryError)
    with pytest.raises(CannotRun if lacks_memory else CaptureRefused):
        Trial(kernel, Case(), "cpu", 4.0).forward()


@pytest.mark.parametrize(
    ("message", "raised"),
    [
        ("CUDA error: out of memory", CannotRun),
        ("CUDA error: an illegal memory access was encountered", LawBroken),
    ],
)
def test_a_call_to_refuse_for_which_there_is_no_memory_tells_nothing(
    message: str, raised: type[Exception]
) -> None:
    with pytest.raises(raised):
        law_named("rejection")(trial_of(message))
