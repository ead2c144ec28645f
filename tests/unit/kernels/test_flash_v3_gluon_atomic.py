"""``flash_v3_gluon_atomic``: what it refuses, and what it does not claim. The laws judge its numbers."""

from typing import Any

import pytest
import torch

from kernels.algorithms.flash_v3.gluon_atomic import KERNEL, backward, forward
from kernels.registry import unavailable_reason
from tests.unit.support.calling import DEVICE, make

OPTIONS: dict[str, Any] = {"causal": False, "sm_scale": 1.0}


def test_both_passes_refuse_a_head_dim_for_which_registers_are_too_few() -> None:
    q, k, v, dout = make(head_dim=72, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="q: got head_dim 72, expected a multiple of 8 up to 64"):
        forward(q, k, v, **OPTIONS)
    with pytest.raises(NotImplementedError, match="q: got head_dim 72, expected a multiple of 8 up to 64"):
        backward(dout, q, k, v, q, torch.zeros(q.shape[:3], device=DEVICE), **OPTIONS)


def test_bits_of_dq_alone_are_not_claimed() -> None:
    assert set(KERNEL.capabilities.deterministic) == {"out", "lse", "dk", "dv"}
    assert KERNEL.capabilities.arithmetic("float16", "cuda", {}).dq_atomic


def test_says_where_it_runs() -> None:
    assert "its plain twin, flash_v2_atomic, does" in (unavailable_reason(KERNEL.name, "cpu") or "")
    if unavailable_reason(KERNEL.name, DEVICE):
        q, k, v, _ = make(dtype=torch.float16)
        with pytest.raises(NotImplementedError, match="expected one on a Hopper GPU"):
            forward(q, k, v, **OPTIONS)


@pytest.mark.skipif(
    unavailable_reason(KERNEL.name, DEVICE) is not None, reason="the kernel needs a Hopper GPU"
)
def test_keys_behind_the_last_one_leave_dq_as_it_is() -> None:
    """For the one key, dP - delta is 0; for those behind it, it would be -delta, which float16 does not hold."""
    q, k, v, dout = (torch.zeros(1, 1, 1, 8, dtype=torch.float16, device=DEVICE) for _ in range(4))
    v[..., :2], dout[..., :2] = 1.0, torch.tensor([65504.0, 16.0])
    out, lse = forward(q, k, v, **OPTIONS)
    dq, _, _ = backward(dout, q, k, v, out, lse, **OPTIONS)
    assert (dq == 0).all()
