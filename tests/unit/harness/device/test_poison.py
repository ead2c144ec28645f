"""Poisoned memory shows what is left unwritten, and what is written beside an allocation."""

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from strategies.layouts import are_first_columns
from tests.harness.device.poison import NO_NUMBERS, PoisonedAllocations, behind_fence, inputs_copied


def test_what_is_not_written_is_poison() -> None:
    with PoisonedAllocations(float("nan")) as memory:
        assert bool(torch.empty(3, 5).isnan().all())
    assert memory.broken_guards() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_written_is_a_nan_that_other_numbers_do_not_make(dtype: torch.dtype) -> None:
    with PoisonedAllocations(float("nan")) as memory:
        x = torch.empty(3, dtype=dtype)
    (bits,) = memory.unwritten.values()
    as_number = torch.int16 if dtype.itemsize == 2 else torch.int32
    assert x.isnan().all()
    assert memory.unwritten == {x.untyped_storage().data_ptr(): bits}
    assert x.view(as_number).tolist() == [bits] * 3
    others = torch.tensor([float("nan"), -float("nan")], dtype=dtype).view(as_number)
    assert bits not in others.tolist()


def test_what_is_written_behind_the_end_is_seen() -> None:
    with PoisonedAllocations(float("nan")) as memory:
        x = torch.empty(4)
    storage, _, last = memory.guarded[0]
    storage[last] = 0.0
    assert x.shape == (4,)
    assert memory.broken_guards() == 1


@pytest.mark.parametrize("fenced", [False, True])
def test_a_dtype_that_can_not_hold_the_poison_is_filled_with_its_largest_number(fenced: bool) -> None:
    with PoisonedAllocations(1280.0, fenced=fenced) as memory:
        assert torch.empty(2, dtype=torch.float8_e4m3fn).tolist() == [448.0] * 2
        assert torch.empty(2, dtype=torch.float8_e5m2).tolist() == [1280.0] * 2
    assert memory.broken_guards() == 0


@pytest.mark.parametrize("fenced", [False, True])
def test_shapes_without_memory_are_left_alone(fenced: bool) -> None:
    with PoisonedAllocations(float("nan"), fenced=fenced) as memory:
        assert torch.empty(2, 3, device="meta").stride() == (3, 1)
        assert torch.empty(0).numel() == 0
        with FakeTensorMode():  # as Helion traces a kernel
            x = torch.empty(2, 3)
            assert torch.empty_like(x).new_empty(5).shape == (5,)
    assert memory.guarded == []
    assert memory.broken_guards() == 0


def test_what_fills_memory_is_not_compiled_with_a_kernel() -> None:
    def uncompiled(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            # A break in a loop: functions that are called from here may be compiled, but not this one.
            torch._dynamo.graph_break()
            x = x + torch.empty_like(x).copy_(x)
        return x

    frames = []
    for memory in (nullcontext(), PoisonedAllocations(float("nan"))):
        torch._dynamo.reset()
        counters.clear()
        with memory:
            assert torch.compile(uncompiled, backend="eager")(torch.ones(3)).tolist() == [4.0] * 3
        frames.append(dict(counters["frames"]))
    assert frames[0] == frames[1]


def test_copies_of_inputs_share_memory_as_the_inputs_do() -> None:
    q, k, dout = torch.ones(1, 1, 2, 4), torch.rand(1, 1, 3, 4), torch.ones(1, 1, 2, 3)
    for v, shared in ((k[..., :3], True), (k[..., :3].clone(), False)):
        copies = inputs_copied(behind_fence, q, k, v, dout)
        assert all(torch.equal(x, y) for x, y in zip(copies, (q, k, v, dout), strict=True))
        assert are_first_columns(copies[2], copies[1]) == shared


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("dtype", NO_NUMBERS)
def test_integers_that_are_not_written_are_neither_0_nor_a_number_in_another_dtype(
    dtype: torch.dtype, fenced: bool
) -> None:
    with PoisonedAllocations(float("nan"), fenced=fenced) as memory:
        x, zeros = torch.empty(4, dtype=dtype), torch.zeros(4, dtype=dtype)
    assert x.all()
    assert not zeros.any()
    assert dtype == torch.bool or x.view(torch.uint8).tolist() == [255] * 4 * dtype.itemsize
    assert memory.broken_guards() == 0


def test_bytes_that_are_viewed_as_numbers_are_nan() -> None:
    with PoisonedAllocations(float("nan")):
        assert torch.empty(8, dtype=torch.uint8).view(torch.float32).isnan().all()


def test_integers_are_0_where_numbers_are_finite_and_their_guards_are_watched() -> None:
    with PoisonedAllocations(1280.0) as memory:
        assert torch.empty(3, dtype=torch.int32).tolist() == [0, 0, 0]
    storage, _, last = memory.guarded[0]
    storage[last] = 1
    assert memory.broken_guards() == 1
