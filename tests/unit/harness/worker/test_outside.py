"""Where around its inputs a kernel reads memory: plain functions that read by wrong strides, offsets and lengths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract import AttentionKernel
from kernels.contract.parsing import PLAIN_FUNCTION
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.device.poison import FINITE_POISON
from tests.harness.trial.trial import Trial
from tests.harness.worker.outside import read_outside
from tests.panel.eager import float32

Changed = Callable[[Tensor], Tensor]


def as_it_is(x: Tensor) -> Tensor:
    """Read a tensor as it is."""
    return x


def dense(x: Tensor) -> Tensor:
    """Read a tensor as if it were contiguous."""
    _, heads, length, columns = x.shape
    return x.as_strided(x.shape, (heads * length * columns, length * columns, columns, 1), x.storage_offset())


def from_the_start(x: Tensor) -> Tensor:
    """Read a tensor from two elements before its first."""
    return x.as_strided(x.shape, x.stride(), x.storage_offset() - 2)


def one_row_more(x: Tensor) -> Tensor:
    """Read a tensor from its second row on."""
    return x.as_strided(x.shape, x.stride(), x.storage_offset() + x.stride(2))


def reading(q_as: Changed = as_it_is, k_as: Changed = as_it_is, v_as: Changed = as_it_is) -> AttentionKernel:
    """Return a kernel that reads its inputs so."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
        return float32(q_as(q), k_as(k), v_as(v), causal=causal, sm_scale=sm_scale)

    return AttentionKernel(name="plain", forward=forward, capabilities=PLAIN_FUNCTION)


def read(kernel: AttentionKernel, tensor: str = "out", **fields: Any) -> list[str]:
    case = Case(batch=2, heads_kv=2, seqlen_q=5, seqlen_k=7, head_dim=16, **fields)
    return read_outside(Trial(kernel, case, "cpu", SAFETY, margin=FINITE_POISON), tensor)


@pytest.mark.parametrize("layout", ["contiguous", "bnhd", "gap", "packed", "offset"])
def test_a_sound_kernel_reads_nothing_around_its_inputs(layout: str) -> None:
    layouts = {f"{name}_layout": layout for name in ("q", "k", "v", "dout")}
    assert read(reading(), **layouts) == []
    assert read(reading(), tensor="lse", causal=True, **layouts) == []


def test_each_place_is_named() -> None:
    assert read(reading(q_as=from_the_start)) == ["before q"]
    assert read(reading(k_as=one_row_more)) == ["behind k"]
    assert read(reading(q_as=from_the_start, v_as=one_row_more)) == ["before q", "behind v"]
    assert read(reading(k_as=dense)) == []
    assert "between rows of k" in read(reading(k_as=dense), k_layout="gap")


def test_lse_does_not_follow_from_v() -> None:
    assert read(reading(v_as=one_row_more), tensor="lse") == []


def test_nan_that_comes_of_something_else_tells_nothing() -> None:
    def broken(x: Tensor) -> Tensor:
        return one_row_more(x) * torch.nan

    assert read(reading(k_as=broken)) == []
