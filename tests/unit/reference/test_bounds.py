"""Correct kernels stay within the bounds, whatever order and arithmetic they choose; wrong ones don't."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import safe_softmax
from reference.arithmetic import (
    BFLOAT16,
    EX2_APPROX_ERROR,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FORMATS,
    FP32_ROUNDOFF,
    HOPPER_FP8_ROUNDOFF,
    HOPPER_FP8_TERMS,
    TF32,
    TF32_TRUNCATED,
    Arithmetic,
    Format,
)
from reference.bounds import Exact, ForwardBounds, backward_bounds, exact, forward_bounds
from reference.bounds.accumulation import SAFETY
from reference.heads import fold, unfold
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.score_rule import ScoreRule
from strategies.case import Case
from strategies.padding import FAMILIES as PADDINGS
from strategies.padding import key_padding_mask
from tests.harness.trial.compare import error_over_bound
from tests.unit.support.emulator import BUGS, SUMS, Emulator, cast

RULE_1: dict[str, Any] = {}
RULE_2: dict[str, Any] = {"safety": SAFETY}
UNCLUSTERED: dict[str, Any] = {"safety": SAFETY, "clustered": False}

ARITHMETIC = {
    "float16": Arithmetic(weights=FLOAT16, output=FLOAT16),
    "bfloat16": Arithmetic(weights=BFLOAT16, output=BFLOAT16),
    "float32": Arithmetic(weights=FLOAT32, output=FLOAT32),
    "tf32": Arithmetic(weights=TF32, output=FLOAT32, operand_rounding=TF32.roundoff),
    "tf32_truncated": Arithmetic(
        weights=TF32_TRUNCATED, output=FLOAT32, operand_rounding=TF32_TRUNCATED.roundoff
    ),
    # The last rounding is left out, because it would hide the errors of the sums.
    "float16_to_float32": Arithmetic(weights=FLOAT16, output=FLOAT32),
}
INPUTS = {
    "float16": FLOAT16,
    "float16_to_float32": FLOAT16,
    "bfloat16": BFLOAT16,
}

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


@dataclass(frozen=True)
class Inputs:
    """Float32 q, dout (B, heads_q, M, D) and k, v (B, heads_kv, N, D), of values of the input's format."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> "Inputs":
        """Return the inputs with a function applied to each tensor."""
        return Inputs(f(self.q), f(self.k), f(self.v), f(self.dout))


def normal(
    generator: torch.Generator, batch: int, heads_kv: int, group: int, rows: int, keys: int, head_dim: int
) -> Inputs:
    of_q, of_k = (batch, heads_kv * group, rows, head_dim), (batch, heads_kv, keys, head_dim)
    return Inputs(*(torch.randn(shape, generator=generator) for shape in (of_q, of_k, of_k, of_q)))


def duplicated_keys(x: Inputs) -> Inputs:
    """Repeat three keys and queries, with gradients of one sign, so that all roundings of a kind have one sign."""
    of_k, of_q = torch.arange(x.k.shape[2]) % 3, torch.arange(x.q.shape[2]) % 3
    q, k, v, dout = x.q[:, :, of_q], x.k[:, :, of_k], x.v[:, :, of_k].abs(), x.dout[:, :, of_q].abs()
    return Inputs(q, k, v, dout)


def cancellation(x: Inputs) -> Inputs:
    """Make inputs in which the halves of q k^T cancel, and pairs of values as well."""
    half, even = x.q.shape[3] // 2, torch.arange(x.k.shape[2]) // 2 * 2
    sign = 1.0 - 2.0 * (torch.arange(x.k.shape[2]) % 2)[:, None]
    q = torch.cat([x.q[..., :half], x.q[..., :half]], -1)
    k = torch.cat([x.k[..., :half], 0.01 * x.k[..., half:] - x.k[..., :half]], -1)
    return Inputs(4 * q, 4 * k, x.v[:, :, even] * sign, x.dout)


def ascending(x: Inputs) -> Inputs:
    """Make scores that grow from key to key, so that every tile has a new maximum."""
    steps = torch.linspace(-3, 3, x.k.shape[2])[:, None]
    return replace(x, q=x.q.abs() + 1, k=steps + 0.05 * x.k)


def outliers(x: Inputs) -> Inputs:
    """Add outliers: N(0, 1) + N(0, 100) Bernoulli(0.001), as in FlashAttention-3 (Shah et al. 2024, section 4.3)."""
    generator = torch.Generator().manual_seed(1)

    def spiked(t: Tensor) -> Tensor:
        return t + 10 * t.flip(2) * (torch.rand(t.shape, generator=generator) < 1e-3)

    return x.map(spiked)


FAMILIES: dict[str, Callable[[Inputs], Inputs]] = {
    "normal": lambda x: x,
    "positive": lambda x: x.map(torch.abs),
    "duplicated_keys": duplicated_keys,
    "cancellation": cancellation,
    "ascending": ascending,
    "outliers": outliers,
    "tiny_logits": lambda x: Inputs(x.q * 1e-4, x.k, x.v.abs(), x.dout.abs()),
    "large_logits": lambda x: replace(x, q=8 * x.q),
    "constant_rows": lambda x: replace(x, k=x.k[:, :, :1].expand_as(x.k), v=x.v.abs()),
    "small": lambda x: x.map(lambda t: t * 1e-4),
    "large_v": lambda x: replace(x, v=3000 * x.v, dout=1e-3 * x.dout),
}


@dataclass(frozen=True)
class Run:
    """A kernel's outputs beside the float64 quantities they are judged by."""

    kernel: Emulator
    inputs: Inputs
    e: Exact
    found: dict[str, Tensor]

    @property
    def dout(self) -> Tensor:
        """The gradient of out, folded, in float64."""
        return fold(self.inputs.dout, self.inputs.k.shape[1]).double()

    @cached_property
    def certain(self) -> ForwardBounds:
        """The bounds of out and lse by rule 1."""
        return forward_bounds(self.e, self.kernel.arithmetic)


def run(kernel: Emulator, x: Inputs) -> Run:
    out, lse = kernel.forward(x.q, x.k, x.v)
    dq, dk, dv = kernel.backward(x.dout, x.q, x.k, x.v, out, lse)
    e = exact(
        x.q,
        x.k,
        x.v,
        causal=kernel.causal,
        sm_scale=kernel.sm_scale,
        alignment=kernel.alignment,
        product_floor=kernel.arithmetic.product_floor,
        key_padding_mask=kernel.key_padding_mask,
        pattern=kernel.pattern,
        dropout_p=kernel.dropout_p,
        dropout_seed=kernel.dropout_seed,
    )
    return Run(kernel, x, e, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})


def expected(r: Run, rule: dict[str, Any], teacher_forced: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the expected value of each output, and the bound of its error."""
    a, heads_kv, heads_q = r.kernel.arithmetic, r.inputs.k.shape[1], r.inputs.q.shape[1]
    f = forward_bounds(r.e, a, **rule) if rule else r.certain
    if teacher_forced:
        out, lse = (fold(r.found[name], heads_kv).double() for name in ("out", "lse"))
        b = backward_bounds(r.e, r.dout, a, out=out, lse=lse, **rule)
    else:
        b = backward_bounds(r.e, r.dout, a, forward=r.certain, **rule)
    return {
        "out": (unfold(r.e.out, heads_q), unfold(f.out, heads_q)),
        "lse": (unfold(r.e.lse, heads_q), unfold(f.lse, heads_q)),
        "dq": (unfold(b.dq, heads_q), unfold(b.dq_bound, heads_q)),
        "dk": (b.dk, b.dk_bound),
        "dv": (b.dv, b.dv_bound),
    }


def ratios(r: Run, rule: dict[str, Any], *, teacher_forced: bool = True) -> dict[str, Tensor]:
    """Return the largest error over bound of each output, (B,): one for each problem of the batch."""
    found = {}
    for name, (value, bound) in expected(r, rule, teacher_forced).items():
        maximum = math.inf if name == "lse" else r.kernel.arithmetic.output.maximum
        ratio = error_over_bound(r.found[name], value, bound, maximum).flatten(1)
        found[name] = ratio.amax(1) if ratio.numel() else torch.zeros(len(ratio))
    return found


def problem(
    arithmetic: str,
    family: str,
    seed: int,
    changes: dict[str, Any] | None = None,
    *,
    padding: str = "none",
    dropout_p: float = 0.0,
    pattern: MaskPattern = NO_PATTERN,
) -> Run:
    """Run a random kernel of the given arithmetic on two random problems of the family."""
    choose = random.Random(f"{arithmetic} {family} {seed}")
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    a = replace(ARITHMETIC[arithmetic], **(changes or {}))
    longest = choose.choice([40, 100, 160, 240])
    group, rows, keys = choose.randint(1, 3), choose.randint(1, longest), choose.randint(1, longest)
    head_dim = choose.choice([16, 32, 64, 128])
    default = head_dim**-0.5
    kernel = Emulator(
        arithmetic=a,
        sm_scale=choose.choices([default, 0.5, -default, 0.0], [0.8, 0.1, 0.05, 0.05])[0],
        causal=choose.random() < 0.6,
        alignment=choose.choice(["bottom_right", "top_left"]),
        tile_q=choose.choice([16, 32, 64, 128]),
        tile_k=choose.choice([16, 32, 64, 128]),
        reverse=choose.random() < 0.5,
        # Float32 products are not exact, so no tensor core adds them up.
        sums=choose.choice(SUMS if a.weights is not FLOAT32 else SUMS[:2]),
        fused=choose.random() < 0.5,
        base_2=a.k_prescaled or choose.random() < 0.6,
        key_padding_mask=key_padding_mask(Case(batch=2, seqlen_k=keys, key_padding=padding, seed=seed)),
        pattern=pattern,
        dropout_p=dropout_p,
        dropout_seed=seed,
        generator=generator,
    )
    x = FAMILIES[family](normal(generator, 2, 1, group, rows, keys, head_dim))
    return run(kernel, x.map(lambda t: cast(t, INPUTS.get(arithmetic, FLOAT32))))


def run_normal(
    arithmetic: str,
    *shape: int,
    family: str = "normal",
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Run a kernel on a family of data; ``shape`` is that of ``normal``, ``changes`` are to the arithmetic."""
    generator = torch.Generator().manual_seed(0)
    a = replace(ARITHMETIC[arithmetic], **(changes or {}))
    x = FAMILIES[family](normal(generator, *shape))
    kernel = Emulator(arithmetic=a, generator=generator, **options)
    return run(kernel, x.map(lambda t: cast(t, INPUTS.get(arithmetic, FLOAT32))))


def assert_within(r: Run, rule: dict[str, Any], *, teacher_forced: bool = True) -> None:
    for name, ratio in ratios(r, rule, teacher_forced=teacher_forced).items():
        assert ratio.max() <= 1, f"{name}: error over bound {ratio.max():.3f} by {rule} for {r.kernel}"


def assert_within_both_rules(r: Run) -> None:
    """Assert that the kernel stays within them, with gradients judged at its own out and lse, and at the exact ones."""
    assert_within(r, RULE_1)
    assert_within(r, RULE_2)
    assert_within(r, RULE_1, teacher_forced=False)


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
