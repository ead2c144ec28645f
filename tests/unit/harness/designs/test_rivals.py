"""Designs of less precision are told apart by which of them comes near to what a call returned."""

from dataclasses import replace
from typing import Any

import pytest

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from reference.family import concerns
from strategies.case import Case
from tests.harness.designs.explanations import with_explanations
from tests.harness.designs.rivals import RIVALS, likeliest
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS
from tests.harness.trial.trial import LawBroken, Trial
from tests.panel.scores import IN_16_BITS

CASE = Case(
    group=2, seqlen_q=24, seqlen_k=40, head_dim=64, dtype="bfloat16", sm_scale=0.3, dout_values="positive"
)
CANCELLING = replace(CASE, v_values="positive")
"""All dP of a row are large and alike, so that dS is the small difference of dP and delta."""


def trial_of(function: str, case: Case) -> Trial:
    return Trial(load(f"tests.panel.narrow:{function}"), case, "cpu", SAFETY)


def rivals_at(dtype: str) -> list[str]:
    return [claim for claim in RIVALS if concerns(claim, dtype)]


def likeliest_for(function: str, case: Case, *wrong: str) -> list[str]:
    trial = trial_of(function, case)
    return likeliest(rivals_at(case.dtype), wrong, trial.problem, trial.gradients(), trial.alignment)


@pytest.mark.parametrize(
    ("function", "claim"),
    [
        ("polynomial_exp", "exp_error=1e-4"),
        ("l_from_rounded_p", "l_from_rounded_p=true"),
        ("k_prescaled", "k_prescaled=true"),
        ("q_prescaled", "q_prescaled=true"),
        ("qk_prescaled", "qk_prescaled=true"),
        ("model_file", "rounded_scores=true"),
        ("rounded_scores", "rounded_scores=true"),
    ],
)
def test_a_wrong_forward_tells_every_rival(function: str, claim: str) -> None:
    assert likeliest_for(function, CASE, "out", "lse") == [claim]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tensor", ["dk", "dv"])
def test_sums_over_a_group_that_are_rounded_are_told_from_all_else(tensor: str, dtype: str) -> None:
    """A claim without a rival is left out as well, since one rival gives the very numbers."""
    case = replace(CASE, group=8, dtype=dtype)
    trial = trial_of("head_by_head", case)
    claims = ["rounded_partials=true", *rivals_at(dtype)]
    found = likeliest(claims, (tensor,), trial.problem, trial.gradients(), trial.alignment)
    assert found == ["rounded_group_sums=true"]


def test_a_claim_without_a_rival_is_left_where_no_rival_gives_the_numbers() -> None:
    trial = trial_of("q_prescaled", replace(CASE, group=8))
    claims = ["rounded_partials=true", "rounded_group_sums=true", "exp_error=1e-4"]
    found = likeliest(claims, ("dv",), trial.problem, trial.gradients(), trial.alignment)
    assert "rounded_partials=true" in found


@pytest.mark.parametrize("changes", [{"bias": "full"}, {"alibi_slopes": True}])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_rounded_bias_is_told_from_scores_that_are_rounded(changes: dict[str, Any], dtype: str) -> None:
    case = replace(CASE, dtype=dtype, seed=1, **changes)
    kernel = load("tests.panel.scores:in_16_bits", IN_16_BITS[:-1])
    trial = Trial(kernel, case, "cpu", SAFETY)
    found = likeliest(rivals_at(dtype), ("out", "lse"), trial.problem, trial.gradients(), trial.alignment)
    assert found == ["rounded_bias=true"]


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        ("float32", ("out", "lse")),
        *((dtype, (name,)) for dtype in ("float16", "float32") for name in ("dq", "dk")),
    ],
)
def test_products_in_tf32_are_told_from_an_exp_that_errs(dtype: str, wrong: tuple[str, ...]) -> None:
    assert likeliest_for("tf32_of_converted", replace(CASE, dtype=dtype), *wrong) == ["precision=tf32"]


def test_a_product_with_v_in_tf32_is_told_where_lse_is_precise() -> None:
    assert likeliest_for("tf32_of_weights", replace(CASE, dtype="float32"), "out") == ["precision=tf32"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_exp_that_errs_is_not_taken_for_products_in_tf32(dtype: str) -> None:
    """Of float16, out alone does not tell the two apart, and the claim of smaller errors comes first."""
    assert likeliest_for("polynomial_exp", replace(CASE, dtype=dtype), "out", "lse")[0] == "exp_error=1e-4"


@pytest.mark.parametrize("tensor", ["dq", "dk"])
def test_a_rounded_dp_is_told_by_gradients_where_the_forward_is_precise(tensor: str) -> None:
    assert likeliest_for("rounded_dp", CANCELLING, tensor) == ["rounded_scores=true"]


def test_what_no_rounding_explains_is_no_matter_of_a_rounded_dp() -> None:
    """A forward with a less precise exp has errors that a rounded dP could not have caused."""
    assert "exp_error=1e-4" in likeliest_for("polynomial_exp", CANCELLING, "dq")


def test_few_numbers_tell_nothing() -> None:
    one_row = replace(CASE, group=1, seqlen_q=1)
    assert likeliest_for("model_file", one_row, "lse") == rivals_at(one_row.dtype)


def test_scores_in_the_inputs_dtype_are_not_taken_for_a_scaled_operand() -> None:
    trial = trial_of("model_file", CASE)
    with pytest.raises(LawBroken) as failed:
        law_named("backward")(trial)
    explained = with_explanations(failed.value.finding, trial, law_named("backward"), ALL_DESIGNS)
    assert explained.likely == ("rounded_scores=true",)
