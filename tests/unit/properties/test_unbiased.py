"""The law ``unbiased``: it finds biases that no element shows, tells them in words, and accuses no sound design."""

from dataclasses import replace
from math import inf

import pytest
import torch

from kernels.contract import AttentionKernel
from kernels.contract.parsing import PLAIN_FUNCTION, parse_claims
from kernels.registry import load
from reference.bounds.accumulation import SAFETY, SHRINKING_SAFETY
from strategies.case import Case
from tests.harness.law import law_named
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Finding
from tests.panel import PANEL, Member
from tests.properties.test_unbiased import judged
from tests.unit.support.biased import BIASED, SOUND, kernel

SQUARE = Case(heads_kv=2, seqlen_q=64, seqlen_k=64, head_dim=64, seed=1)
CAUSAL = Case(batch=2, heads_kv=2, group=2, seqlen_q=64, seqlen_k=100, head_dim=64, causal=True, seed=2)
FEW_KEYS = Case(heads_kv=4, seqlen_q=130, seqlen_k=32, head_dim=32, seed=3)
CASES = (SQUARE, CAUSAL, FEW_KEYS)
DTYPES = ("float16", "bfloat16", "float32")
IN_WORDS = {
    "p_cut": "too small by 0.",
    "stores_cut": "too small by 0.",
    "lse_shifted": "is too large by 1.",
    "delta_large": "is what a delta gives that is too large by 0.004",
}


def tried(steps: dict[str, object], case: Case, dtype: str, safety: float = SAFETY) -> Trial:
    """Return a trial of a plain function with these steps."""
    made = AttentionKernel(name="plain", forward=kernel(**steps), capabilities=PLAIN_FUNCTION)
    return Trial(made, replace(case, dtype=dtype), "cpu", safety)


def found(trial: Trial) -> Finding | None:
    """Return what the law finds wrong."""
    try:
        law_named("unbiased")(trial)
    except LawBroken as broken:
        return broken.finding
    return None


@pytest.mark.parametrize("name", BIASED)
def test_bias_is_found_and_told(name: str) -> None:
    steps, tensors = BIASED[name]
    for case in CASES:
        finding = found(tried(steps, case, "float16"))
        assert finding
        assert set(finding.tensors) <= set(tensors)
        assert IN_WORDS.get(name, " in the mean") in finding.certificate, finding.certificate


@pytest.mark.parametrize(
    "name", ["lse_shifted", "dq_large", "dk_large", "dv_large", "lse_large", "exp_small"]
)
def test_bias_is_found_in_float32(name: str) -> None:
    assert all(found(tried(BIASED[name][0], case, "float32")) for case in CASES)


@pytest.mark.parametrize("name", ["p_cut", "ds_cut", "stores_cut", "narrow_accumulator"])
def test_cut_numbers_are_found_in_bfloat16(name: str) -> None:
    assert all(found(tried(BIASED[name][0], case, "bfloat16")) for case in CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SOUND)
def test_sound_kernel_is_not_accused(name: str, dtype: str) -> None:
    """The bounds are for one call in 10^12, so that in a few a sound kernel comes nowhere near them."""
    for case in CASES:
        trial = tried(SOUND[name], case, dtype)
        assert found(trial) is None
        assert max(trial.worst.values()) < 0.5


@pytest.mark.parametrize("member", [x for x in PANEL if not x.is_triton], ids=lambda member: member.name)
def test_member_of_the_panel_is_not_accused(member: Member) -> None:
    for dtype in DTYPES:
        claimed = load(member.spec, member.claims)
        if dtype in claimed.capabilities.dtypes:
            assert found(Trial(claimed, replace(CAUSAL, dtype=dtype), "cpu", SAFETY)) is None


def test_claim_that_gives_a_bias_widens_the_bound() -> None:
    wide = parse_claims(["exp_error=1e-3"], PLAIN_FUNCTION)
    trial = tried(BIASED["exp_small"][0], SQUARE, "float32")
    assert found(replace(trial, kernel=replace(trial.kernel, capabilities=wide))) is None


def test_few_elements_are_not_averaged() -> None:
    """A bias cannot be shrunk to a case of few elements, where it would be a rounding like others."""
    trial = tried(BIASED["dq_large"][0], Case(seqlen_q=15, seqlen_k=15, head_dim=64), "float16")
    assert found(trial) is None
    assert not trial.calls


def test_shrinking_needs_a_clear_bias() -> None:
    ratios = []
    for safety in (SAFETY, SHRINKING_SAFETY):
        finding = found(tried(BIASED["dv_large"][0], SQUARE, "float16", safety))
        assert finding
        ratios.append(float(finding.ratio or 0))
    assert ratios[0] > 1.5 * ratios[1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [{}, {"dq": 1.01, "dk": 1.02, "of_lse": 1.001}])
def test_expressions_give_the_means(case: Case, steps: dict[str, object]) -> None:
    """A stand-alone script computes the mean from the call's tensors, without Flashproof."""
    trial = tried(steps, case, "float16")
    found(trial)
    call, given = trial.calls[-1], trial.given[-1]
    p = call.problem
    names = {"torch": torch, "inf": inf, "q": p.q, "k": p.k, "v": p.v, "dout": p.dout, **given.named()}
    checks = [check for _, check in judged(trial, p, given)]
    assert len(checks) == 12
    for check in checks:
        computed = eval(check.expression, names)  # as the script does it
        torch.testing.assert_close(computed, check.actual, rtol=1e-9, atol=1e-12)
