"""``kernels.common.hopper``: what its launchers compute."""

import math

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.common.hopper import descriptor, heads_together


def test_heads_are_walked_an_even_number_of_times() -> None:
    assert heads_together(192, 64) == 48  # four times in place of three
    assert heads_together(192, 192) == 96
    assert heads_together(5, 1) == 1
    assert heads_together(1, 8) == 1
    for heads in range(2, 200):
        for most in (1, 2, 7, 64):
            together = heads_together(heads, most)
            assert 1 <= together <= most
            assert math.ceil(heads / together) <= math.ceil(heads / most) + 1


@pytest.mark.parametrize(
    ("dtype", "element"),
    [(torch.float16, gl.float16), (torch.bfloat16, gl.bfloat16), (torch.float8_e4m3fn, gl.float8e4nv)],
)
def test_a_tensor_is_described_as_triton_does(dtype: torch.dtype, element: gl.dtype) -> None:
    x = torch.zeros(2, 5, 3, 48, dtype=dtype).transpose(1, 2)
    for rows, columns, block in ((64, None, [1, 1, 64, 64]), (32, 128, [1, 1, 32, 128])):
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        expected = vars(TensorDescriptor.from_tensor(x, block, layout))
        assert vars(descriptor(x, rows, columns)) == {**expected, "kind": (dtype, rows, block[3])}


def test_numbers_of_rows_are_not_swizzled() -> None:
    tiles = descriptor(torch.zeros(2, 3, 1, 64), 1, 32)
    assert (tiles.block_shape, tiles.layout.swizzle_byte_width) == ([1, 1, 1, 32], 0)
