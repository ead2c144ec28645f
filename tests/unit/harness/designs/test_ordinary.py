"""A design explains a failure only if the errors of an ordinary call are such as it has."""

from dataclasses import replace

import pytest

from kernels.contract import AttentionKernel
from kernels.contract.parsing import PLAIN_FUNCTION
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.designs.explanations import with_explanations
from tests.harness.designs.ordinary import ordinary_call
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Finding
from tests.panel import LESS_PRECISION, Member
from tests.unit.support.biased import BIASED, kernel

CASE = Case(heads_kv=2, seqlen_q=64, seqlen_k=64, head_dim=64, seed=3)
TENSORS = ("out", "lse", "dq", "dk", "dv")
UNEXPLAINED = [
    ("p_cut", "bfloat16"),
    ("stores_cut", "bfloat16"),
    *(("narrow_accumulator", dtype) for dtype in ("float16", "bfloat16")),
    *(
        (name, dtype)
        for name in ("p_small", "lse_shifted", "delta_large")
        for dtype in ("float16", "float32")
    ),
    *((name, dtype) for name in ("dq_large", "dk_large", "dv_large") for dtype in ("float16", "float32")),
    *(("lse_large", dtype) for dtype in ("float16", "bfloat16", "float32")),
]
"""Biased kernels, with dtypes in which no design has such a bias, and in which it is found.

P, dS and stores that are cut to float16 keep as many bits as operands that are truncated to tf32.
"""
EXPLAINED = [("exp_small", "exp_error=1e-4"), ("p_cut", "precision=tf32"), ("ds_cut", "precision=tf32")]
"""Biased kernels with the one claim that is told in float16: what they do."""


def told(name: str, dtype: str, law: str) -> Finding:
    """Return what is told of a biased kernel by a law."""
    made = AttentionKernel(name=name, forward=kernel(**BIASED[name][0]), capabilities=PLAIN_FUNCTION)
    trial = Trial(made, replace(CASE, dtype=dtype), "cpu", SAFETY)
    with pytest.raises(LawBroken) as broken:
        law_named(law)(trial)
    return with_explanations(broken.value.finding, trial, law_named(law), ALL_DESIGNS)


@pytest.mark.parametrize(("name", "dtype"), UNEXPLAINED)
def test_bias_is_no_design(name: str, dtype: str) -> None:
    finding = told(name, dtype, "unbiased")
    assert finding.explained_by == ()
    assert " in the mean" in finding.certificate


@pytest.mark.parametrize(("name", "claim"), EXPLAINED)
def test_bias_of_a_design_is_told_by_its_claim(name: str, claim: str) -> None:
    finding = told(name, "float16", "unbiased")
    assert finding.likely == (claim,)


@pytest.mark.parametrize("name", ["lse_shifted", "dq_large", "dv_large"])
def test_failure_by_one_element_says_what_the_means_say(name: str) -> None:
    finding = told(name, "float32", "backward")
    assert finding.explained_by == ()
    assert " in the mean" in finding.certificate


@pytest.mark.parametrize("member", LESS_PRECISION, ids=lambda member: member.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_less_precise_design_is_like_what_is_seen(member: Member, dtype: str) -> None:
    """Where a panel's function is less precise in its gradients alone, these are all that can be wrong."""
    trial = Trial(load(member.spec), replace(CASE, dtype=dtype), "cpu", SAFETY)
    wrong = TENSORS[2:] if member.name.endswith("rounded_dp") else TENSORS
    ordinary = ordinary_call(trial, wrong)
    assert ordinary
    assert not ordinary.multiples
    claims = {claim.rpartition(":")[2] for claim in member.claims}
    if dtype == "float32" or member.name != "narrow.k_prescaled_in_float16":
        needed = claims - {"precision=tf32"} if dtype == "bfloat16" else claims
        rounds = {x for x in needed if dtype != "float32" or x in ("exp_error=1e-4", "precision=tf32")}
        assert not ordinary.unlike_seen() & rounds
