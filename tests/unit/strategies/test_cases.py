"""Cases of every claimed kind are drawn and no others, and a failing case shrinks to the simplest."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from kernels.contract import BIASES, LAYOUTS, Capabilities
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import DEFAULT_BLOCK, NONFINITE, TENSORS, Case, Spike
from strategies.cases import (
    BEYOND_FLOAT16,
    FAR_BELOW,
    LARGE_GROUPS,
    LARGEST_SPREAD,
    MODERATE_VALUES,
    cases,
)
from strategies.limits import MOST_SCORES
from strategies.padding import FAMILIES as PADDINGS
from strategies.padding import several_attended
from strategies.score_rules import SHAPES
from strategies.values import FAMILIES
from tests.harness.law import law_named
from tests.harness.trial.trial import LawBroken, Trial
from tests.unit.support.drawing import CLAIMS, quick, sample

Condition = Callable[[Case], bool]


def minimal(strategy: SearchStrategy[Case], condition: Condition) -> Case:
    """Return what Hypothesis shrinks a case that meets the condition to."""
    options = settings(quick, max_examples=2000, phases=[Phase.generate, Phase.shrink])
    return find(strategy, condition, settings=options, random=Random(1))


def masked_places(case: Case) -> set[str]:
    """Return which wholly masked tiles of keys a causal case has: first, middle, last."""
    launch = dict(case.launch)
    if not case.causal:
        return set()
    tiles = range(0, case.seqlen_k, launch["block_n"])
    places = set()
    for start in range(0, case.seqlen_q, launch["block_m"]):
        last_row = min(start + launch["block_m"], case.seqlen_q) - 1
        seen = last_row + case.seqlen_k - case.seqlen_q
        for index, tile in enumerate(tiles):
            if tile > seen:
                places.add("first" if index == 0 else "last" if index == len(tiles) - 1 else "middle")
    return places


def one_sided_logits(case: Case) -> int:
    """Return the sign that all logits have, or 0 if they have both signs."""
    signs = {"positive": 1, "negative": -1}
    scale = math.copysign(1, case.scale) if abs(case.scale) > 0.1 else 0
    return int(signs.get(case.q_values, 0) * signs.get(case.k_values, 0) * scale)


def has(field: str, value: object) -> Condition:
    return lambda case: getattr(case, field) == value


def has_setting(name: str, value: object) -> Condition:
    return lambda case: (name, value) in case.launch


def masks(place: str) -> Condition:
    return lambda case: place in masked_places(case)


def has_spikes(count: int) -> Condition:
    return lambda case: len(case.spikes) == count


KINDS: dict[str, Condition] = {
    **{f"seqlen_q={n}": has("seqlen_q", n) for n in (0, 1, 15, 16, 17, 63, 64, 65)},
    **{f"seqlen_k={n}": has("seqlen_k", n) for n in (0, 1, 31, 32, 33, 63, 64, 65)},
    "several tiles and a half": lambda case: case.seqlen_k > 128 and 16 <= case.seqlen_k % 64 <= 48,
    "more queries than keys": lambda case: case.seqlen_q > case.seqlen_k > 0,
    "more keys than queries": lambda case: case.seqlen_k > case.seqlen_q > 0,
    "equal lengths": lambda case: case.seqlen_k == case.seqlen_q > 1,
    "causal": has("causal", True),
    "full": has("causal", False),
    "rows without a key": lambda case: case.causal and case.seqlen_q > case.seqlen_k > 0,
    **{f"{place} tile masked": masks(place) for place in ("first", "middle", "last")},
    **{f"head_dim={d}": has("head_dim", d) for d in CLAIMS.head_dims},
    **{f"group={g}": has("group", g) for g in (1, 2, 3, 4, 5, 8)},
    "heads_kv = group > 1": lambda case: case.heads_kv == case.group > 1,
    "heads_kv < group": lambda case: 1 < case.heads_kv < case.group,
    "heads_kv > group": lambda case: case.heads_kv > case.group > 1,
    **{f"{name}: {family}": has(f"{name}_values", family) for name in TENSORS for family in FAMILIES},
    "logits far below 0": lambda case: one_sided_logits(case) < 0,
    "logits far above 0": lambda case: one_sided_logits(case) > 0,
    "weights of padded keys overflow": lambda case: one_sided_logits(case) < 0 and case.seqlen_k % 64 > 0,
    "default scale": has("sm_scale", None),
    "zero scale": has("sm_scale", 0.0),
    "no power of two": has("sm_scale", 0.3),
    "negative scale": lambda case: case.scale < 0,
    "tiny scale": lambda case: 0 < case.scale < 1e-3,
    "large scale": lambda case: case.scale > 10,
    **{f"{name}: {layout}": has(f"{name}_layout", layout) for name in TENSORS for layout in LAYOUTS},
    "k laid out unlike v": lambda case: case.k_layout != case.v_layout,
    **{
        f"{name}={value}": has_setting(name, value)
        for name, values in CLAIMS.launch.items()
        for value in values
    },
    **{f"{count} spikes": has_spikes(count) for count in range(5)},
}


@cache
def many(device_type: str) -> list[Case]:
    """Return many cases that are drawn for a device, for all tests that look at some of them."""
    return sample(cases(CLAIMS, dtype="float16", device_type=device_type), 4000)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_kind_of_case_is_drawn(device_type: str) -> None:
    found = many(device_type)
    large = {f"group={n}": has("group", n) for n in LARGE_GROUPS}
    assert not [name for name, holds in {**KINDS, **large}.items() if not any(map(holds, found))]


def masked_by_a_number(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
    """Hidden scores are set to -1e4 instead of -infinity. All heads are query heads."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    scores = (q @ k.mT * sm_scale).masked_fill(hidden & causal, -1e4)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_scores_are_drawn_that_lie_below_those_to_which_a_mask_sets_hidden_ones() -> None:
    found = sample(cases(CLAIMS, dtype="float32"), 2500)
    far = [case for case in found if case.causal and case.sm_scale == FAR_BELOW and case.seqlen_q > 1]
    negative = [case for case in far if {case.q_values, case.k_values} == {"positive", "negative"}]
    assert negative
    case = Case(
        seqlen_q=9,
        seqlen_k=9,
        head_dim=64,
        causal=True,
        q_values="positive",
        k_values="negative",
        sm_scale=FAR_BELOW,
    )

    def judge(case: Case) -> None:
        kernel = load(f"{Path(__file__)}:{masked_by_a_number.__name__}")
        law_named("forward")(Trial(kernel, case, "cpu", SAFETY))

    with pytest.raises(LawBroken, match="out is within the rounding bound"):
        judge(case)
    judge(replace(case, sm_scale=None))


def through_float16(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
    """Numbers of v pass through float16. All heads are query heads, and no call is causal."""
    scores = q.float() @ k.mT.float() * sm_scale
    return (scores.softmax(-1) @ v.half().float()).to(q.dtype), scores.logsumexp(-1)


def test_entries_are_drawn_that_float16_has_not() -> None:
    found = sample(cases(CLAIMS, dtype="bfloat16"), 1000)
    beyond = [
        case for case in found if any(x.value == BEYOND_FLOAT16 and x.tensor == "v" for x in case.spikes)
    ]
    assert len(beyond) > len(found) // 100
    case = Case(seqlen_q=9, seqlen_k=9, dtype="bfloat16", spikes=(Spike("v", (0, 0, 3, 3), BEYOND_FLOAT16),))
    kernel = load(f"{Path(__file__)}:{through_float16.__name__}")
    forward = law_named("forward")
    forward(Trial(kernel, replace(case, spikes=()), "cpu", SAFETY))
    with pytest.raises(LawBroken, match="out is within the rounding bound"):
        forward(Trial(kernel, case, "cpu", SAFETY))


MASKED = replace(CLAIMS, key_padding=True, dropout=(0.0, 0.1, 0.5))


def test_masks_are_drawn_where_they_are_asked_for_and_claimed() -> None:
    found = sample(cases(MASKED, dtype="float16", key_padding=True, dropout=True), 200)
    assert {case.key_padding for case in found} == {"none", *PADDINGS}
    assert {case.dropout_p for case in found} == {0.0, 0.1, 0.5}
    for strategy in (
        cases(MASKED, dtype="float16"),
        cases(CLAIMS, dtype="float16", key_padding=True, dropout=True),
    ):
        assert {(case.key_padding, case.dropout_p) for case in sample(strategy)} == {("none", 0.0)}


def test_a_window_to_the_right_seldom_has_a_causal_mask() -> None:
    claims = replace(CLAIMS, window_right=(0, 9))
    found = sample(cases(claims, dtype="float16", variants=True), 1000)
    with_windows = [case for case in found if case.window_right]
    assert 0 < sum(case.causal for case in with_windows) < 0.3 * len(with_windows)
    under_a_mask = sample(cases(replace(claims, causal=(True,)), dtype="float16", variants=True))
    assert any(case.window_right for case in under_a_mask)
    assert all(case.causal for case in under_a_mask)


def test_patterns_of_masks_may_be_drawn_without_changes_of_scores() -> None:
    claims = replace(CLAIMS, window=(0, 9), softcap=(0.0, 30.0))
    found = sample(cases(claims, dtype="float16", patterns=True))
    assert {case.window for case in found} == {0, 9}
    assert {case.softcap for case in found} == {0.0}


def test_seldom_no_sequence_of_a_padded_case_has_several_keys() -> None:
    found = sample(cases(MASKED, dtype="float16", key_padding=True))
    padded = [case for case in found if case.key_padding != "none" and case.seqlen_k > 1]
    assert 0 < sum(not several_attended(case) for case in padded) < 0.1 * len(padded)


def test_draws_are_independent() -> None:
    found = many("cpu")[:500]
    assert len(set(found)) > 0.95 * len(found)
    # Hypothesis gives special integers, 0 among them, a share of their own.
    assert len({case.seed for case in found}) > 0.7 * len(found)


SIMPLEST = Case(
    seqlen_q=0,
    seqlen_k=0,
    head_dim=1,
    dtype="float16",
    launch=(("block_m", 16), ("block_n", 32), ("num_warps", 4), ("num_stages", 1)),
)


@pytest.mark.parametrize(
    ("condition", "change"),
    [
        (lambda case: True, {}),
        (lambda case: case.seqlen_k % 128 == 127, {"seqlen_k": 127}),
        (lambda case: case.seqlen_q % 64 == 1 and case.seqlen_k > 100, {"seqlen_q": 1, "seqlen_k": 101}),
        (
            lambda case: case.causal and case.seqlen_q > case.seqlen_k > 33,
            {"causal": True, "seqlen_q": 35, "seqlen_k": 34},
        ),
        (lambda case: case.k_values == "near_ties", {"k_values": "near_ties"}),
        (lambda case: case.v_layout == "huge", {"v_layout": "huge"}),
        (
            lambda case: case.q_layout == case.k_layout == "huge",
            {f"{name}_layout": "huge" for name in TENSORS},
        ),
        (lambda case: case.scale < 0, {"sm_scale": -0.125}),
        (lambda case: case.heads_kv > 1 and case.group > 3, {"heads_kv": 2, "group": 4}),
        (
            lambda case: ("num_stages", 3) in case.launch,
            {"launch": (*SIMPLEST.launch[:3], ("num_stages", 3))},
        ),
        (
            lambda case: any(spike.tensor == "v" and spike.value == 100.0 for spike in case.spikes),
            {"spikes": (Spike("v", (0, 0, 0, 0), 100.0),)},
        ),
    ],
)
def test_shrinking_ends_at_the_simplest_case(condition: Condition, change: dict[str, Any]) -> None:
    assert minimal(cases(CLAIMS, dtype="float16"), condition) == replace(SIMPLEST, **change)


NARROW = Capabilities(
    dtypes=("float16",),
    head_dims=(24,),
    grouped_heads=False,
    unequal_lengths=False,
    min_seqlen=1,
    causal=(True,),
    sm_scale="positive",
    layouts=("bnhd", "contiguous"),
)


@quick
@given(cases(NARROW, dtype="float16", max_seqlen=40))
def test_only_what_is_claimed_is_drawn(case: Case) -> None:
    assert case.dtype == "float16"
    assert case.head_dim == 24
    assert case.group == 1
    assert 1 <= case.seqlen_q == case.seqlen_k <= 40
    assert case.causal
    assert case.scale > 0
    assert {getattr(case, f"{name}_layout") for name in TENSORS} <= {"contiguous", "bnhd"}
    assert case.launch == ()


@quick
@given(cases(Capabilities(seqlen_multiple=32, min_seqlen=1), dtype="float16", max_seqlen=140))
def test_lengths_are_multiples_where_only_those_are_claimed(case: Case) -> None:
    assert {case.seqlen_q, case.seqlen_k} <= {32, 64, 96, 128}


def test_multiples_differ_from_each_other() -> None:
    found = sample(cases(Capabilities(seqlen_multiple=32), dtype="float16", max_seqlen=140), 200)
    assert {case.seqlen_q for case in found} == {case.seqlen_k for case in found} == {0, 32, 64, 96, 128}
    assert any(case.seqlen_q != case.seqlen_k for case in found)


@quick
@given(cases(Capabilities(causal_unequal_lengths=False), dtype="float32"))
def test_causal_lengths_are_equal_where_only_those_are_claimed(case: Case) -> None:
    assert case.seqlen_q == case.seqlen_k or not case.causal


def test_other_lengths_differ_where_only_causal_ones_may_not() -> None:
    found = sample(cases(Capabilities(causal_unequal_lengths=False), dtype="float32"), 100)
    assert any(case.seqlen_q != case.seqlen_k for case in found)


@quick
@given(cases(CLAIMS, dtype="float16", device_type="cuda", max_scores=5000))
def test_every_case_keeps_to_the_work_and_to_one_huge_storage(case: Case) -> None:
    assert case.scores <= 5000
    assert [getattr(case, f"{name}_layout") for name in TENSORS].count("huge") <= 1


def test_the_cpu_has_cases_as_long_as_a_gpu_and_fewer_scores() -> None:
    assert max(max(case.seqlen_q, case.seqlen_k) for case in many("cpu")) > 500
    more = sample(cases(CLAIMS, dtype="float16", max_scores=2**26), 200)
    assert max(case.scores for case in [*many("cpu"), *more]) <= MOST_SCORES["cpu"] < MOST_SCORES["cuda"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_most_cases_keep_to_a_fraction_of_the_work(device_type: str) -> None:
    found = many(device_type)
    assert 0 < sum(case.products > 2**22 for case in found) / len(found) < 0.15


def test_some_cases_for_a_gpu_give_a_persistent_program_several_tasks() -> None:
    """There are more key heads than an H200 has multiprocessors, so a program has key tiles of several of them."""
    large = [case for case in many("cuda") if case.batch * case.heads_kv > 132]
    assert 0.02 < len(large) / len(many("cuda")) < 0.08
    for name in ("seqlen_q", "seqlen_k"):
        assert any(getattr(case, name) > 128 for case in large)
    assert max(case.batch * case.heads_kv for case in many("cpu")) < 10


@quick
@given(cases(CLAIMS, dtype="float16", nonfinite=True))
def test_nonfinite_cases_have_a_few_such_entries_in_moderate_tensors(case: Case) -> None:
    assert 1 <= len(case.spikes) <= 2
    assert all(spike.value in NONFINITE for spike in case.spikes)
    assert {getattr(case, f"{name}_values") for name in TENSORS} <= set(MODERATE_VALUES)


def test_other_cases_are_finite() -> None:
    assert all(isinstance(spike.value, float) for case in many("cpu") for spike in case.spikes)
    assert max(len(case.spikes) for case in many("cpu")) == 4


def test_scores_stay_moderate_where_operands_are_rounded_coarsely() -> None:
    """The launch settings of ``flash_v2`` ask for tf32 in half of the cases."""
    claims = load("flash_v2").capabilities
    drawn = [
        case for case in sample(cases(claims, dtype="float32", device_type="cuda"), 200) if case.sm_scale
    ]
    tf32 = [case for case in drawn if dict(case.launch)["precision"] == "tf32"]
    assert all(abs(case.sm_scale or 0.0) * math.sqrt(case.head_dim) <= LARGEST_SPREAD for case in tf32)
    assert {getattr(case, f"{tensor}_values") for case in tf32 for tensor in TENSORS} <= {*MODERATE_VALUES}
    others = [case for case in drawn if case not in tf32]
    assert any(abs(case.sm_scale or 0.0) * math.sqrt(case.head_dim) > LARGEST_SPREAD for case in others)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_unclaimed_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"dtype: got '{dtype}', expected one of the claimed"):
        cases(NARROW, dtype=dtype)


def test_every_accelerator_has_the_limits_of_any_other() -> None:
    drawn = [sample(cases(CLAIMS, dtype="float16", device_type=x), 50) for x in ("cuda", "xpu", "mine")]
    assert drawn[0] == drawn[1] == drawn[2] != sample(cases(CLAIMS, dtype="float16"), 50)


@pytest.mark.parametrize("bias", BIASES)
def test_a_bias_whose_gradient_is_claimed_is_mostly_a_sum(bias: str) -> None:
    """Several sequences, heads and tiles of rows share a bias that has one of all, if there are any rows."""
    claims = Capabilities(bias=(bias,), bias_gradient=True)
    drawn = [case for case in sample(cases(claims, dtype="float32", variants=True)) if case.bias == bias]
    has = SHAPES[bias]
    several = [
        (has[0] or case.batch > 1)
        and (has[1] or case.heads_q > 1)
        and (has[2] or case.seqlen_q > DEFAULT_BLOCK)
        for case in drawn
        if case.seqlen_q
    ]
    assert len(drawn) > 40
    assert sum(several) > 0.7 * len(several)


IN_K = replace(CLAIMS, v_in_k=(False, True), v_head_dim=(0, 16, 64))


def test_v_is_in_k_in_half_of_the_cases_where_it_may_be() -> None:
    found = sample(cases(IN_K, dtype="float16"))
    assert all(case.v_head_dim <= case.head_dim for case in found if case.v_in_k)
    fitting = [case.v_in_k for case in found if case.v_head_dim <= case.head_dim]
    assert 0.4 < sum(fitting) / len(fitting) < 0.6
    assert {case.v_head_dim for case in found if case.v_in_k} == {0, 16, 64}
    assert not any(case.v_in_k for case in many("cpu"))


def test_v_in_k_is_shrunk_away_unless_it_is_needed() -> None:
    strategy = cases(IN_K, dtype="float16")
    assert minimal(strategy, lambda case: True) == SIMPLEST
    assert minimal(strategy, lambda case: case.v_in_k) == replace(SIMPLEST, v_in_k=True)


def test_v_is_in_k_in_all_cases_of_a_kernel_of_one_buffer() -> None:
    claims = replace(IN_K, v_in_k=(True,), backward=False)
    found = sample(cases(claims, dtype="float16"))
    assert all(case.v_is_of_k and claims.admits(case) for case in found)
    assert {case.v_head_dim for case in found} == {0, 16, 64}
    assert not any(claims.admits(replace(case, v_in_k=False)) for case in found)
    assert minimal(cases(claims, dtype="float16"), lambda case: True) == replace(SIMPLEST, v_in_k=True)


def test_cases_of_latent_attention_are_small_enough_for_the_cpu() -> None:
    claims = Capabilities(head_dims=(576,), v_head_dim=(512,), v_in_k=(False, True))
    found = sample(cases(claims, dtype="bfloat16"))
    assert any(case.v_in_k and case.seqlen_k > 128 for case in found)
    assert minimal(cases(claims, dtype="bfloat16"), lambda case: case.v_in_k).scores == 0
