"""What a kernel raises: a finding, or a reason for which the case can't be run here."""

from typing import Any

import pytest
from torch import Tensor

from kernels.contract import AttentionKernel
from strategies.case import Case
from tests.harness.trial import CannotRun, LawBroken, Trial
from tests.unit.sound import CLAIMS

BLAS = "at::cuda::blas::bgemm<float> argument ldb must be positive and less than 2147483647 but got {}"


def trial_of(message: str) -> Trial:
    """Return a trial of a kernel that raises a RuntimeError with this message."""

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise RuntimeError(message)

    return Trial(AttentionKernel(name="raising", forward=forward, capabilities=CLAIMS), Case(), "cpu", 4.0)


@pytest.mark.parametrize(
    "message", ["CUDA out of memory. Tried to allocate 8.00 GiB", BLAS.format(2147483712)]
)
def test_what_the_machine_has_no_room_or_no_product_for_is_no_finding(message: str) -> None:
    with pytest.raises(CannotRun, match=r"memory|strides"):
        trial_of(message).forward()


@pytest.mark.parametrize("message", ["index out of range", BLAS.format(0), BLAS.format(-2147483712)])
def test_any_other_exception_is_one(message: str) -> None:
    with pytest.raises(LawBroken, match="the kernel raised RuntimeError"):
        trial_of(message).forward()
