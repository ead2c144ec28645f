"""``flash_v3`` and ``flash_v3_gluon``: what they refuse, and where they run. The laws judge their numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.algorithms.flash_v3 import gluon as flash_v3_gluon
from kernels.algorithms.flash_v3 import tma as flash_v3
from kernels.registry import unavailable_reason
from tests.unit.support.calling import DEVICE

FORWARDS = [flash_v3.forward, flash_v3_gluon.forward]
LARGEST = {flash_v3.forward: 128, flash_v3_gluon.forward: 256}
"""The largest head_dim of each."""

pytestmark = pytest.mark.parametrize("forward", FORWARDS, ids=["flash_v3", "flash_v3_gluon"])


def tensor(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            tensor(1, 1, 5, 16, dtype=torch.float32),
            "q: got dtype torch.float32, expected float16 or bfloat16",
        ),
        (tensor(1, 1, 5, 20), "q: got head_dim 20, expected a multiple of 8 up to {largest}"),
        (tensor(1, 1, 5, 250), "q: got head_dim 250, expected a multiple of 8 up to {largest}"),
        (tensor(1, 1, 5, 24)[..., 1:17], "q: got strides .* expected multiples of 16 bytes"),
        (tensor(1, 1, 5, 20)[..., :16], "q: got strides .* expected multiples of 16 bytes"),
    ],
    ids=["dtype", "head_dim", "large head_dim", "start", "stride"],
)
def test_refuses_what_the_tma_cannot_copy(
    forward: Callable[..., Any], wrong: torch.Tensor, message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message.format(largest=LARGEST[forward])):
        forward(wrong, wrong, wrong, causal=False, sm_scale=0.3)


def test_refuses_a_head_dim_for_which_there_are_no_tiles(forward: Callable[..., Any]) -> None:
    if LARGEST[forward] == 256:
        pytest.skip("no kernel takes a head_dim above 256, so there is none to refuse")
    for head_dim in (136, 256):
        x = tensor(1, 1, 5, head_dim)
        message = f"q: got head_dim {head_dim}, expected a multiple of 8 up to 128"
        with pytest.raises(NotImplementedError, match=message):
            forward(x, x, x, causal=False, sm_scale=0.3)


def test_refuses_what_does_not_fit_together(forward: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="k: "):
        forward(tensor(1, 1, 5, 16), tensor(1, 1, 5, 32), tensor(1, 1, 5, 32), causal=False, sm_scale=0.3)


def test_refuses_a_setting_that_is_not_declared(forward: Callable[..., Any]) -> None:
    x = tensor(1, 1, 5, 16)
    with pytest.raises((ValueError, TypeError), match="block_m"):
        forward(x, x, x, causal=False, sm_scale=0.3, block_m=100)


def test_the_backward_refuses_what_the_forward_does(forward: Callable[..., Any]) -> None:
    has_settings = forward is flash_v3.forward
    backward = (flash_v3 if has_settings else flash_v3_gluon).KERNEL.backward
    assert backward is not None
    options = {"causal": False, "sm_scale": 0.3}
    x, wide, lse = tensor(1, 1, 5, 16), tensor(1, 1, 5, 20), tensor(1, 1, 5, dtype=torch.float32)
    with pytest.raises(TypeError, match="dropout_p"):
        backward(x, x, x, x, x, lse, dropout_p=0.5, **options)
    error, message = (ValueError, "block_m: got 100") if has_settings else (TypeError, "'block_m'")
    with pytest.raises(error, match=message):
        backward(x, x, x, x, x, lse, block_m=100, **options)
    with pytest.raises(NotImplementedError, match="q: got head_dim 20, expected a multiple of 8"):
        backward(wide, wide, wide, wide, wide, lse, **options)
    with pytest.raises(TypeError, match="k: got list, expected a "):
        backward(x, x, [1.0], x, x, lse, **options)


def test_says_where_it_runs(forward: Callable[..., Any]) -> None:
    if forward is flash_v3.forward:
        assert unavailable_reason("flash_v3", DEVICE) is None
        return
    assert "flash_v3" in (unavailable_reason("flash_v3_gluon", "cpu") or "")
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
    if not hopper:
        x = tensor(1, 1, 5, 16)
        with pytest.raises(NotImplementedError, match="expected one on a Hopper GPU"):
            forward(x, x, x, causal=False, sm_scale=0.3)
    if DEVICE == "cuda":
        assert (unavailable_reason("flash_v3_gluon", "cuda") is None) == hopper


def test_gives_the_shape_of_q_where_there_is_nothing(forward: Callable[..., Any]) -> None:
    if unavailable_reason("flash_v3" if forward is flash_v3.forward else "flash_v3_gluon", DEVICE):
        pytest.skip("does not run here")
    out, lse = forward(
        tensor(2, 2, 5, 16), tensor(2, 1, 0, 16), tensor(2, 1, 0, 16), causal=True, sm_scale=0.3
    )
    assert out.shape == (2, 2, 5, 16)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
