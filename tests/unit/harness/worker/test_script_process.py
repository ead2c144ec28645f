"""A process without Flashproof gets tensors as they lie in memory."""

import pytest
import torch
from torch import Tensor

from strategies.layouts import place
from tests.harness.worker.script_process import sent
from tests.harness.worker.user_script import received


@pytest.mark.parametrize(
    "layout", ["contiguous", "bnhd", "packed", "gap", "offset", "expanded", "expanded_rows"]
)
def test_a_tensor_arrives_with_its_strides_and_its_numbers(layout: str) -> None:
    x = place(torch.randn(2, 3, 5, 16), layout).tensor
    got: Tensor = received(sent(x), "cpu")
    assert got.stride() == x.stride()
    torch.testing.assert_close(got, x, rtol=0, atol=0)


def test_an_empty_tensor_arrives_with_its_shape() -> None:
    assert received(sent(torch.empty(0, 2, 3, 16)), "cpu").shape == (0, 2, 3, 16)
