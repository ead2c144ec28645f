"""Earlier calls: each kind differs from the judged call in what its name says, and is claimed."""

from dataclasses import replace

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.earlier import (
    KINDS,
    MOST_CALLS,
    earlier_case,
    kinds_of,
    last_earlier,
    sequences_of,
    with_calls_at_most,
    with_last_earlier,
)

CLAIMS = Capabilities(ragged=("cache",))
CASE = Case(batch=2, seqlen_q=5, seqlen_k=40, seed=7)
LENGTHS = ("seqlen_q", "seqlen_k")
OTHER = {
    **dict.fromkeys(("same", "values", "keys", "memory", "freed", "refused"), ()),
    **dict.fromkeys(("tables", "shorter", "longer"), LENGTHS),
    "heads": ("batch", "heads_kv"),
    "head_dim": ("head_dim", "v_head_dim"),
    "scale": ("sm_scale",),
    "mask": ("causal",),
    "dtype": ("dtype",),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "refused"])
def test_a_call_differs_in_what_its_kind_says(kind: str) -> None:
    for number in range(12):
        case = earlier_case(CLAIMS, CASE, kind, number)
        assert case is not None
        assert CLAIMS.admits(case)
        differing = {name for name, x in vars(case).items() if x != getattr(CASE, name)} - {"seed"}
        assert differing <= {*OTHER[kind]}
        assert differing or not OTHER[kind]


def test_many_longer_calls_all_have_other_lengths() -> None:
    cases = [earlier_case(CLAIMS, CASE, "longer", number) for number in range(MOST_CALLS)]
    assert len({case.seqlen_k for case in cases if case}) == MOST_CALLS


def test_kinds_follow_the_claims() -> None:
    assert set(kinds_of(CLAIMS)) == {*KINDS}
    few = Capabilities(causal=(True,), dtypes=("float16",), sm_scale="default", head_dims=(64,))
    assert {*KINDS} - {*kinds_of(few)} == {"mask", "dtype", "scale", "head_dim", "tables"}


def test_no_call_is_made_that_is_not_claimed() -> None:
    decode = Capabilities(max_seqlen_q=1, min_seqlen_k=40)
    one = replace(CASE, seqlen_q=1)
    assert earlier_case(decode, one, "shorter", 0) is None
    longer = earlier_case(decode, one, "longer", 0)
    assert longer is not None
    assert (longer.seqlen_q, longer.seqlen_k) == (1, 41)


def test_a_case_of_many_calls_is_tiny() -> None:
    large = replace(
        CASE, seqlen_q=200, seqlen_k=300, heads_kv=7, group=8, earlier=("same", "values"), rounds=300
    )
    small = with_calls_at_most(CLAIMS, large)
    assert small.rounds * len(small.earlier) == MOST_CALLS
    assert max(small.seqlen_q, small.seqlen_k, small.batch * small.heads_q) <= 8
    assert with_calls_at_most(CLAIMS, replace(large, rounds=1)) == replace(large, rounds=1)


def test_tables_are_of_ragged_calls_alone() -> None:
    assert with_calls_at_most(CLAIMS, replace(CASE, earlier=("tables",))).earlier == ("shorter",)
    assert with_calls_at_most(CLAIMS, replace(CASE, earlier=("refused",), ragged="cache")).earlier == (
        "tables",
    )


def test_the_last_earlier_call_can_be_exchanged() -> None:
    assert last_earlier(CASE) is None
    case = with_last_earlier(replace(CASE, earlier=("same", "mask")), "values")
    assert case.earlier == ("same", "values")
    assert last_earlier(case) == "values"


def test_sequences_have_each_kind_alone_then_all_then_many() -> None:
    tried = [*sequences_of(CLAIMS, CASE, of_gradients=True)]
    assert [case.earlier for case in tried[: len(KINDS)]] == [(kind,) for kind in kinds_of(CLAIMS)]
    assert {case.inference for case in tried} == {False}
    assert max(case.rounds for case in tried) == MOST_CALLS
    assert {case.inference for case in sequences_of(CLAIMS, CASE, of_gradients=False)} == {False, True}
