"""Claims that are advised are those under which the kernel answers; else it is told what refusals have in common."""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st

from kernels.contract import Capabilities
from kernels.contract.parsing import PLAIN_FUNCTION, parse_claims
from strategies.case import Case
from strategies.cases import cases
from tests.harness.clock import BudgetSpent
from tests.harness.law import basic_laws, law_named
from tests.harness.running.refusals import Advice, Seen, alike, complaint
from tests.harness.running.tally import Tally, plain
from tests.harness.session.advice import advised
from tests.harness.verdict import Finding, Verdict
from tests.unit.support.drawing import sample
from tests.unit.support.stubs import runs_of

DRAWN, FEW = 200, 10
"""So many cases are drawn from claims that are advised, and so few of them may be refused."""

Rule = Callable[[Case, bool], object]
"""Whether a kernel refuses a case, with or without gradients."""


def lies_as_contiguous(case: Case) -> bool:
    return {*plain(case).layouts} == {"contiguous"}


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "one query": (lambda c, _: c.seqlen_q > 1, ("max_seqlen_q=1",)),
    "few queries": (lambda c, _: c.seqlen_q > 8, ("max_seqlen_q=8",)),
    "no more queries than keys": (lambda c, _: c.seqlen_q > c.seqlen_k, ("seqlens=q_at_most_k",)),
    "some keys": (lambda c, _: c.seqlen_k < 16, ("min_seqlen_k=16",)),
    "paged": (lambda c, _: c.ragged != "paged", ("ragged=paged", "dense=false")),
    "the default scale": (lambda c, _: c.sm_scale is not None, ("sm_scale=default",)),
    "two scales": (lambda c, _: c.scale not in (0.125, 1.0), ("sm_scale=0.125,1",)),
    "whole tiles": (
        lambda c, _: c.seqlen_q % 64 or c.seqlen_k % 64 or min(c.seqlen_q, c.seqlen_k) < 128,
        ("seqlen_multiple=64", "min_seqlen=128"),
    ),
    "one head_dim": (lambda c, _: c.head_dim != 64, ("head_dims=64",)),
    "causal": (lambda c, _: not c.causal, ("causal=true",)),
    "not causal": (lambda c, _: c.causal, ("causal=false",)),
    "equal heads": (lambda c, _: c.group > 1, ("grouped_heads=false",)),
    "contiguous": (lambda c, _: not lies_as_contiguous(c), ("layouts=contiguous",)),
    "16 bits": (lambda c, _: c.dtype == "float32", ("dtypes=float16,bfloat16",)),
    "no gradients": (lambda c, with_gradients: with_gradients, ("backward=false",)),
    "causal gradients": (lambda c, with_gradients: with_gradients and not c.causal, ("backward=causal",)),
    "two": (lambda c, _: c.group > 1 or c.head_dim < 64, ("head_dims=64,128", "grouped_heads=false")),
}
"""What a kernel refuses, by what it takes, and the claims that say so."""

UNSAYABLE: dict[str, tuple[Rule, str]] = {
    "even keys": (lambda c, _: c.seqlen_k % 2, "odd seqlen_k"),
    "masked decode": (lambda c, _: c.causal and c.heads_kv > 1, "several key heads, the causal mask"),
}
"""Rules that no claim says, by what a kernel takes, and what is told instead."""


def kernel(rule: Rule) -> Any:
    """Return what stands in for ``Runs`` of a plain function that refuses what the rule says."""

    def status(law: str, case: Case, claims: tuple[str, ...] = ()) -> str:
        claimed = parse_claims(claims, PLAIN_FUNCTION)
        is_refused = rule(case, law == "backward" and claimed.gives_gradients(causal=case.causal))
        return "refused" if is_refused else "held"

    return runs_of(PLAIN_FUNCTION, status=status, judged=lambda *_, **__: None, device_type="cpu")


def drawn(law: str, claimed: Capabilities, number: int) -> list[Case]:
    of_dtypes = (cases(claimed, dtype=dtype, **law_named(law).draws) for dtype in claimed.dtypes)
    return sample(st.one_of(*of_dtypes), number)


@pytest.fixture(scope="module")
def some() -> Mapping[str, list[Case]]:
    """Return cases that are drawn from all that a plain function claims, by law."""
    return {law: drawn(law, PLAIN_FUNCTION, DRAWN) for law in basic_laws()}


def seen_by(runs: Any, some: Mapping[str, list[Case]]) -> dict[str, Seen]:
    """Return the laws under which a kernel refuses some of the cases, with these."""
    refusing = {}
    for law, of_law in some.items():
        found = {case: runs.status(law, case) for case in of_law}
        refused, answered = (
            tuple(plain(case) for case in found if found[case] == status) for status in ("refused", "held")
        )
        if refused:
            refusing[law] = Seen(refused, answered)
    return refusing


def advice_on(runs: Any, some: Mapping[str, list[Case]], spend: Callable[[], None] = lambda: None) -> Advice:
    return advised(runs, seen_by(runs, some), spend, lambda: ["cache", "paged"])


@pytest.mark.parametrize(("rule", "claims"), RULES.values(), ids=RULES)
def test_a_kernel_answers_what_it_is_advised_to_claim(
    some: Mapping[str, list[Case]], rule: Rule, claims: tuple[str, ...]
) -> None:
    runs = kernel(rule)
    advice = advice_on(runs, some)
    assert {*advice.claims} == {*claims}
    claimed = parse_claims(claims, PLAIN_FUNCTION)
    found = [runs.status("forward", case, claims) for case in drawn("forward", claimed, DRAWN)]
    assert found.count("refused") <= FEW
    assert advice.asked - advice.answered <= FEW


@pytest.mark.parametrize(("rule", "told"), UNSAYABLE.values(), ids=UNSAYABLE)
def test_what_no_claim_says_is_told_by_what_refusals_have_in_common(
    some: Mapping[str, list[Case]], rule: Rule, told: str
) -> None:
    runs = kernel(rule)
    advice = advice_on(runs, some)
    assert advice.claims == ()
    # Which of two traits comes first is a matter of the draw.
    assert {*alike(advice.seen.refused, advice.seen.answered)} == {*told.split(", ")}


def test_a_kernel_that_refuses_everything_is_asked_in_vain(some: Mapping[str, list[Case]]) -> None:
    assert advice_on(kernel(lambda c, _: True), some).claims == ()


def test_a_case_that_can_not_be_run_is_no_answer(some: Mapping[str, list[Case]]) -> None:
    runs = kernel(lambda c, _: c.causal)
    refusing = seen_by(runs, some)
    runs.status = lambda *_: "skipped"
    assert advised(runs, refusing, lambda: None, list).claims == ()


def test_claims_that_there_is_no_time_to_try_are_not_advised(some: Mapping[str, list[Case]]) -> None:
    calls = count()

    def spend() -> None:
        if next(calls) > 60:
            raise BudgetSpent

    assert advice_on(kernel(lambda c, _: c.causal), some, spend).claims == ()


def test_a_kind_of_calls_that_raises_an_exception_is_not_advised(some: Mapping[str, list[Case]]) -> None:
    runs = kernel(lambda c, _: c.ragged == "none")
    runs.judged = lambda law, case, claims: (
        Finding(claim="no", kind="exception") if case.ragged == "cache" else None
    )
    advice = advice_on(runs, some)
    assert advice.claims == ("ragged=paged", "dense=false")


def test_nothing_is_told_to_be_alike_without_answers() -> None:
    assert alike([Case()], []) == alike([], [Case()]) == alike([Case()], [Case()]) == []


def test_several_traits_are_told_where_one_is_not_enough() -> None:
    answered = [Case(causal=True), Case(group=2), Case(seqlen_q=7)]
    assert alike([Case(causal=True, group=2, dtype=x) for x in ("float16", "float32")], answered) == [
        "grouped heads",
        "the causal mask",
    ]


def test_the_complaint_quotes_the_kernel_with_claims_that_were_tried(some: Mapping[str, list[Case]]) -> None:
    runs, tally = kernel(lambda c, _: c.seqlen_q > 1), Tally()
    for case in some["forward"]:
        refused = Verdict(status="refused", reason="seqlen_q must be at most 1")
        held = Verdict(status="held", worst={"out": 0.5})
        tally.add(refused if runs.status("forward", case) == "refused" else held, case)
    told = complaint("decode", {("forward", "float32"): tally}, advice_on(runs, some)) or ""
    assert told.startswith(f"decode: refused {tally.refusals} of {DRAWN} cases that it claims under forward")
    assert "(seqlen_q must be at most 1); claim less: --claims max_seqlen_q=1 (tried: " in told
