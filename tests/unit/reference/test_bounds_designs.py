"""Bounds of designs that round sums over a group of heads, q and k, or what they add to scores; the largest errors."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.bounds import Exact, backward_bounds, exact, forward_bounds
from reference.bounds.accumulation import SAFETY
from reference.heads import fold, unfold
from reference.score_rule import ScoreRule
from tests.harness.trial.compare import error_over_bound
from tests.unit.support.emulator import Emulator, cast
from tests.unit.support.problems import (
    ARITHMETIC,
    INPUTS,
    RULE_2,
    Inputs,
    Run,
    assert_within_both_rules,
    expected,
    normal,
    ratios,
    run,
)

HALVES = ("float16", "bfloat16")


def heads_alike(x: Inputs) -> Inputs:
    """Make all heads of a group alike, so that each running sum of dk and dv rounds the same way for long."""
    return replace(x, q=x.q[:, :1].expand_as(x.q), dout=x.dout[:, :1].abs().expand_as(x.dout), v=x.v.abs())


def of_group(arithmetic: str, group: int, *, alike: bool = False) -> Run:
    """Run a kernel that adds dk and dv head after head in the inputs' format."""
    generator = torch.Generator().manual_seed(group)
    x = normal(generator, 4, 1, group, 5, 9, 16).map(lambda t: cast(t, INPUTS[arithmetic]))
    a = replace(ARITHMETIC[arithmetic], rounded_group_sums=True)
    kernel = Emulator(arithmetic=a, sm_scale=0.25, generator=generator)
    return run(kernel, heads_alike(x) if alike else x)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 8, 77, 128])
@pytest.mark.parametrize("arithmetic", HALVES)
def test_rounded_sums_over_a_group_stay_within_both_rules(arithmetic: str, group: int, alike: bool) -> None:
    assert_within_both_rules(of_group(arithmetic, group, alike=alike))


@pytest.mark.parametrize("arithmetic", HALVES)
def test_a_head_of_eight_that_is_added_twice_is_seen(arithmetic: str) -> None:
    r = of_group(arithmetic, 8)
    for name in ("dk", "dv"):
        value, bound = expected(r, RULE_2, teacher_forced=True)[name]
        twice = r.found[name] + value.square().mean().sqrt() / math.sqrt(8)
        assert (error_over_bound(twice, value, bound) > 1).double().mean() > 0.5


@pytest.mark.parametrize("arithmetic", HALVES)
def test_sums_over_a_large_group_err_by_more_than_the_store_of_each_head(arithmetic: str) -> None:
    r = of_group(arithmetic, 128)
    stored = replace(r.kernel, arithmetic=replace(ARITHMETIC[arithmetic], dk_dv_per_head=True))
    found = ratios(replace(r, kernel=stored), RULE_2)
    assert min(found["dk"].max(), found["dv"].max()) > 1
    assert max(found["out"].max(), found["dq"].max()) <= 1


TERMS: dict[str, tuple[int, ...]] = {"bias": (2, 4, 40, 50), "mask": (2, 1, 1, 50), "slopes": (4,)}
"""What is added to scores, with the shape of its tensor."""


def rule_of(name: str, dtype: torch.dtype) -> ScoreRule:
    """Return a bias of normal numbers, one of 0 and -10000, or slopes of float32."""
    x = torch.randn(TERMS[name], generator=torch.Generator().manual_seed(1))
    if name == "slopes":
        return ScoreRule(alibi_slopes=x.abs())
    return ScoreRule(bias=(torch.where(x > 0.5, -1e4, 0.0) if name == "mask" else x).to(dtype))


def added_in_base_2(rule: ScoreRule, leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added, (batch or 1, 4, 40, 50) or with dimensions of 1: slopes and their products are rounded."""
    if rule.bias is not None:
        return (leaf / math.log(2)).float()
    distance = (torch.arange(40)[:, None] + 10 - torch.arange(50)).abs()
    return (-(leaf / math.log(2)).to(dtype)[:, None, None] * distance).to(dtype).float()


def of_rounded_terms(dtype: torch.dtype, name: str) -> tuple[dict[str, Tensor], Exact, Tensor]:
    """Return what a kernel in base 2 gives that rounds what it adds, the exact quantities, and dout, folded."""
    generator, rule = torch.Generator().manual_seed(5), rule_of(name, dtype)
    shapes = ((2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16), (2, 4, 40, 16))
    q, k, v, dout = (torch.randn(x, generator=generator).to(dtype) for x in shapes)
    (term,) = rule.tensors.values()
    leaves = [x.clone().requires_grad_() for x in (q, k, v, term)]
    keys, values = (x.float().repeat_interleave(2, 1) for x in leaves[1:3])
    s = leaves[0].float() @ keys.mT * (0.3 / math.log(2)) + added_in_base_2(rule, leaves[3], dtype)
    top = s.detach().amax(-1, keepdim=True)
    p = torch.exp2(s - top)
    total = p.sum(-1, keepdim=True)
    out = (p / total @ values).to(dtype)
    found = dict(zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad(out, leaves, dout), strict=True))
    found |= {"out": out.detach(), "lse": (top + total.detach().log2())[..., 0] * math.log(2)}
    return found, exact(q, k, v, causal=False, sm_scale=0.3, rule=rule), fold(dout, 2).double()


def largest_ratios(
    found: dict[str, Tensor], e: Exact, dout: Tensor, safety: float | None, **changes: Any
) -> dict[str, float]:
    """Return the largest error over bound of each result, with gradients judged at the kernel's own out and lse."""
    dtype = str(found["out"].dtype).removeprefix("torch.")
    a = replace(ARITHMETIC[dtype], delta="probabilities", **changes)
    f = forward_bounds(e, a, safety=safety)
    own: dict[str, Any] = {name: fold(found[name], 2).double() for name in ("out", "lse")}
    shape = found["dbias"].shape if found["dbias"].ndim == 4 else None
    b = backward_bounds(e, dout, a, safety=safety, bias_shape=shape, **own)
    folded = {"out": (e.out, f.out), "lse": (e.lse, f.lse), "dq": (b.dq, b.dq_bound)}
    judged = {name: (unfold(value, 4), unfold(bound, 4)) for name, (value, bound) in folded.items()}
    judged |= {"dk": (b.dk, b.dk_bound), "dv": (b.dv, b.dv_bound)}
    if b.dbias is not None and b.dbias_bound is not None:
        judged["dbias"] = (b.dbias, b.dbias_bound)
    assert all(pair[1].isfinite().all() for pair in judged.values())
    return {name: float(error_over_bound(found[name], *pair).max()) for name, pair in judged.items()}


@pytest.mark.parametrize("safety", [None, SAFETY])
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_terms_of_scores_stay_within_both_rules(
    dtype: torch.dtype, term: str, safety: float | None
) -> None:
    given = of_rounded_terms(dtype, term)
    assert max(largest_ratios(*given, safety, rounded_bias=True).values()) <= 1
    # A mask of -10000 makes weights 0 however it is rounded.
    assert (max(largest_ratios(*given, safety).values()) <= 1) == (term == "mask")
