"""``flash_v2_atomic``: what its backward refuses, and what it does not claim. The laws judge its numbers."""

from typing import Any

import pytest
import torch

from kernels.algorithms.flash_v2_atomic import KERNEL, backward
from reference.arithmetic import TF32_TRUNCATED
from tests.unit.support.calling import DEVICE, make

Q, K, V, DOUT = make(5, 5, heads_kv=2, group=2)
OUT, LSE = torch.zeros_like(Q), torch.zeros(Q.shape[:3], device=DEVICE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": Q[:, :3]}, ValueError, "q: got 3 heads, expected a multiple of k's 2"),
        ({"v": V[:, :, :4]}, ValueError, r"v: got shape \(1, 2, 4, 16\)"),
        ({"dout": DOUT[:, :2]}, ValueError, "dout: got shape"),
        ({"lse": LSE.half()}, ValueError, "lse: got dtype"),
        ({"causal": 1}, TypeError, "causal: got 1"),
        ({"block_m": 48}, ValueError, "block_m: got 48, expected one of"),
    ],
)
def test_backward_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE, **change}
    with pytest.raises(error, match=message):
        backward(**{"causal": False, "sm_scale": 1.0, **arguments})


def test_bits_of_dq_alone_are_not_claimed() -> None:
    assert set(KERNEL.capabilities.deterministic) == {"out", "lse", "dk", "dv"}


def test_atomic_adds_come_on_top_of_what_flash_v2_rounds() -> None:
    arithmetic = KERNEL.capabilities.arithmetic("float32", "cuda", {"precision": "tf32"})
    assert (arithmetic.dq_atomic, arithmetic.weights) == (True, TF32_TRUNCATED)


def test_neither_pass_takes_dropout() -> None:
    asked: dict[str, Any] = {"causal": False, "sm_scale": 1.0, "dropout_p": 0.5}
    with pytest.raises(TypeError, match="dropout_p"):
        KERNEL.forward(Q, K, V, **asked)
    with pytest.raises(TypeError, match="dropout_p"):
        backward(DOUT, Q, K, V, OUT, LSE, **asked)
