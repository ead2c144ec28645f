"""Each way of calling does what it says, and leaves the inputs as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor

from strategies.ways import WAYS
from tests.harness.trial.ways import (
    by_autograd,
    checkpointed,
    in_its_way,
    negative,
    on_another_thread,
    other_numbers,
    over_two,
)
from tests.unit.support.called import eager

GRADIENTS = ("dq", "dk", "dv")


SCALE = {"sm_scale": 0.3}


def problem() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(2, 2, rows, 8, generator=chance) for name, rows in (("q", 5), ("k", 7), ("v", 7))
    }


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return eager(q, k, v, causal=True, sm_scale=0.3)


@pytest.mark.parametrize("way", ["none", *WAYS])
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # which takes no float32
def test_every_way_has_the_results_of_a_plain_call(way: str) -> None:
    given, dout = problem(), torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(4))
    wanted = GRADIENTS if way == "none" or WAYS[way].has_gradients else ()
    before = {name: x.clone() for name, x in given.items()}
    plain = by_autograd("none", attention, given, dout, None, GRADIENTS)
    found = by_autograd(way, attention, {**given, **SCALE}, dout, None, wanted)
    assert found.keys() == {"out", "lse", *wanted}
    for name, x in found.items():
        other = plain[name]
        assert x is not None
        assert other is not None
        assert not x.requires_grad
        assert torch.allclose(x, other, rtol=1e-2 if way == "autocast" else 1e-4, atol=1e-5)
    assert all(torch.equal(x, before[name]) and not x.requires_grad for name, x in given.items())


def test_forwards_are_counted_by_way() -> None:
    calls, scales = list[tuple[bool, ...]](), list[float]()

    def counted(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(tuple(x.requires_grad for x in tensors))
        scales.append(options["sm_scale"])
        return attention(*tensors)

    for way, number in (
        ("none", 1),
        ("two_forwards", 2),
        ("other_scale", 2),
        ("checkpoint", 2),
        ("second_backward", 1),
        ("no_grad", 1),
    ):
        calls.clear()
        scales.clear()
        wanted = ("dk",) if WAYS.get(way, WAYS["k_alone"]).has_gradients else ()
        by_autograd(way, counted, {**problem(), **SCALE}, torch.ones(2, 2, 5, 8), None, wanted)
        assert len(calls) == number
        assert scales == [0.3, 0.15 if way == "other_scale" else 0.3][:number]
        assert calls[0] == ((False, True, False) if wanted else (True, True, True))


def test_gradients_that_autograd_lacks_are_none_and_without_a_graph_there_are_none() -> None:
    given, dout = problem(), torch.ones(2, 2, 5, 8)

    def of_v(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        return v[:, :, :5] * 2.0, None

    found = by_autograd("none", of_v, given, dout, None, GRADIENTS)
    assert (found["dq"], found["dk"], found["lse"]) == (None, None, None)
    assert found["dv"] is not None
    assert by_autograd("k_alone", of_v, given, dout, None, ("dk",)).keys() == {"out", "lse"}
    assert by_autograd("none", attention, given, torch.ones(1), None, GRADIENTS).keys() == {"out", "lse"}


def test_a_gradient_of_lse_is_added() -> None:
    given, dout, dlse = problem(), torch.zeros(2, 2, 5, 8), torch.ones(2, 2, 5)
    found = by_autograd("through_lse", attention, given, dout, dlse, GRADIENTS)
    q = given["q"].requires_grad_()
    (expected,) = torch.autograd.grad(attention(q, given["k"], given["v"])[1].sum(), q)
    assert found["dq"] is not None
    assert torch.allclose(found["dq"], expected)


def test_other_numbers_keep_strides_of_zero() -> None:
    x = torch.randn(1, 1, 3, 4).expand(2, 2, 3, 4).requires_grad_()
    assert negative(x).stride() == x.stride()
    assert negative(x).requires_grad
    assert torch.equal(negative(x), -x)
    others = other_numbers({"q": x, "k": x, "v": x, "causal": True})
    assert others["k"] is x
    assert torch.equal(others["v"], -x)


def test_two_are_mapped_at_once_and_the_second_is_returned() -> None:
    given = problem()
    out, lse = over_two(attention, **given)
    expected = attention(**given)
    assert torch.allclose(out, expected[0], atol=1e-6)
    assert lse is not None
    assert torch.allclose(lse, expected[1], atol=1e-6)


def test_a_checkpoint_saves_nothing_of_the_forward() -> None:
    x, saved = torch.randn(3, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y), lambda y: y):
        out, _ = checkpointed(lambda y: (y.exp() * y, None), x)
    assert saved == []
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(dx, (x.exp() * (x + 1)).detach())


def test_errors_on_another_thread_are_raised_on_this_one() -> None:
    with pytest.raises(ZeroDivisionError):
        on_another_thread(lambda: 1 / 0, torch.device("cpu"))


def test_modes_of_a_kernel_with_its_own_backward() -> None:
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    assert in_its_way("autocast", lambda: torch.is_autocast_enabled("cpu"), x)
    assert not in_its_way("none", lambda: torch.is_autocast_enabled("cpu"), x)
    assert in_its_way("another_thread", torch.is_grad_enabled, x)
