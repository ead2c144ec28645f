"""Bounds of known answers and of equations between calls: correct kernels keep them, wrong ones don't."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.arithmetic import FLOAT16, FLOAT32, Arithmetic, Format
from reference.bounds import exact, forward_bounds
from reference.bounds.answers import keys_may_overflow, leftover, mean_bounds, row_bound
from reference.bounds.forward import ForwardBounds
from reference.bounds.identities import hull_bound, sizes
from reference.bounds.relations import merged_bounds, only_exponents_change, sum_bound
from tests.unit.support.emulator import Emulator, cast
from tests.unit.support.problems import ARITHMETIC

HALF = ARITHMETIC["float16"]
ROWS, KEYS, HEAD_DIM = 20, 150, 16
DESIGNS: dict[str, dict[str, Any]] = {
    "at once": {},
    "normalised first": {"normalised_first": True},
    "partial results": {"partial_results": True},
}


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return random values of float16, as float32."""
    return cast(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), FLOAT16)


def integers(seed: int = 0) -> Tensor:
    """Return a v (2, 1, KEYS, HEAD_DIM) of integers from -8 to 8."""
    return torch.randint(-8, 9, (2, 1, KEYS, HEAD_DIM), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("arithmetic", ["float16", "bfloat16", "float32"])
def test_means_are_within_their_bounds_and_those_without_one_key_are_not(
    arithmetic: str, design: str
) -> None:
    a = replace(ARITHMETIC[arithmetic], **DESIGNS[design])
    v = integers()
    q, k = torch.zeros(2, 1, ROWS, HEAD_DIM), random(2, 1, KEYS, HEAD_DIM)
    seen = torch.ones(ROWS, KEYS, dtype=torch.float64).tril(KEYS - ROWS)
    counts = seen.sum(-1, keepdim=True)[None, None]
    mean, size = (seen @ x.double() / counts for x in (v, v.abs()))
    of_out, of_lse = mean_bounds(mean, size, counts, KEYS, a)
    emulator = Emulator(arithmetic=a, sm_scale=0.25, causal=True, tile_k=32)
    out, lse = emulator.forward(q, k, v)
    assert bool(((out - mean).abs() <= of_out).all())
    assert bool(((lse - counts[..., 0].log()).abs() <= of_lse).all())
    wrong_out, wrong_lse = replace(emulator, bug="last_key_dropped").forward(q, k, v)
    last = (..., ROWS - 1, slice(None))
    assert bool(((wrong_out - mean).abs() > of_out)[last].any())
    assert bool(((wrong_lse - counts[..., 0].log()).abs() > of_lse)[..., ROWS - 1].all())


def test_a_mean_is_allowed_one_division_and_one_store_unless_sums_are_rounded() -> None:
    mean, counts = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64), torch.ones(1, 1, 1, 1)
    out, lse = mean_bounds(mean, mean, counts, KEYS, HALF)
    assert float(out) == pytest.approx(2 * (FLOAT16.roundoff + HALF.div_error), rel=1e-3)
    assert float(lse) == HALF.log_error
    rounded: list[dict[str, Any]] = [
        {"normalised_first": True},
        {"partial_results": True},
        {"rounded_scores": True},
        {"rounded_partials": True},
        {"partial_results": True, "merged_by_difference": True},
        {"rounded_largest_weight": True},
    ]
    for fields in rounded:
        assert mean_bounds(mean, mean, counts, KEYS, replace(HALF, **fields))[0] > out
    assert bool((mean_bounds(mean, mean, counts, KEYS, replace(HALF, merged=2))[1] > lse).all())


def test_a_row_that_sees_no_key_has_an_exact_lse() -> None:
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    assert float(mean_bounds(zero, zero, zero, KEYS, HALF)[1]) == 0.0


@pytest.mark.parametrize("a", [HALF, replace(HALF, k_prescaled=True)])
def test_keys_overflow_where_scaling_them_leaves_the_format_that_they_are_scaled_in(a: Arithmetic) -> None:
    k = torch.tensor([1.0, -40000.0])
    assert keys_may_overflow(k, 0.1, a) is a.k_prescaled
    assert not keys_may_overflow(k[:1], 0.1, a)
    assert keys_may_overflow(k, 2.0**125, a)


def test_a_row_of_v_is_exact_but_for_subnormals_and_what_other_weights_leave() -> None:
    row = torch.tensor([1.0, 2.0**-130, 0.0], dtype=torch.float64)
    largest = torch.tensor(8.0)
    left = leftover(4) * 8.0
    assert left == 2.0**-121
    assert row_bound(row, largest, 4, HALF).tolist() == [left, 2.0**-130 + left, left]
    rounded = replace(HALF, operand_rounding=2.0**-10)
    assert row_bound(row, largest, 4, rounded).tolist() == [left, 2.0**-125 + left, 2.0**-125 + left]


def test_a_merge_by_difference_leaves_a_rounding_of_what_vanishes() -> None:
    """The share of the second row is exactly 1, so that ``out - (out - row)`` should be that row."""
    before, row = 1000 * random(2**14), random(2**14, seed=1)
    error = (before - (before - row) - row).double().abs()
    largest = before.double().abs().amax()
    for is_claimed in (True, False):
        a = replace(ARITHMETIC["float32"], merged_by_difference=is_claimed)
        assert bool((error <= row_bound(row.double(), largest, 1, a)).all()) == is_claimed


@pytest.mark.parametrize("output", [FLOAT32, FLOAT16])
def test_a_row_of_v_errs_where_its_weight_is_not_1(output: Format) -> None:
    """The store to float16 rounds to the row what a float32 weight errs by."""
    generator = torch.Generator().manual_seed(0)
    v = cast(torch.randn(2**14, generator=generator), output)
    p = (1 + torch.rand(2**14, generator=generator)) / 2
    out = cast(p * v / p, output)
    error, v = (out.double() - v.double()).abs(), v.double()
    for is_rounded in (True, False):
        a = replace(HALF, weights=output, output=output, rounded_reference=is_rounded)
        is_held = bool((error <= row_bound(v, v.abs().amax(), 1, a)).all())
        assert is_held == (is_rounded or output is FLOAT16)


def test_a_row_of_v_errs_by_a_roundoff_more_where_its_weight_is_cast() -> None:
    """The error is that of the cast, and of the store to float16 after it."""
    generator = torch.Generator().manual_seed(0)
    v = cast(torch.randn(2**14, generator=generator), FLOAT16)
    p = (1 + torch.rand(2**14, generator=generator)) / 2
    out = cast(cast(p, FLOAT16) * v / p, FLOAT16)
    error, v = (out.double() - v.double()).abs(), v.double()
    for is_cast in (True, False):
        a = replace(HALF, rounded_reference=True, rounded_largest_weight=is_cast)
        assert bool((error <= row_bound(v, v.abs().amax(), 1, a)).all()) == is_cast


def of_keys(
    a: Arithmetic, x: list[Tensor], keys: slice, **options: Any
) -> tuple[Tensor, Tensor, ForwardBounds]:
    """Return out and lse of some of the keys, in float64, and their bounds."""
    q, k, v = x[0], x[1][:, :, keys], x[2][:, :, keys]
    out, lse = Emulator(arithmetic=a, sm_scale=0.25, tile_k=32, **options).forward(q, k, v)
    bounds = forward_bounds(exact(q, k, v, causal=False, sm_scale=0.25), a)
    return out.double(), lse.double(), bounds


def excess(a: Arithmetic, x: list[Tensor], **options: Any) -> tuple[float, float]:
    """Return the largest error over bound of out and lse, between a whole and its two halves merged."""
    out, lse, whole = of_keys(a, x, slice(None))
    halves = [of_keys(a, x, slice(0, 60)), of_keys(a, x, slice(60, None), **options)]
    outs, lses = torch.stack([half[0] for half in halves]), torch.stack([half[1] for half in halves])
    weights = lses.softmax(0)
    bound = merged_bounds(whole, [half[2] for half in halves], outs, weights)
    merged = (weights[..., None] * outs).sum(0)
    of_out, of_lse = (out - merged).abs() / bound.out, (lse - lses.logsumexp(0)).abs() / bound.lse
    return float(of_out.max()), float(of_lse.max())


@pytest.mark.parametrize("size", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("arithmetic", ["float16", "bfloat16", "float32"])
def test_halves_merge_to_the_whole_unless_one_of_them_is_wrong(arithmetic: str, size: float) -> None:
    x = [
        size * random(2, 1, ROWS, HEAD_DIM),
        random(2, 1, KEYS, HEAD_DIM, seed=1),
        random(2, 1, KEYS, HEAD_DIM, seed=2),
    ]
    assert max(excess(ARITHMETIC[arithmetic], x)) <= 1
    assert min(excess(ARITHMETIC[arithmetic], x, bug="lse_base_2")) > 1


def test_nothing_is_said_of_a_merge_where_a_part_may_overflow() -> None:
    one = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    sound = ForwardBounds(out=one, lse=one[..., 0])
    lost = ForwardBounds(out=one * torch.tensor([1.0, torch.inf]), lse=one[..., 0])
    outs, weights = torch.stack([one, one]), torch.full((2, 1, 1, 1), 0.5, dtype=torch.float64)
    assert bool(merged_bounds(sound, (sound, sound), outs, weights).out.isfinite().all())
    for whole, parts in ((lost, (sound, sound)), (sound, (sound, lost))):
        bound = merged_bounds(whole, parts, outs, weights)
        assert bool(bound.out.isposinf().all() & bound.lse.isposinf().all())


def test_bounds_of_a_sum_add_up_and_are_infinite_where_a_part_is() -> None:
    bounds = [torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]), torch.tensor([4.0, 4.0])]
    parts = [torch.tensor([0.5, torch.inf]), torch.tensor([-0.5, 0.0])]
    assert sum_bound(bounds, parts).tolist() == [7.0, torch.inf]


@pytest.mark.parametrize(
    ("q", "k", "sm_scale", "fields", "expected"),
    [
        (1.0, 1.0, 0.125, {}, True),
        (1.0, 1.0, -0.125, {}, True),
        (0.0, 0.0, 0.125, {}, True),
        (1.0, 1.0, 0.125, {"q_prescaled": True}, False),
        (1.0, 1.0, 0.125, {"k_prescaled": True}, False),
        (1.0, 1.0, 0.125, {"rounded_scores": True}, False),
        (1.0, 1.0, 0.0, {}, False),
        (1.0, 1.0, 2.0**60, {}, False),
        (2.0**127, 1.0, 0.125, {}, False),
        (2.0**-60, 2.0**-60, 0.125, {}, False),
    ],
)
def test_a_power_of_two_changes_only_exponents_where_nothing_underflows_or_overflows(
    q: float, k: float, sm_scale: float, fields: dict[str, Any], expected: bool
) -> None:
    a = replace(HALF, **fields)
    assert only_exponents_change(torch.tensor([q]), torch.tensor([k, 3.0]), sm_scale, 4, a) is expected


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("claim", ["rounded_scores", "q_prescaled", "k_prescaled"])
def test_what_is_rounded_before_the_softmax_may_overflow_its_format(claim: str, gradients: bool) -> None:
    """A forward alone may overflow there as well: ONNX Runtime's scores in float16 were NaN beyond 65504."""
    x, large = (torch.full((1, 1, 1, 16), value) for value in (1.0, 60000.0))
    changes: dict[str, Any] = {claim: True}
    rounded = replace(Arithmetic(weights=FLOAT16, output=FLOAT16), **changes)
    q, k = (x, large) if claim == "k_prescaled" else (large, x)
    options: dict[str, Any] = {
        "causal": False,
        "sm_scale": 1.0,
        "alignment": "top_left",
        "gradients": gradients,
    }
    assert not sizes(q, k, x, 0 * x, rounded, **options).safe
    assert sizes(x, x, x, 0 * x, rounded, **options).safe
    if not gradients:
        assert sizes(q, k, x, 0 * x, Arithmetic(weights=FLOAT16, output=FLOAT16), **options).safe


def test_nothing_is_known_of_a_weight_that_may_be_infinite_and_meets_a_zero() -> None:
    """FlagGems gave NaN: a fused multiply-add makes an infinite weight of a score of 5e16, and 0 * infinity is NaN."""
    x, large = (torch.full((1, 1, 1, 16), value) for value in (1.0, 1e16))
    a = Arithmetic(weights=FLOAT16, output=FLOAT16)
    for v in (0 * x, x):
        s = sizes(large, x, v, 0 * x, a, causal=False, sm_scale=0.25, alignment="top_left", gradients=False)
        assert s.safe
        assert hull_bound(s, a).isposinf().all()
