"""A case with ordinary numbers tells a wrong tensor from roundings, where bounds of huge scores excuse nearly all."""

import pytest

from strategies.case import Case, Spike
from tests.harness.designs.explanations import is_wrong_with_ordinary_numbers, with_explanations
from tests.harness.designs.same_case import left_with_ordinary_numbers, with_ordinary_numbers
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS
from tests.unit.support.running import TOYS, broken

OF_BIAS = ("bias=all", "bias_gradient=true")
MASKED = Case(
    group=2,
    seqlen_q=64,
    seqlen_k=64,
    head_dim=64,
    dtype="float16",
    bias="full",
    q_values="outliers",
    k_values="outliers",
)
"""A case whose bias hides keys by a number that is far larger than any score."""


def test_the_numbers_are_ordinary_and_the_rest_stays() -> None:
    spikes = (Spike(tensor="q", index=(0, 0, 0, 0), value=1e5),)
    case = Case(seqlen_q=2, seqlen_k=40, causal=True, q_values="huge", sm_scale=3.0, seed=8, spikes=spikes)
    assert [*with_ordinary_numbers(case)] == [
        Case(seqlen_q=16, seqlen_k=40, causal=True, seed=9),
        Case(seqlen_q=2, seqlen_k=40, causal=True, seed=9),
    ]


def test_a_scale_that_leaves_small_scores_is_kept() -> None:
    assert {case.sm_scale for case in with_ordinary_numbers(Case(sm_scale=0.01))} == {0.01}


@pytest.mark.parametrize("seed", [0, 4])
def test_a_gradient_of_twice_its_size_is_no_matter_of_large_scores(seed: int) -> None:
    case = Case(**{**vars(MASKED), "seed": seed})
    finding, trial = broken(f"{TOYS}:biased", case, "backward", OF_BIAS)
    assert finding.tensor == "dbias"
    assert is_wrong_with_ordinary_numbers(trial, law_named("backward"), {"dbias"})
    assert with_explanations(finding, trial, law_named("backward"), ALL_DESIGNS).explained_by == ()


def test_another_tensor_that_is_wrong_says_nothing() -> None:
    _, trial = broken(f"{TOYS}:biased", MASKED, "backward", OF_BIAS)
    assert not is_wrong_with_ordinary_numbers(trial, law_named("backward"), {"dq"})


def test_a_case_that_is_ordinary_already_is_not_asked_again() -> None:
    case = Case(group=2, seqlen_q=64, seqlen_k=64, head_dim=64, dtype="float16", bias="full", seed=1)
    _, trial = broken(f"{TOYS}:biased", case, "backward", OF_BIAS)
    assert left_with_ordinary_numbers(trial, law_named("backward")) is None


@pytest.mark.parametrize("values", ["outliers", "dominant"])
def test_scores_that_are_rounded_remain_an_explanation(values: str) -> None:
    """They are a design: its errors with ordinary numbers lie within its bounds as well."""
    case = Case(group=2, seqlen_q=64, seqlen_k=64, head_dim=64, dtype="bfloat16", q_values=values)
    finding, trial = broken("tests.panel.narrow:rounded_scores", case, "backward")
    explained = with_explanations(finding, trial, law_named("backward"), ALL_DESIGNS)
    assert "rounded_scores=true" in explained.explained_by
