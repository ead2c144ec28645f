"""Bounds at the ends of the range. Fuzzing found most of these cases: with smaller bounds, each is a false alarm."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract import flash_arithmetic
from reference.arithmetic import FLOAT16, FLOAT32, TF32_TRUNCATED, Arithmetic
from reference.bounds import backward_bounds, exact, forward_bounds
from reference.bounds.accumulation import SAFETY
from tests.unit.support.emulator import aligned

HALF = Arithmetic(weights=FLOAT16, output=FLOAT16)
ON_A_GPU = flash_arithmetic("float16", "cuda", {})
TF32 = Arithmetic(weights=TF32_TRUNCATED, output=FLOAT32, operand_rounding=2.0**-10)


def heads(*rows: Tensor) -> list[Tensor]:
    """Return (seqlen, head_dim) tensors as (1, 1, seqlen, head_dim)."""
    return [x[None, None] for x in rows]


def test_scores_beyond_any_precision_leave_only_the_hull_of_v() -> None:
    # tf32 rounds these scores by more than they differ: any key may win, and float64's winner means nothing
    g = torch.Generator().manual_seed(0)
    q, k, v = heads(
        torch.randn(4, 8, generator=g), 1e19 * torch.randn(6, 8, generator=g), torch.eye(6, 8) - 0.5
    )
    bound = forward_bounds(exact(q, k, v, causal=False, sm_scale=1.0), TF32).out
    low, high = v.amin(-2, keepdim=True), v.amax(-2, keepdim=True)
    out = exact(q, k, v, causal=False, sm_scale=1.0).out
    assert (bound >= torch.maximum(high - out, out - low)).all()


def test_a_lse_beyond_any_precision_says_nothing_of_gradients() -> None:
    # equal scores of 1e18: float32's lse is off by 1e11, and exp(S - lse) is 0 in float64 and 1 in the kernel
    q, k, v, dout = heads(torch.full((2, 4), 1e18), torch.ones(3, 4), torch.randn(3, 4), torch.ones(2, 4))
    e = exact(q, k, v, causal=False, sm_scale=1.0)
    stored = e.lse.float().double() * (1 + 2.0**-23)
    b = backward_bounds(e, dout.double(), HALF, out=e.out, lse=stored)
    assert b.dq_bound.isposinf().all()
    assert b.dk_bound.isposinf().all()
    assert b.dv_bound.isposinf().all()


def test_weights_that_overflow_by_a_wrong_lse_say_nothing_of_gradients() -> None:
    # the kernel's own lse is 12 too low in the second row, so its weights are too large for float16
    q, k, v, dout = heads(torch.zeros(2, 4), torch.ones(3, 4), torch.randn(3, 4), torch.ones(2, 4))
    e = exact(q, k, v, causal=False, sm_scale=1.0)
    b = backward_bounds(e, dout.double(), HALF, out=e.out, lse=e.lse - torch.tensor([0.0, 13.0]))
    assert b.dq_bound[0, 0].isposinf().all(-1).tolist() == [False, True]
    assert b.dk_bound.isposinf().all()
    assert b.dv_bound.isposinf().all()
    close = backward_bounds(e, dout.double(), HALF, out=e.out, lse=e.lse - 9.0)
    assert all(x.isfinite().all() for x in (close.dq_bound, close.dk_bound, close.dv_bound))


def test_subnormals_lose_more_than_a_roundoff_in_tf32() -> None:
    # 1e-39 keeps its high bits only; times 3e38 the loss shows in dP
    q, k, v, dout = heads(
        torch.zeros(1, 4), torch.ones(1, 4), torch.full((1, 4), 3e38), torch.full((1, 4), 1e-39)
    )
    e = exact(q, k, v, causal=False, sm_scale=0.5, product_floor=TF32.product_floor)
    b = backward_bounds(e, dout.double(), TF32, out=e.out, lse=e.lse)
    truncated = (dout.view(torch.int32) & ~0x1FFF).view(torch.float32).double()
    lost = (truncated - dout.double()).sum() * 3e38 * 0.5  # sm_scale * k is 0.5 in each column
    assert (b.dq_bound >= lost.abs()).all()


def test_a_lattice_of_ds_rounds_one_way() -> None:
    # 256 keys of equal weight 2^-8, values that are multiples of 32: every dS is a multiple of 1/8 plus the same rest
    g = torch.Generator().manual_seed(0)
    values = 32.0 * torch.randint(1024, 2047, (256, 1), generator=g) * torch.randn(256, 1, generator=g).sign()
    q, k, v, dout = heads(torch.zeros(1, 1), torch.ones(256, 1), values, torch.ones(1, 1))
    e = exact(q, k, v, causal=False, sm_scale=1.0)
    out = torch.full_like(e.out, 32.0 * math.floor(float(e.out) / 32.0) + 15.0)  # a rest of 15/256 of 1/8
    centred = (values - float(out)).double() / 256
    error = (centred.half().double() - centred).sum().abs()
    kwargs: dict[str, Any] = {"out": out, "lse": e.lse, "safety": SAFETY}
    unclustered = backward_bounds(e, dout.double(), HALF, clustered=False, **kwargs)
    clustered = backward_bounds(e, dout.double(), HALF, clustered=True, **kwargs)
    final = replace(HALF, output=FLOAT32)  # without the store's own rounding, which would hide it
    assert error > backward_bounds(e, dout.double(), final, clustered=False, **kwargs).dq_bound
    assert (clustered.dq_bound >= unclustered.dq_bound).all()
    assert error <= clustered.dq_bound


def subnormal_and_large() -> tuple[Tensor, Tensor]:
    """Return two float16 rows for one step of a tensor core, in which 15 of 16 products lose nearly half."""
    return torch.full((1, 16), 2.0**-24), torch.tensor([[2.0**15, *[2.0 - 2.0**-10] * 15]])


def test_scores_of_subnormals_lose_what_those_of_normal_numbers_do() -> None:
    rows = subnormal_and_large()
    q, k = heads(*rows)
    error = (30.0 * aligned(*rows) - 30.0 * (q @ k.mT).double()).abs()  # with one key, lse is its score
    bounds = [
        forward_bounds(exact(q, k, k, causal=False, sm_scale=30.0, product_floor=floor), ON_A_GPU).lse
        for floor in (0.0, ON_A_GPU.product_floor)
    ]
    assert 5 * bounds[0] < error <= bounds[1]


def test_dp_of_subnormals_loses_what_that_of_normal_numbers_does() -> None:
    rows = subnormal_and_large()
    dout, v = heads(*rows)
    k = torch.full((1, 1, 1, 16), 1000.0)
    e = exact(torch.zeros_like(k), k, v, causal=False, sm_scale=1.0)
    error = 1000.0 * (aligned(*rows) - (dout @ v.mT).double()).abs()  # delta is the exact dP
    bounds = [
        backward_bounds(e, dout.double(), arithmetic, out=e.out, lse=e.lse).dq_bound.amax()
        for arithmetic in (replace(ON_A_GPU, smallest_operand=0.0), ON_A_GPU)
    ]
    assert 5 * bounds[0] < error <= bounds[1]


@pytest.mark.parametrize(("stored", "finite"), [(None, True), (1, False)])
def test_what_is_stored_on_the_way_may_overflow_there(stored: int | None, finite: bool) -> None:
    """60000 + 60000 - 60000 fits float16, but its running sum does not."""
    q, k = torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 1, 1)
    dout = torch.tensor([6e4, 6e4, -6e4]).view(1, 1, 3, 1)
    e = exact(q, k, k, causal=False, sm_scale=1.0)
    arithmetic = replace(HALF, dk_dv_rows=stored)
    b = backward_bounds(e, dout.double(), arithmetic, forward=forward_bounds(e, arithmetic))
    assert b.dv.item() == 6e4
    assert bool(b.dv_bound.isfinite().all()) == finite
    assert bool(b.dk_bound.isfinite().all())
    assert bool(b.dq_bound.isfinite().all())
