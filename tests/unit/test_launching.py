"""The launcher of kernels: what it keeps of one launch must not reach into the next."""

import pytest
import torch
import triton.language as tl

from kernels.launching import is_aligned, launch
from kernels.tiles import kernel
from tests.unit.calling import DEVICE


@kernel
def _store_sum(out, x, y, TWICE: tl.constexpr):
    total = x + y
    if TWICE:
        total *= 2
    tl.store(out, total)


def test_each_launch_fits_its_arguments_whatever_was_launched_before() -> None:
    """Each launch differs from the one before in the width or type of a number, in a dtype, or in a constant."""
    calls = [
        (torch.int64, 1, 2, False, 3),
        (torch.int64, 2**31, 2**40, False, 2**31 + 2**40),
        (torch.float32, 1, 2, False, 3.0),
        (torch.float32, 0.5, 2, False, 2.5),
        (torch.float32, 0.5, 2, True, 5.0),
        (torch.float64, 0.5, 2, True, 5.0),
    ]
    for dtype, x, y, twice, expected in [*calls, *reversed(calls)]:
        out = torch.zeros(1, dtype=dtype, device=DEVICE)
        launch(_store_sum, 1, out, x, y, TWICE=twice)
        assert out.item() == expected, (dtype, x, y, twice)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "expected"),
    [
        ((2, 3, 4, 8), torch.float16, 0, True),
        ((2, 3, 4, 8), torch.float16, 4, False),
        ((2, 3, 4, 4), torch.float16, 0, False),
        ((2, 3, 4, 4), torch.float32, 0, True),
        ((0, 3, 4, 8), torch.bfloat16, 0, True),
    ],
)
def test_rows_are_aligned_if_they_start_at_16_bytes_and_are_as_wide(
    shape: tuple[int, ...], dtype: torch.dtype, offset: int, expected: bool
) -> None:
    x = torch.empty(1024, dtype=dtype)[offset:].as_strided(shape, torch.empty(shape).stride())
    assert is_aligned(x) is expected
    assert is_aligned(torch.empty(1, 1, 1, 16), x) is expected
