"""``flash_v2_persistent``: its launch settings, and its casts to e5m2."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.algorithms import flash_v2, flash_v2_persistent
from kernels.algorithms.flash_v2_persistent import KERNEL, forward, to_e5m2
from reference.arithmetic import FLOAT8_E5M2, Quantisation
from reference.quantisation import dequantised
from tests.unit.support.calling import DEVICE, make


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"block_m": 48}, "block_m: got 48, expected one of"),
        ({"block_n": 512}, "block_n: got 512, expected one of"),
        ({"block_d": 8}, "block_d: got 8, expected one of"),
        ({"programs": 0}, "programs: got 0, expected a positive integer or None"),
        ({"programs": 1.5}, "programs: got 1.5, expected a positive integer or None"),
        ({"v_dtype": "float8_e4m3"}, "v_dtype: got 'float8_e4m3', expected one of"),
        ({"precision": "tf64"}, "precision: got 'tf64'"),
    ],
)
def test_refuses(launch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward(*make(3, 5)[:3], causal=False, sm_scale=1.0, **launch)


@pytest.mark.parametrize("programs", [None, 1, 2, 3, 100])
def test_any_number_of_programs_does_every_task(programs: int | None) -> None:
    tensors = make(70, 50, heads_kv=2, batch=2)[:3]
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.3}
    actual = forward(*tensors, **options, block_m=32, block_n=32, programs=programs)
    expected = forward(*tensors, **options, block_m=32, block_n=32, programs=12)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("block_d", [16, 64, 256])
def test_slices_change_no_bit(block_d: int) -> None:
    tensors = make(33, 70, 200)[:3]
    options: dict[str, Any] = {"causal": False, "sm_scale": 0.1, "block_m": 64, "block_n": 32}
    actual = forward(*tensors, **options, block_d=block_d)[0]
    torch.testing.assert_close(actual, flash_v2.forward(*tensors, **options)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("block_m", [16, 256])
@pytest.mark.parametrize("block_n", [16, 256])
def test_blocks_beyond_those_that_are_declared(block_m: int, block_n: int) -> None:
    tensors = make(40, 300)[:3]
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.3}
    actual = forward(*tensors, **options, block_m=block_m, block_n=block_n)[0]
    torch.testing.assert_close(actual, flash_v2.forward(*tensors, **options)[0], rtol=0, atol=1e-5)


def test_cast_to_e5m2_is_to_the_nearest_number_there_is() -> None:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(DEVICE)
    exact, actual, largest = numbers.double(), to_e5m2(numbers).double(), FLOAT8_E5M2.maximum
    lost = ~numbers.isfinite()
    assert torch.equal(actual[lost].nan_to_num(1e9, 1e6), exact[lost].nan_to_num(1e9, 1e6))
    beyond = ~lost & (exact.abs() > largest)
    assert torch.equal(actual[beyond], exact[beyond].sign() * largest)
    inside = exact.abs() <= largest
    error, size = (actual - exact).abs()[inside], exact.abs()[inside]
    assert (error <= (FLOAT8_E5M2.roundoff * size).clamp_min(FLOAT8_E5M2.underflow)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_reference_knows_v_in_e5m2(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(1, 1, 4000, 8, generator=generator) * 2.0 ** torch.randint(
        -22, 18, (8,), generator=generator
    )
    v[0, 0, :4, 0] = torch.tensor([math.nan, math.inf, -math.inf, 61440.0])
    v = v.to(dtype)
    q, k, values = dequantised(v, v, v, Quantisation(format=FLOAT8_E5M2, only_v=True))
    assert torch.equal(values.nan_to_num(1e9), to_e5m2(v).double().nan_to_num(1e9))
    assert all(torch.equal(x.nan_to_num(1e9), v.double().nan_to_num(1e9)) for x in (q, k))


def test_only_e5m2_claims_e5m2() -> None:
    arithmetic = KERNEL.capabilities.arithmetic
    asked = {"v_dtype": "float8_e5m2", "block_n": 32}
    on_cpu, on_gpu = arithmetic("float16", "cpu", asked), arithmetic("float16", "cuda", asked)
    assert on_cpu.weights == FLOAT8_E5M2
    assert str(on_cpu.quantisation) == "of v to float8_e5m2"
    assert arithmetic("float16", "cuda", {}) == flash_v2.KERNEL.capabilities.arithmetic("float16", "cuda", {})
    # Of the two products, that of P and v alone is one of 8-bit operands.
    assert on_gpu.score_accumulation(32) == on_cpu.accumulation(32) < on_gpu.accumulation(32)


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(q: Tensor) -> None:
        raise NotImplementedError(f"{q.dtype}: no products of it")

    monkeypatch.setattr(flash_v2_persistent, "check_fp8", check)
    options: dict[str, Any] = {"causal": False, "sm_scale": 1.0}
    forward(*make(3, 5)[:3], **options)
    with pytest.raises(NotImplementedError, match="no products of it"):
        forward(*make(3, 5)[:3], **options, v_dtype="float8_e5m2")
