"""Keys and values in 8 bits stand for numbers of their dtype exactly, and scales differ between heads and pages."""

import random

import pytest
import torch

from strategies.eight_bits import quantised

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = (1e-7, 1.0, 3e4, torch.finfo(torch.float16).max)


@pytest.mark.parametrize("of_pages", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_in_8_bits_are_exactly_what_they_stand_for(
    dtype: torch.dtype, size: float, of_pages: bool
) -> None:
    x = (torch.rand(3, 2, 5, 8, generator=torch.Generator().manual_seed(1)) * size).to(dtype)
    x[0, 0, 0] = torch.nan
    eight, scale, meant = quantised(x, random.Random(1), of_pages=of_pages)
    assert scale.shape == ((3, 2) if of_pages else (2,))
    assert (eight.dtype, scale.dtype, meant.dtype) == (torch.float8_e4m3fn, torch.float32, dtype)
    by_row = (scale if of_pages else scale[None])[:, :, None, None].double()
    torch.testing.assert_close(eight.double() * by_row, meant.double(), rtol=0, atol=0, equal_nan=True)
    assert meant[1:].isfinite().all()
    assert meant.isnan().sum() == 8


def test_numbers_that_are_large_enough_keep_three_bits() -> None:
    x = torch.rand(2, 3, 50, 16, generator=torch.Generator().manual_seed(2)) + 0.5
    _, _, meant = quantised(x, random.Random(2), of_pages=False)
    torch.testing.assert_close(meant, x, rtol=2**-4, atol=0)


def test_scales_differ_between_heads_of_like_numbers() -> None:
    x = torch.ones(1, 8, 2, 4)
    _, scale, meant = quantised(x, random.Random(3), of_pages=False)
    assert len(scale.unique()) > 1
    assert torch.equal(meant, x)
