"""Correct kernels stay within the bounds, whatever order and arithmetic they choose; wrong ones don't."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import safe_softmax
from reference.arithmetic import (
    EX2_APPROX_ERROR,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FORMATS,
    FP32_ROUNDOFF,
    HOPPER_FP8_ROUNDOFF,
    HOPPER_FP8_TERMS,
    Arithmetic,
    Format,
)
from reference.bounds import backward_bounds, exact, forward_bounds
from reference.bounds.accumulation import SAFETY
from reference.heads import fold, unfold
from reference.mask_pattern import MaskPattern
from reference.score_rule import ScoreRule
from strategies.padding import FAMILIES as PADDINGS
from tests.harness.trial.compare import error_over_bound
from tests.unit.support.emulator import BUGS, Emulator, cast
from tests.unit.support.problems import (
    ARITHMETIC,
    FAMILIES,
    RULE_1,
    RULE_2,
    UNCLUSTERED,
    Inputs,
    Run,
    assert_within,
    assert_within_both_rules,
    expected,
    normal,
    problem,
    ratios,
    run,
    run_normal,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "l_from_rounded_p": {"l_from_rounded_p": True},
    "k_prescaled": {"k_prescaled": True},
    "normalised_first": {"normalised_first": True},
    "lazy rescaling": {"largest_weight": 256},
    "partial_results": {"partial_results": True},
    "ds_from_rounded_p": {"ds_from_rounded_p": True},
    "ds_scaled": {"ds_scaled": True},
    "dk_dv_per_head": {"dk_dv_per_head": True},
    "rounded_group_sums": {"rounded_group_sums": True},
    "qk_prescaled": {"qk_prescaled": True},
    "stored sums": {"dk_dv_rows": 32, "dq_keys": 48},
    "everything": {
        "l_from_rounded_p": True,
        "k_prescaled": True,
        "dk_dv_per_head": True,
        "dk_dv_rows": 16,
        "dq_keys": 16,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_correct_kernels_stay_within_both_rules(arithmetic: str, family: str) -> None:
    for seed in range(3):
        assert_within_both_rules(problem(arithmetic, family, seed))


@pytest.mark.parametrize("family", ["normal", "duplicated_keys", "small", "large_logits"])
@pytest.mark.parametrize("arithmetic", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_declared_variants_stay_within_both_rules(variant: str, arithmetic: str, family: str) -> None:
    assert_within_both_rules(problem(arithmetic, family, 10, VARIANTS[variant]))


_FP8_SUMS: dict[str, Any] = {"output": FLOAT32, "accumulate": HOPPER_FP8_ROUNDOFF}
FP8_ARITHMETIC: dict[str, tuple[Format, Arithmetic, dict[str, Any]]] = {
    "all in e4m3": (
        FLOAT8_E4M3,
        Arithmetic(weights=FLOAT8_E4M3.scaled(256.0), accumulate_terms=HOPPER_FP8_TERMS, **_FP8_SUMS),
        {},
    ),
    "all in e4m3, each product in one chain": (
        FLOAT8_E4M3,
        Arithmetic(
            weights=FLOAT8_E4M3.scaled(256.0),
            accumulate_terms=4 * HOPPER_FP8_TERMS,
            score_accumulate=HOPPER_FP8_ROUNDOFF,
            exp_error=EX2_APPROX_ERROR + 8 * math.log(2) * FP32_ROUNDOFF,
            **_FP8_SUMS,
        ),
        {"raised": 8.0, "fused": True, "base_2": True},
    ),
    "P and v in e5m2": (
        FLOAT16,
        Arithmetic(
            weights=FLOAT8_E5M2,
            accumulate_terms=2 * HOPPER_FP8_TERMS,
            score_accumulate=FP32_ROUNDOFF,
            **_FP8_SUMS,
        ),
        {},
    ),
}
"""The format of q and k, the arithmetic, and further settings of the emulator."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arithmetic", FP8_ARITHMETIC)
def test_products_of_8_bit_operands_stay_within_both_rules(arithmetic: str, family: str) -> None:
    """Only a forward is run, and its operands are 8-bit numbers from the start."""
    of_q, a, settings = FP8_ARITHMETIC[arithmetic]
    of_v = FORMATS[a.weights.name.split()[-1]]
    choose = random.Random(f"{arithmetic} {family}")
    generator = torch.Generator().manual_seed(choose.randrange(2**31))

    def to(form: Format, x: Tensor) -> Tensor:
        return cast(x.clamp(-form.maximum, form.maximum), form)

    for _ in range(3):
        x = FAMILIES[family](
            normal(generator, 1, 1, 2, choose.randint(1, 40), choose.randint(1, 160), choose.choice([16, 64]))
        )
        q, k, v = to(of_q, x.q), to(of_q, x.k), to(of_v, x.v)
        options: dict[str, Any] = {"causal": choose.random() < 0.5, "sm_scale": q.shape[3] ** -0.5}
        tile = choose.choice([32, 64, 128])
        kernel = Emulator(arithmetic=a, tile_k=tile, generator=generator, **options, **settings)
        out, lse = kernel.forward(q, k, v)
        e = exact(q, k, v, **options)
        for rule in (RULE_1, RULE_2):
            b = forward_bounds(e, a, **rule)
            assert error_over_bound(fold(out, 1), e.out, b.out, FLOAT32.maximum).max() <= 1, rule
            assert error_over_bound(fold(lse, 1), e.lse, b.lse, math.inf).max() <= 1, rule


@pytest.mark.parametrize("terms", [1, 2, 31, 32, 33, 64, 65, 150])
@pytest.mark.parametrize("arithmetic", FP8_ARITHMETIC)
def test_sums_of_8_bit_products_err_as_declared(arithmetic: str, terms: int) -> None:
    a = FP8_ARITHMETIC[arithmetic][1]
    kernel = Emulator(arithmetic=a, sm_scale=1.0)
    generator = torch.Generator().manual_seed(0)
    # One product is 1, and the others are smaller, so that all of them lose bits.
    x = torch.exp2(-11 - 2 * torch.rand(40, terms, generator=generator))
    x[:, 0] = 1.0
    y = torch.ones(terms, 1)
    exactly = x.double() @ y.double()
    sums = {
        a.accumulation(terms): kernel._dot(x, y, together=a.accumulate_terms),
        a.score_accumulation(terms): kernel._products(x, y.mT),
    }
    for error, found in sums.items():
        ratio = (found.double() - exactly).abs() / (error * exactly)
        assert ratio.max() <= 1
        assert terms == 1 or error <= terms * FP32_ROUNDOFF or ratio.max() > 0.3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arithmetic", ["float16", "bfloat16", "float32"])
def test_dropout_stays_within_both_rules(arithmetic: str, family: str) -> None:
    for seed, dropout_p in enumerate((0.1, 0.9)):
        variant = {"partial_results": bool(seed)}
        assert_within_both_rules(problem(arithmetic, family, 50 + seed, variant, dropout_p=dropout_p))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", ["normal", "duplicated_keys", "small", "large_logits"])
@pytest.mark.parametrize("arithmetic", ["float16", "float32"])
def test_key_padding_stays_within_both_rules(arithmetic: str, family: str, padding: str) -> None:
    for seed, dropout_p in enumerate((0.0, 0.3)):
        variant = {"partial_results": bool(seed)}
        assert_within_both_rules(
            problem(arithmetic, family, 60 + seed, variant, padding=padding, dropout_p=dropout_p)
        )


@pytest.mark.parametrize("padding", ["none", "scattered"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arithmetic", ["float16", "float32"])
def test_patterns_stay_within_both_rules(arithmetic: str, family: str, padding: str) -> None:
    patterns = (
        *(MaskPattern(window=size) for size in (1, 20, 100)),
        MaskPattern(window=9, window_right=9),
        MaskPattern(chunk=16, first_keys=3),
        MaskPattern(window=5, prefix=20),
    )
    for seed, pattern in enumerate(patterns):
        variant = {"partial_results": bool(seed)}
        assert_within_both_rules(
            problem(arithmetic, family, 70 + seed, variant, padding=padding, pattern=pattern)
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_delta_from_probabilities_is_judged_in_exact_mode(family: str) -> None:
    for arithmetic, seed in itertools.product(("float16", "float32"), range(2)):
        r = problem(arithmetic, family, 20 + seed, {"delta": "probabilities"})
        either = replace(r.kernel, arithmetic=replace(r.kernel.arithmetic, delta="any"))
        assert_within(r, RULE_1, teacher_forced=False)
        assert_within(replace(r, kernel=either), RULE_1, teacher_forced=False)


@pytest.mark.parametrize("rule", [RULE_1, RULE_2])
def test_sums_stored_in_between_may_underflow_every_time(rule: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    a = replace(ARITHMETIC["float16"], dk_dv_rows=16, dq_keys=16)
    kernel = Emulator(arithmetic=a, sm_scale=4.0, generator=generator)
    x = normal(generator, 1, 1, 1, 512, 512, 32).map(lambda t: cast(1e-5 * t, FLOAT16))
    assert_within(run(kernel, x), rule)


def test_atomic_adds_lose_a_subnormal_each_time() -> None:
    x = normal(torch.Generator().manual_seed(0), 1, 1, 1, 4, 40, 16)
    a = ARITHMETIC["float32"]
    e = exact(x.q, x.k, x.v, causal=False, sm_scale=1.0)
    forward = forward_bounds(e, a)
    plain, atomic = (
        backward_bounds(e, 0 * x.dout.double(), b, forward=forward) for b in (a, replace(a, dq_atomic=True))
    )
    # 40 keys are three tiles of 16; each add loses what is added, and the sum.
    lost = (atomic.dq_bound - plain.dq_bound) * 2.0**126
    assert torch.allclose(lost, torch.full_like(lost, 6.0))
    assert torch.equal(atomic.dk_bound, plain.dk_bound)


@pytest.mark.parametrize("arithmetic", ["bfloat16", "float16"])
def test_complete_sums_may_be_rounded_before_and_after_they_are_scaled(arithmetic: str) -> None:
    # Two terms, so that one rounding more is a large part of all of them; many problems, to meet the worst.
    stored = {"dk_dv_rows": 2, "dq_keys": 2}
    assert_within(run_normal(arithmetic, 200, 1, 1, 2, 2, 16, changes=stored, sm_scale=0.1), RULE_1)


@pytest.mark.parametrize("rule", [RULE_1, RULE_2])
@pytest.mark.parametrize("rows", [64, 1024])
def test_operands_that_are_truncated_all_err_in_one_direction(rows: int, rule: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    a = ARITHMETIC["tf32_truncated"]
    kernel = Emulator(arithmetic=a, sm_scale=0.125, sums="truncated", generator=generator)
    x = normal(generator, 1, 1, 1, rows, 1088 - rows, 64).map(lambda t: 1 + 0.05 * t)
    assert_within(run(kernel, x), rule)


CAUSAL = {"causal_one_more", "causal_one_less", "causal_wrong_in_one_row"}


def buggy(bug: str | None) -> Run:
    """Run a buggy kernel on three problems of normal data, whose lengths are several tiles and a half."""
    options: dict[str, Any] = {"sm_scale": 0.125, "causal": bug in CAUSAL, "tile_q": 16, "tile_k": 16}
    return run_normal("float16", 3, 1, 1, 520, 520, 64, bug=bug, **options)


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_exceed_the_bounds_in_every_problem(bug: str) -> None:
    largest = torch.stack(list(ratios(buggy(bug), RULE_2).values())).amax(0)
    assert (largest > 1).all(), f"error over bound {largest.tolist()}"


def test_what_the_bugs_are_planted_in_is_correct() -> None:
    assert_within(buggy(None), RULE_2)


def test_equal_weights_round_alike() -> None:
    """Without the multiplicity of equal weights, a correct kernel would be accused."""
    shape = (8, 1, 1, 600, 600, 16)
    r = run_normal("float16_to_float32", *shape, family="duplicated_keys", sm_scale=0.1)
    assert_within(r, RULE_2)
    unclustered = ratios(r, UNCLUSTERED)
    for name in ("out", "dq", "dk", "dv"):
        assert unclustered[name].max() > 1, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_rules_are_ordered_and_finite(arithmetic: str, family: str) -> None:
    r = problem(arithmetic, family, 30)
    by_rule = [expected(r, rule, teacher_forced=True) for rule in (UNCLUSTERED, RULE_2, RULE_1)]
    for name in r.found:
        unclustered, clustered, certain = (bounds[name][1] for bounds in by_rule)
        # The rules add the same terms in another order: a few float64 roundings.
        assert (unclustered <= clustered * (1 + 1e-12)).all(), name
        assert (clustered <= certain * (1 + 1e-12)).all(), name
        assert certain.isfinite().all(), name
        assert (unclustered >= 0).all(), name


@pytest.mark.parametrize("rule", [RULE_1, RULE_2])
def test_bounds_are_infinite_where_float32_may_overflow(rule: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = normal(generator, 1, 1, 1, 8, 24, 16)
    kernel = Emulator(arithmetic=ARITHMETIC["float32"], sm_scale=0.25, causal=True, alignment="top_left")

    def bounds(**changes: Tensor) -> dict[str, Tensor]:
        found = expected(run(kernel, replace(x, **changes)), rule, teacher_forced=True)
        return {name: bound[0, 0] for name, (_, bound) in found.items()}

    def spiked(t: Tensor, row: int, value: float) -> Tensor:
        t = t.clone()
        t[..., row, 0] = value
        return t

    scores = bounds(q=spiked(x.q, 3, 1e38))
    for name in ("out", "lse", "dq"):
        assert scores[name][3].isinf().all(), name
        assert scores[name][[0, 1, 2, 4, 5, 6, 7]].isfinite().all(), name
    assert scores["dk"][:4].isinf().all()
    assert scores["dv"][:4].isinf().all()

    values = bounds(v=spiked(x.v, 2, 3e38))
    assert values["out"][2:, 0].isinf().all()
    assert values["out"][:2].isfinite().all()
    assert values["lse"].isfinite().all()

    gradients = bounds(dout=spiked(x.dout, 5, 3e38))
    assert gradients["dq"][5].isinf().all()
    assert gradients["dq"][:5].isfinite().all()
    assert gradients["dk"][:6].isinf().all()
    assert gradients["dv"][:6, 0].isinf().all()
    assert gradients["out"].isfinite().all()


def test_lazy_rescaling_overflows_earlier() -> None:
    """Scores of the second tile lie 5 above the first, less than log 256, so that each P of 148 meets v as it is."""
    keys = torch.cat([torch.zeros(16, 1), torch.full((16, 1), 5.0)])[None, None]
    v = torch.full((1, 1, 32, 1), 2.0**119.5)
    x = Inputs(torch.ones(1, 1, 1, 1), keys, v, torch.zeros(1, 1, 1, 1))
    found = {}
    for largest in (1, 256):
        a = replace(ARITHMETIC["float32"], largest_weight=largest)
        r = run(Emulator(arithmetic=a, sm_scale=1.0, tile_k=16), x)
        (_, bound) = expected(r, RULE_1, teacher_forced=True)["out"]
        found[largest] = bool(r.found["out"].isfinite()), bool(bound.isfinite())
    assert found == {1: (True, True), 256: (False, False)}


@pytest.mark.parametrize("rule", [RULE_1, RULE_2])
@pytest.mark.parametrize("sm_scale", [0.0, -0.25])
def test_scales_that_are_not_positive(sm_scale: float, rule: dict[str, Any]) -> None:
    r = run_normal("float16", 2, 1, 2, 50, 70, 16, sm_scale=sm_scale, causal=True)
    assert_within(r, rule)
    found = expected(r, rule, teacher_forced=True)
    assert all(bound.isfinite().all() for _, bound in found.values())
    if sm_scale == 0:
        # Nothing but the smallest subnormal is left of gradients that are 0.
        assert (found["dq"][0] == 0).all()
        assert found["dq"][1].max() <= FLOAT16.underflow


@pytest.mark.parametrize("rule", [RULE_1, RULE_2, UNCLUSTERED])
def test_rows_that_see_no_key_have_no_error(rule: dict[str, Any]) -> None:
    r = run_normal("float16", 1, 1, 2, 20, 7, 16, sm_scale=0.25, causal=True)
    found = expected(r, rule, teacher_forced=True)
    empty = slice(0, 13)
    assert (found["out"][1][:, :, empty] == 0).all()
    assert (found["lse"][1][:, :, empty] == 0).all()
    assert (found["lse"][0][:, :, empty] == -math.inf).all()
    assert (found["out"][1][:, :, 13:] > 0).all()
    assert (found["dq"][1][:, :, empty] == 0).all()
    assert_within(r, rule)


@pytest.mark.parametrize("rule", [RULE_1, RULE_2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_empty_lengths(rows: int, keys: int, causal: bool, rule: dict[str, Any]) -> None:
    r = run_normal("bfloat16", 2, 2, 3, rows, keys, 16, sm_scale=0.25, causal=causal)
    for teacher_forced in (True, False):
        found = expected(r, rule, teacher_forced)
        for name, (_, bound) in found.items():
            assert bound.shape == r.found[name].shape, name
            assert bound.isfinite().all(), name
        assert_within(r, rule, teacher_forced=teacher_forced)


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [False, True])
def test_expected_values_are_those_of_the_reference(causal: bool, alignment: str) -> None:
    x = normal(torch.Generator().manual_seed(0), 2, 2, 3, 13, 21, 16)
    options: dict[str, Any] = {"causal": causal, "sm_scale": 0.3, "alignment": alignment}
    e, dout = exact(x.q, x.k, x.v, **options), fold(x.dout, 2).double()
    out, lse = safe_softmax.forward(x.q, x.k, x.v, **options)
    a = ARITHMETIC["float32"]
    exactly = backward_bounds(e, dout, a, forward=forward_bounds(e, a))
    forced = backward_bounds(e, dout, a, out=fold(out, 2) + 0.1, lse=fold(lse, 2) + 0.1)
    # The same sums in the same precision: a few hundred float64 roundings of numbers of order 1 to 10.
    close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(unfold(e.out, 6), out, **close)
    torch.testing.assert_close(unfold(e.lse, 6), lse, **close)
    for b, known in ((exactly, (None, None)), (forced, (out + 0.1, lse + 0.1))):
        dq, dk, dv = safe_softmax.backward(x.dout, x.q, x.k, x.v, out=known[0], lse=known[1], **options)
        torch.testing.assert_close(unfold(b.dq, 6), dq, **close)
        torch.testing.assert_close(b.dk, dk, **close)
        torch.testing.assert_close(b.dv, dv, **close)


def test_backward_needs_the_kernels_results_or_the_forward_bounds() -> None:
    x = normal(torch.Generator().manual_seed(0), 1, 1, 1, 3, 3, 16)
    e = exact(x.q, x.k, x.v, causal=False, sm_scale=1.0)
    with pytest.raises(ValueError, match="out and lse, or the forward bounds"):
        backward_bounds(e, x.dout.double(), ARITHMETIC["float32"])


BIAS_SHAPES = [(2, 4, 40, 50), (1, 4, 40, 50), (2, 1, 40, 50), (1, 1, 40, 50), (2, 1, 1, 50)]


def of_bias(dtype: torch.dtype, shape: tuple[int, ...], *, cast_first: bool) -> tuple[Tensor, ...]:
    """Return dbias by autograd in float32 with a soft-cap, the exact one, and its bounds by rule 1 and rule 2.

    With ``cast_first``, the bias is expanded in its own dtype, so that the gradient of each score is rounded to that.
    """
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16), (2, 4, 40, 16), shape)
    q, k, v, dout, bias = (torch.randn(x, generator=generator).to(dtype) for x in shapes)
    leaf = bias.clone().requires_grad_()
    added = (leaf.expand(2, 4, 40, 50) if cast_first else leaf).float()
    keys, values = (x.float().repeat_interleave(2, 1) for x in (k, v))
    scores = 2.0 * torch.tanh(q.float() @ keys.mT * 0.3 / 2.0) + added
    out = (torch.softmax(scores, -1) @ values).to(dtype)
    (dbias,) = torch.autograd.grad(out, leaf, dout)
    e = exact(q, k, v, causal=False, sm_scale=0.3, rule=ScoreRule(bias=bias, softcap=2.0))
    a = replace(ARITHMETIC[str(dtype).removeprefix("torch.")], delta="probabilities")
    certain, probable = (
        backward_bounds(
            e, fold(dout, 2).double(), a, forward=forward_bounds(e, a), bias_shape=shape, safety=safety
        )
        for safety in (None, SAFETY)
    )
    found = (certain.dbias, certain.dbias_bound, probable.dbias_bound)
    return dbias, *(x for x in found if x is not None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", BIAS_SHAPES)
@pytest.mark.parametrize("cast_first", [False, True])
def test_the_gradient_of_a_bias_is_within_its_bounds(
    dtype: torch.dtype, shape: tuple[int, ...], cast_first: bool
) -> None:
    dbias, expected, certain, probable = of_bias(dtype, shape, cast_first=cast_first)
    assert expected.shape == certain.shape == shape
    assert error_over_bound(dbias, expected, certain).max() <= 1
    assert error_over_bound(dbias, expected, probable).max() <= 1
    assert (probable <= certain * (1 + 1e-12)).all()


@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_the_bound_of_the_gradient_of_a_bias_is_a_few_roundings(shape: tuple[int, ...]) -> None:
    """An error of a sixteenth of dbias is seen in most of its entries, in bfloat16 as well."""
    dbias, expected, _, probable = of_bias(torch.bfloat16, shape, cast_first=True)
    assert (error_over_bound(dbias * (1 + 1 / 16), expected, probable) > 1).double().mean() > 0.5
