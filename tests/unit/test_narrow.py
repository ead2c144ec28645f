"""The claim that separates refused cases from answered ones is found from cases as they are drawn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from kernels.claims import PLAIN_FUNCTION, parse_claims
from strategies.case import TENSORS, Case
from strategies.cases import cases
from tests.harness.narrow import narrower, narrowing
from tests.unit.drawing import sample

WIDE = replace(
    PLAIN_FUNCTION, head_dims=tuple(range(1, 257)), key_padding=True, dropout=(0.0, 0.1), window=(0, 7)
)


@pytest.fixture(scope="module")
def some_cases() -> list[Case]:
    """Return cases of all dtypes as the law ``forward`` draws them."""
    options: dict[str, Any] = {"key_padding": True, "dropout": True, "variants": True}
    return sample(st.one_of(*(cases(WIDE, dtype=dtype, **options) for dtype in WIDE.dtypes)), 700)


def layouts(case: Case) -> set[str]:
    return {getattr(case, f"{tensor}_layout") for tensor in TENSORS}


@pytest.mark.parametrize(
    ("is_refused", "claim"),
    [
        (lambda c: c.causal and c.seqlen_q != c.seqlen_k, "causal_unequal_lengths=false"),
        (lambda c: c.seqlen_q != c.seqlen_k, "unequal_lengths=false"),
        (lambda c: c.causal, "causal=false"),
        (lambda c: not c.causal, "causal=true"),
        (lambda c: c.group > 1, "grouped_heads=false"),
        (lambda c: c.scale <= 0, "sm_scale=positive"),
        (lambda c: c.dtype == "bfloat16", "dtypes=float16,float32"),
        (lambda c: c.dtype != "float16", "dtypes=float16"),
        (lambda c: c.head_dim not in (64, 128), "head_dims=64,128"),
        (lambda c: c.head_dim.bit_count() > 1, "head_dims=1,2,4,8,16,32,64,128,256"),
        (lambda c: c.head_dim > 128, "head_dims=1-128"),
        (lambda c: min(c.seqlen_q, c.seqlen_k) == 0, "min_seqlen=1"),
        (lambda c: min(c.seqlen_q, c.seqlen_k) < 16, "min_seqlen=16"),
        (lambda c: c.seqlen_q % 16 or c.seqlen_k % 16, "seqlen_multiple=16"),
        (lambda c: "gap" in layouts(c), "layouts=contiguous,bnhd,packed,offset,expanded,expanded_rows,huge"),
        (lambda c: layouts(c) - {"contiguous", "bnhd", "packed"}, "layouts=contiguous,bnhd,packed"),
        (lambda c: layouts(c) - {"contiguous"}, "layouts=contiguous"),
        (lambda c: c.key_padding != "none", "key_padding=false"),
        (lambda c: c.dropout_p > 0, "dropout=0"),
        (lambda c: c.window > 0, "window=0"),
    ],
)
def test_each_claim_is_found(
    some_cases: list[Case], is_refused: Callable[[Case], object], claim: str
) -> None:
    refused = [case for case in some_cases if is_refused(case)]
    answered = [case for case in some_cases if not is_refused(case)]
    assert narrower(refused, answered, WIDE) == claim
    narrowed = parse_claims([claim], WIDE)
    assert not any(narrowed.admits(case) for case in refused)
    assert all(narrowed.admits(case) for case in answered)


def test_what_no_claim_tells_apart(some_cases: list[Case]) -> None:
    assert narrower(some_cases[::2], some_cases[1::2], WIDE) is None


def test_two_conditions_are_not_one_claim(some_cases: list[Case]) -> None:
    answered = [case for case in some_cases if not case.causal and case.group == 1]
    refused = [case for case in some_cases if case.causal or case.group > 1]
    assert narrower(refused, answered, WIDE) is None


@pytest.mark.parametrize(
    ("is_answered", "keys"),
    [
        (lambda c: not c.causal and c.group == 1, {"causal", "grouped_heads"}),
        (lambda c: c.dtype == "float16" and c.scale > 0, {"dtypes", "sm_scale"}),
        (lambda c: c.head_dim % 8 == 0 and c.causal, {"head_dims", "causal"}),
        (
            lambda c: min(c.seqlen_q, c.seqlen_k) >= 16 and layouts(c) == {"contiguous"},
            {"min_seqlen", "layouts"},
        ),
    ],
)
def test_several_claims_are_found_together(
    some_cases: list[Case], is_answered: Callable[[Case], bool], keys: set[str]
) -> None:
    answered = [case for case in some_cases if is_answered(case)]
    refused = [case for case in some_cases if not is_answered(case)]
    assert narrower(refused, answered, WIDE) is None
    found = [claim for claim, _ in narrowing(refused, answered, WIDE)]
    assert {claim.partition("=")[0] for claim in found} == keys
    narrowed = parse_claims(found, WIDE)
    assert [case for case in some_cases if narrowed.admits(case)] == answered


def test_no_claims_where_the_cases_are_alike(some_cases: list[Case]) -> None:
    assert not list(narrowing(some_cases[::2], some_cases[1::2], WIDE))
    assert not list(narrowing(some_cases, [], WIDE))


def test_a_claim_that_leaves_nothing_is_none() -> None:
    assert narrower([Case(causal=True)], [], PLAIN_FUNCTION) is None
    assert narrower([Case(causal=True)], [Case(causal=True)], PLAIN_FUNCTION) is None


def test_what_is_lost_of_the_others_is_as_little_as_possible() -> None:
    others = [Case(dtype="float16", causal=True), Case(dtype="float16"), Case()]
    assert narrower([Case(dtype="float16", causal=True, head_dim=64)], others, PLAIN_FUNCTION) == (
        "head_dims=16,32"
    )


def test_what_is_claimed_already_is_not_offered_again() -> None:
    claimed = parse_claims(["causal=false", "grouped_heads=false"], PLAIN_FUNCTION)
    cases = [Case(dtype="float16")], [Case(), Case(causal=True)]
    assert narrower(*cases, claimed) == "dtypes=bfloat16,float32"
