"""The functions that stand-alone scripts are made of, called as a script calls them."""

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.worker import scripted
from tests.harness.worker.source import written
from tests.unit.support import called
from tests.unit.support.calling import REFERENCE
from tests.unit.support.toys import sound

OPTIONS: dict[str, Any] = {"causal": True, "sm_scale": 0.5}
GRADIENTS = ("dq", "dk", "dv")


def problem() -> tuple[Tensor, ...]:
    """Return q, k, v and dout (1, 2, 5, 16), float32."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 5, 16, generator=generator) for _ in range(4))


def test_gradients_are_those_of_autograd_or_of_the_kernel() -> None:
    by_kernel = scripted.by_kernel(REFERENCE, *problem(), gradients=GRADIENTS, **OPTIONS)
    through_autograd = scripted.through_autograd(sound, *problem(), gradients=GRADIENTS, **OPTIONS)
    assert by_kernel.keys() == through_autograd.keys() == {*"qkv", "dout", "out", "lse", "dq", "dk", "dv"}
    for name, x in by_kernel.items():
        torch.testing.assert_close(x.float(), through_autograd[name])
    assert "dq" not in scripted.through_autograd(sound, *problem(), gradients=(), **OPTIONS)


def filling(q, k, v, **options):
    """Return whatever is in fresh memory."""
    return torch.empty_like(q), None


def overflowing(q, k, v, **options):
    """Write one element past the end."""
    out = torch.empty_like(q)
    ctypes.memset(out.data_ptr() + out.nbytes, 0, 4)
    return out, None


@pytest.mark.parametrize("fenced", [False, True])
def test_a_poisoned_call_finds_the_value_in_fresh_memory(fenced: bool) -> None:
    call = scripted.through_autograd
    found = scripted.poisoned(7.0, call, filling, *problem(), gradients=(), fenced=fenced)
    assert (found["out"] == 7.0).all()


def test_a_poisoned_call_that_writes_elsewhere_ends_the_script() -> None:
    with pytest.raises(SystemExit, match="outside of what was allocated"):
        scripted.poisoned(7.0, scripted.through_autograd, overflowing, *problem(), gradients=())


def test_results_must_fit() -> None:
    result = scripted.through_autograd(sound, *problem(), gradients=GRADIENTS, **OPTIONS)
    scripted.must_fit(result)
    for name, wrong in (
        ("out", result["out"].mT),
        ("lse", result["lse"].double()),
        ("dk", result["dk"][:, :1]),
    ):
        with pytest.raises(SystemExit, match="expected "):
            scripted.must_fit({**result, name: wrong})


def test_a_call_must_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    scripted.must_be_refused(int, "many")
    assert capsys.readouterr().out.startswith("refused: ValueError: ")
    with pytest.raises(SystemExit, match="accepted, but should be refused"):
        scripted.must_be_refused(int, "1")


def test_inputs_must_be_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "watched", [])
    x = scripted.window(torch.float16, (2, 3), (4, 1), 1, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    before = [y.clone() for y in scripted.watched]
    scripted.must_be_unchanged(before)
    x.as_strided((1,), (1,), 4).fill_(0.0)  # between two rows
    with pytest.raises(SystemExit, match="was written to"):
        scripted.must_be_unchanged(before)


@pytest.mark.parametrize(("expected", "status"), [(2.0, 0), (3.0, 1), (torch.tensor([0.0, 2.05]), 0)])
def test_a_comparison_ends_the_script(expected: float | Tensor, status: int) -> None:
    with pytest.raises(SystemExit) as ended:
        scripted.compare("out", (1,), torch.tensor([0.0, 2.0]), expected, allowed=0.1, largest=math.inf)
    assert ended.value.code == status


@pytest.mark.parametrize(("actual", "right"), [(-math.inf, True), (0.0, False), (math.nan, False)])
def test_a_script_knows_an_lse_of_minus_infinity(actual: float, right: bool) -> None:
    assert scripted.is_right(actual, -math.inf, 0.0, math.inf) == right


@pytest.mark.parametrize(
    ("actual", "expected", "right"),
    [
        (1.05, 1.0, True),
        (1.2, 1.0, False),
        (math.nan, 1.0, False),
        (math.nan, math.nan, True),
        (math.inf, math.nan, True),
        (1.0, math.nan, False),
        (math.inf, 99.95, True),
        (99.0, math.inf, False),
        (-math.inf, 99.95, False),
        (math.nan, 99.95, False),
    ],
)
def test_a_script_knows_what_may_have_been_rounded_to_infinity(
    actual: float, expected: float, right: bool
) -> None:
    assert scripted.is_right(actual, expected, allowed=0.1, largest=100.0) == right


@pytest.mark.parametrize(
    ("values", "written_as"),
    [
        ([1.0, -0.0, math.inf], "[1.0, -0.0, inf]"),
        ([0.0] * 100, "{}"),
        ([0.0] * 98 + [-0.0, 2.0], "{98: -0.0, 99: 2.0}"),
        ([0.5] * 100, "'eJ"),
    ],
    ids=["few", "zeros", "sparse", "many"],
)
def test_the_numbers_of_a_tensor_come_back(values: list[float], written_as: str) -> None:
    x = torch.tensor(values, dtype=torch.bfloat16)
    line = written(x.reshape(1, 1, -1, 1), None)
    assert f", {written_as}" in line
    made = eval(line, {**vars(scripted), "inf": math.inf})
    assert made.flatten().view(torch.int16).tolist() == x.view(torch.int16).tolist()


def test_a_way_of_calling_is_the_one_of_the_law() -> None:
    """A script makes its calls by the module that the law makes them by."""
    q, k, v, dout = problem()
    claims = {"gradients": GRADIENTS, **OPTIONS}
    for name, wrong in called.WRONG.items():
        if wrong.way not in ("second_backward", "two_forwards", "checkpoint", "another_thread"):
            continue
        function = getattr(called, name)
        plain, found = (
            scripted.through_autograd(function, q, k, v, dout, **claims, way=way)
            for way in ("none", wrong.way)
        )
        assert not torch.allclose(plain["dq"], found["dq"])
        assert (
            scripted.through_autograd(called.eager, q, k, v, dout, **claims, way=wrong.way)["dq"]
            .isfinite()
            .all()
        )


def test_gradients_must_flow_back(capsys: pytest.CaptureFixture[str]) -> None:
    arguments: Any = (scripted.through_autograd, called.asks_q, *problem())
    scripted.must_flow_back(*arguments, gradients=GRADIENTS, **OPTIONS)
    assert capsys.readouterr().out == "right\n"
    with pytest.raises(SystemExit, match="lost: dk"):
        scripted.must_flow_back(*arguments, gradients=("dk",), way="k_alone", **OPTIONS)


def test_other_numbers_are_written_into_the_same_tensor() -> None:
    x = torch.zeros(1, 1, 2, 3).expand(2, 1, 2, 3)
    version = x._version
    assert scripted.holding(x, torch.ones(1, 1, 2, 3)) is x
    assert bool((x == 1).all())
    assert x._version > version


def test_a_call_that_a_kernel_need_not_answer_may_raise() -> None:
    def raises(*args: Any, **options: Any) -> None:
        raise ValueError("shapes do not fit")

    assert scripted.attempted(scripted.by_kernel, raises, *problem(), gradients=()) == {}
