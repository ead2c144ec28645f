"""8-bit inputs have a scale for each head, and are judged by what they stand for; bounds allow for 8-bit products."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract import FP8_INPUTS, LAYOUTS, Capabilities
from kernels.contract.parsing import ClaimError
from kernels.contract.signature import keywords
from kernels.registry import SpecError, load
from reference.arithmetic import FLOAT8_E4M3, HOPPER_FP8_ROUNDOFF, Arithmetic
from reference.bounds import exact, forward_bounds
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from strategies.eight_bits import EightBits
from tests.harness.law import law_named
from tests.harness.trial.problem import Call
from tests.harness.trial.trial import LawBroken, Trial
from tests.panel import eight_bit_inputs as panel
from tests.unit.support import eight_bit_toys

LAW = law_named("eight_bits")
SIZES: dict[str, Any] = {"batch": 2, "heads_kv": 2, "group": 2, "seqlen_q": 5, "seqlen_k": 70, "head_dim": 24}
CASE = Case(**SIZES, dtype="bfloat16", fp8_inputs="qk")
SMALLEST_NORMAL = 2.0**-6


def trial_of(case: Case, name: str = "dequantised") -> Trial:
    return Trial(load(f"tests.panel.eight_bit_inputs:{name}", panel.DEQUANTISED), case, "cpu", SAFETY)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_in_any_layout_stand_for_numbers_of_bfloat16(layout: str) -> None:
    x = torch.randn(2, 6, 5, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = EightBits.of(x, 2, layout, random.Random(1))
    eight, meant = found.window.tensor, found.meant(torch.bfloat16)
    assert (eight.dtype, found.scale.dtype, found.scale.shape) == (torch.float8_e4m3fn, torch.float32, (2, 2))
    assert len(found.scale.unique()) > 1
    by_head = found.scale.double().repeat_interleave(3, 1)[..., None, None]
    assert torch.equal(meant.double(), eight.double() * by_head)
    if (
        "expanded" not in layout
    ):  # e4m3 has a unit roundoff of 2^-4, and loses small numbers beside large ones
        torch.testing.assert_close(meant, x, rtol=2**-4, atol=0.01)


def test_tensors_without_rows_have_scales() -> None:
    assert EightBits.of(torch.zeros(2, 4, 0, 8), 2, "contiguous", random.Random(1)).scale.isfinite().all()


def call_of(case: Case) -> Call:
    """Return the only call that the law makes on a case."""
    trial = trial_of(case)
    LAW(trial)
    (call,) = trial.calls
    return call


@pytest.mark.parametrize("tensors", FP8_INPUTS)
def test_the_kernel_is_called_with_the_tensors_that_the_case_names(tensors: str) -> None:
    call = call_of(replace(CASE, fp8_inputs=tensors))
    eight = {name for name in "qkv" if getattr(call.problem, name).dtype == torch.float8_e4m3fn}
    assert eight == {*tensors}
    assert {*call.launch} == {f"{name}_scale" for name in tensors}


def test_values_in_keys_have_their_scales() -> None:
    without, inside = (call_of(replace(CASE, v_in_k=True, fp8_inputs=tensors)) for tensors in FP8_INPUTS)
    assert without.problem.k.dtype == torch.bfloat16
    assert without.problem.v_in_k
    assert inside.problem.v_in_k
    assert torch.equal(inside.launch["v_scale"], inside.launch["k_scale"])


def test_cases_of_other_dtypes_are_not_judged() -> None:
    trial = trial_of(replace(CASE, dtype="float32"))
    LAW(trial)
    assert trial.calls == []


@pytest.mark.parametrize(
    ("changed", "tensors", "is_left"),
    [
        ({"q_values": "huge"}, "qk", True),
        ({"v_values": "huge"}, "qk", False),
        ({"v_values": "huge"}, "qkv", True),
        ({}, "none", True),
    ],
)
def test_tensors_that_may_overflow_are_left_as_they_are(
    changed: dict[str, Any], tensors: str, is_left: bool
) -> None:
    call = call_of(replace(CASE, fp8_inputs=tensors, **changed))
    assert (call.problem.q.dtype == torch.bfloat16) is is_left


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("overwriting", "k is never written"),
        ("of_the_dtype_of_q", "out.dtype is torch.float8_e4m3fn, but should be torch.bfloat16"),
    ],
)
def test_what_breaks_the_contract_is_found(name: str, told: str) -> None:
    trial = Trial(load(f"{eight_bit_toys.__file__}:{name}", panel.OF_INPUTS), CASE, "cpu", SAFETY)
    with pytest.raises(LawBroken, match=told):
        LAW(trial)


def bases_of(device: str, *scales: str) -> tuple[Arithmetic, ...]:
    claims = load("tests.panel.eight_bit_inputs:tiled", panel.TILED).capabilities
    return claims.family("bfloat16", device, dict.fromkeys(scales)).bases


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_have_8_bits_only_beside_values_of_8_bits(device: str) -> None:
    usual = bases_of(device)
    assert bases_of(device, "k_scale", "v_scale") == usual  # those of a cache
    of_qk, of_qkv = bases_of(device, "q_scale", "k_scale"), bases_of(device, "q_scale", "k_scale", "v_scale")
    assert all(base.weights.name == "bfloat16" and base.score_accumulation(64) < 0.02 for base in of_qk)
    assert [base.weights for base in of_qkv[len(of_qk) :]] == [FLOAT8_E4M3]
    assert of_qkv[: len(of_qk)] == of_qk
    assert of_qk[0] == usual[0]
    assert len(of_qk) == (1 if device == "cpu" else 2)


@pytest.mark.parametrize("scales", [("q_scale", "k_scale"), ("q_scale", "k_scale", "v_scale")])
def test_scores_of_all_designs_together_are_as_wrong_as_those_of_each(scales: tuple[str, ...]) -> None:
    claims = load("tests.panel.eight_bit_inputs:tiled", panel.TILED).capabilities
    family = claims.family("bfloat16", "cuda", dict.fromkeys(scales))
    worst = max(base.score_accumulation(64) for base in family.bases)
    assert worst == 64 * HOPPER_FP8_ROUNDOFF
    assert family.envelope.score_accumulation(64) == worst


def test_a_declared_arithmetic_is_the_only_design() -> None:
    claims = Capabilities(fp8_inputs=("qkv",))
    family = claims.family("bfloat16", "cuda", dict.fromkeys(("q_scale", "k_scale", "v_scale")))
    assert family.bases == (claims.arithmetic("bfloat16", "cuda", {}),)


def test_sets_of_tensors_that_nobody_passes_are_no_claim() -> None:
    with pytest.raises(
        ClaimError, match="claim fp8_inputs: got 'kv', expected all or none, or some of qk,qkv"
    ):
        load("tests.panel.eight_bit_inputs:tiled", ["fp8_inputs=kv"])


@pytest.mark.parametrize(
    ("claimed", "taken"), [("qk", "q_scale, k_scale"), ("all", "q_scale, k_scale, v_scale")]
)
def test_a_function_that_takes_no_scales_is_refused(claimed: str, taken: str) -> None:
    with pytest.raises(SpecError, match=f"sm_scale, {taken}\\)"):
        load("tests.panel.eager:float32", [f"fp8_inputs={claimed}"])


def test_a_keyword_of_two_claims_is_told_once() -> None:
    both = keywords(Capabilities(ragged=("cache",), fp8_cache=("head",), fp8_inputs=("qk",)))
    assert sorted(both) == sorted({*both})


def of_tensor_cores(x: Tensor, y: Tensor) -> Tensor:
    """Return float64 x @ y^T of 8-bit numbers (M, K) and (N, K), as a Hopper sums them without a sum in float32.

    It adds 32 products to the sum so far, cuts all off 13 bits below the largest of them by the exponents of operands,
    where a subnormal number counts as the smallest normal one, and cuts off the sum.
    """
    total = torch.zeros(len(x), len(y), dtype=torch.float64)
    for at in range(0, x.shape[1], 32):
        a, b = x[:, None, at : at + 32].double(), y[None, :, at : at + 32].double()
        of_a, of_b = (torch.frexp(z.abs().clamp_min(SMALLEST_NORMAL)).exponent - 1 for z in (a, b))
        products = torch.where(a * b == 0, -1000, of_a + of_b).amax(-1)
        unit = torch.exp2((torch.maximum(products, torch.frexp(total).exponent - 1) - 13).double())
        total = ((a * b / unit[..., None]).trunc().sum(-1) + (total / unit).trunc()) * unit
        unit = torch.exp2((torch.frexp(total).exponent - 14).double())
        total = (total / unit).trunc() * unit
    return total


@pytest.mark.parametrize("seed", range(6))
def test_bounds_allow_for_the_sums_of_a_tensor_core_and_for_weights_of_8_bits(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((40, 64), (100, 64), (100, 16))
    x = [torch.randn(1, 1, *size, generator=generator).bfloat16() for size in sizes]
    x[1][:, :, ::3] *= 2.0**-14  # subnormal beside the others
    chance = random.Random(seed)
    q, k, v = (EightBits.of(y, 1, "contiguous", chance) for y in x)
    sm_scale = 2.0 ** random.Random(seed).randint(-2, 0)
    s = of_tensor_cores(q.window.tensor[0, 0], k.window.tensor[0, 0]) * float(q.scale * k.scale) * sm_scale
    p = (s - s.amax(-1, keepdim=True)).exp()
    acc = of_tensor_cores(p.to(torch.float8_e4m3fn), v.window.tensor[0, 0].mT)
    out = (acc * float(v.scale) / p.sum(-1, keepdim=True)).bfloat16().double()
    e = exact(
        *(y.meant(torch.bfloat16) for y in (q, k, v)),
        causal=False,
        sm_scale=sm_scale,
        product_floor=SMALLEST_NORMAL,
        units=torch.stack((q.scale, k.scale)),
    )
    bases = bases_of("cuda", "q_scale", "k_scale", "v_scale")
    rules: tuple[dict[str, Any], ...] = ({}, {"safety": SAFETY})
    for rule in rules:
        narrow, of_scores, wide = (forward_bounds(e, base, **rule) for base in bases)
        of_out, of_lse = (out - e.out[0, 0]).abs(), (s.logsumexp(-1) - e.lse[0, 0]).abs()
        assert (of_out <= wide.out[0, 0]).all()
        assert (of_lse <= of_scores.lse[0, 0]).all()
        assert (of_out > narrow.out[0, 0]).any()
        assert (of_lse > narrow.lse[0, 0]).any()


def test_products_of_a_subnormal_number_hide_bits_of_others() -> None:
    """256 * 2^-9 is 2^-1 but counts as 2^2, and 13 bits below that the other products are cut off."""
    q, k = (
        torch.full((1, 1, 1, 64), 1.25 * SMALLEST_NORMAL),
        torch.full((1, 1, 1, 64), 1.25 * SMALLEST_NORMAL),
    )
    q[..., 0], k[..., 0] = 256.0, 2.0**-9
    scale = 2.0**5
    found = of_tensor_cores(q[0, 0], k[0, 0]) * scale
    units = torch.tensor([scale, 1.0])[:, None, None]
    (base,) = bases_of("cuda", "q_scale", "k_scale")[1:]
    within = []
    for floor in (0.0, base.product_floor):
        e = exact(q * scale, k, k, causal=False, sm_scale=1.0, product_floor=floor, units=units)
        error = (found - e.scores[0, 0]).abs()
        within.append(bool((error <= base.score_accumulation(64) * e.score_size[0, 0]).all()))
    assert within == [False, True]
