"""The rules of other suites: sound kernels pass, gross bugs fail, and bugs that a rule cannot see pass."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.adapters.pytorch.sdpa import MATH
from kernels.algorithms import flash_v2
from kernels.contract import AttentionKernel
from tests.mutation.rules import RULES, Rule, RuleBroken, RuleCase
from tests.unit.support.calling import DEVICE

BY_NAME = {rule.name: rule for rule in RULES}
CRY_WOLF = ("torch.testing.assert_close",)
"""Rules that fail a sound kernel in float16."""

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def mutant(change: Callable[..., Any]) -> AttentionKernel:
    """Return flash_v2 with a forward whose results are changed: it returns ``change(out, lse, v)``."""

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return change(*flash_v2.forward(q, k, v, **options), v)

    return replace(flash_v2.KERNEL, forward=forward)


HALF = mutant(lambda out, lse, v: (out * 0.5, lse))
NAN = mutant(lambda out, lse, v: (torch.full_like(out, torch.nan), lse))


def small(rule: Rule) -> RuleCase:
    """Return the cheapest of a rule's cases that has an output, in float16 or float32."""
    cases = [c for c in rule.cases(DEVICE) if c.dtype != "bfloat16" and c.seqlen_q]
    return min(cases, key=lambda c: c.batch * c.heads_q * c.seqlen_q * c.seqlen_k * c.head_dim)


@each_rule
def test_sound_kernels_pass(rule: Rule) -> None:
    case = small(rule)
    if rule.name in CRY_WOLF:
        with pytest.raises(RuleBroken, match="not close"):
            rule.judge(flash_v2.KERNEL, case, DEVICE)
        return
    rule.judge(flash_v2.KERNEL, case, DEVICE)
    if not (case.causal and case.seqlen_q != case.seqlen_k):  # PyTorch has another mask there
        rule.judge(MATH, case, DEVICE)


@each_rule
@pytest.mark.parametrize("wrong", [HALF, NAN], ids=["half", "nan"])
def test_gross_bugs_are_caught(rule: Rule, wrong: AttentionKernel) -> None:
    with pytest.raises(RuleBroken):
        rule.judge(wrong, small(rule), DEVICE)


@each_rule
def test_what_a_kernel_raises_passes_through(rule: Rule) -> None:
    def forward(*args: Any, **options: Any) -> Any:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        rule.judge(replace(flash_v2.KERNEL, forward=forward), small(rule), DEVICE)


@each_rule
def test_cases_are_the_same_on_every_call(rule: Rule) -> None:
    for device in ("cpu", "cuda"):
        cases = list(rule.cases(device))
        assert cases
        assert cases == list(rule.cases(device))
        assert all(case.heads_q % case.heads_kv == 0 and case.head_dim <= 256 for case in cases)
    assert len(rule.cases("cpu")) <= 12


def test_kernelbench_passes_uniform_attention_in_half_precision() -> None:
    average = mutant(lambda out, lse, v: (v.mean(2, keepdim=True).expand_as(out).contiguous(), lse))
    rule = BY_NAME["KernelBench (float16)"]
    rule.judge(average, small(rule), DEVICE)
    rule = BY_NAME["KernelBench (float32)"]
    with pytest.raises(RuleBroken):
        rule.judge(average, small(rule), DEVICE)


@each_rule
def test_only_xformers_looks_at_lse(rule: Rule) -> None:
    if rule.name in CRY_WOLF:
        pytest.skip("fails sound kernels too")
    # What the forward reports is wrong, what the backward takes from it is right.
    wrong = replace(
        mutant(lambda out, lse, v: (out, lse + 1)),
        backward=lambda dout, q, k, v, out, lse, **options: flash_v2.backward(
            dout, q, k, v, out, lse - 1, **options
        ),
    )
    if rule.name == "xformers":
        with pytest.raises(RuleBroken, match="lse"):
            rule.judge(wrong, small(rule), DEVICE)
    else:
        rule.judge(wrong, small(rule), DEVICE)


def test_xformers_sees_what_lies_behind_the_tensors() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        out, lse = flash_v2.forward(q, k, v, **options)
        last = k.storage_offset() + (k.shape[2] - 1) * k.stride(2) + k.shape[1] * k.stride(1) - 1
        elements = k.untyped_storage().nbytes() // k.element_size()
        behind = k.as_strided((1,), (1,), min(last + 1, elements - 1))
        return out + 0 * behind, lse

    rule = BY_NAME["xformers"]
    case = next(c for c in rule.cases(DEVICE) if c.batch == 1 and c.seqlen_k % 256 and c.dtype != "bfloat16")
    with pytest.raises(RuleBroken, match="behind"):
        rule.judge(replace(flash_v2.KERNEL, forward=forward), case, DEVICE)
