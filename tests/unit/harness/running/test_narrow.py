"""The claim that separates refused cases from answered ones is found from cases as they are drawn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from kernels.contract import default_scale
from kernels.contract.parsing import PLAIN_FUNCTION, parse_claims
from strategies.case import TENSORS, Case
from strategies.cases import cases
from tests.harness.running.learned_claims import candidates, narrowing
from tests.unit.support.drawing import sample

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
        (lambda c: c.seqlen_q > 8, "max_seqlen_q=8"),
        (lambda c: c.seqlen_k < 4, "min_seqlen_k=4"),
        (lambda c: c.seqlen_q > c.seqlen_k, "seqlens=q_at_most_k"),
        (lambda c: c.scale != default_scale(c.head_dim), "sm_scale=default"),
        (lambda c: c.scale not in (0.5, 0.3), "sm_scale=0.3,0.5"),
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
    assert [claim for claim, _ in narrowing(refused, answered, WIDE)] == [claim]
    narrowed = parse_claims([claim], WIDE)
    assert not any(narrowed.admits(case) for case in refused)
    assert all(narrowed.admits(case) for case in answered)


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
    found = [claim for claim, _ in narrowing(refused, answered, WIDE)]
    assert {claim.partition("=")[0] for claim in found} == keys
    narrowed = parse_claims(found, WIDE)
    assert [case for case in some_cases if narrowed.admits(case)] == answered


def test_no_claims_where_the_cases_are_alike(some_cases: list[Case]) -> None:
    assert not list(narrowing(some_cases, some_cases, WIDE))
    assert not list(narrowing(some_cases, [], WIDE))


def test_a_claim_may_lose_a_few_cases_where_it_is_allowed_to(some_cases: list[Case]) -> None:
    few = [case for case in some_cases if case.causal and case.seqlen_k == 0]
    answered = [*(case for case in some_cases if not case.causal), *few]
    refused = [case for case in some_cases if case.causal and case.seqlen_k > 0]
    assert "causal=false" not in [claim for claim, _ in narrowing(refused, answered, WIDE)]
    assert [claim for claim, _ in narrowing(refused, answered, WIDE, 0.05)] == ["causal=false"]


def test_what_is_claimed_already_is_not_offered_again() -> None:
    claimed = parse_claims(["causal=false", "grouped_heads=false"], PLAIN_FUNCTION)
    cases = [Case(dtype="float16")], [Case(), Case(seqlen_q=300)]
    assert [claim for claim, _ in narrowing(*cases, claimed)] == ["dtypes=float32"]


def test_no_claim_is_found_that_contradicts_another() -> None:
    packed = parse_claims(["ragged=packed", "dense=false"], PLAIN_FUNCTION)
    assert "ragged=none" not in candidates([Case(ragged="packed")], packed)
    assert "dense=false" in candidates([Case(ragged="packed")], replace(packed, dense=True))
    assert "dense=false" not in candidates([Case()], PLAIN_FUNCTION)


def test_every_candidate_is_narrower() -> None:
    for claim in candidates([Case(seqlen_q=3, seqlen_k=5, sm_scale=0.5), Case(seqlen_q=300)], WIDE):
        assert parse_claims([claim], WIDE) != WIDE
