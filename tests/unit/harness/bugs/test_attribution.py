"""One bug stays one in further tensors, other numbers, dtypes and lengths, and if there are two ways to trigger it."""

from dataclasses import replace
from typing import Any

import pytest

from kernels.contract import GRADIENTS
from strategies.case import Case
from strategies.features import SCORES
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Condition
from tests.harness.bugs.dense import symptoms_on_dense_case
from tests.harness.bugs.duplicates import why_same
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CASE, CAUSAL, CLAIMS, any_of, bug, causal, finding, left, long_lse, runner


def causal_lse(case: Case) -> set[str]:
    return {"lse"} if case.causal else set()


def test_tensors_beside_that_need_the_same_are_the_same_bug() -> None:
    wrong = any_of(causal, lambda case: {"dv"} if case.causal else set(), long_lse)
    known = bug(CASE, ("out",), CAUSAL)
    rest, blamed = left(wrong, replace(CASE, seqlen_k=30), known)
    assert rest is None
    assert blamed == [replace(known, tensors=("dv", "out"))]
    rest, blamed = left(wrong, CASE, known)
    assert blamed == [known]
    assert rest is not None
    assert {*rest.finding.tensors} == {"dv", "lse"}


def test_tensors_beside_that_need_more_are_another_bug() -> None:
    """What cures the first bug may cure them too."""
    wrong = any_of(causal, lambda case: {"dv"} if case.causal and case.v_layout == "gap" else set())
    rest, blamed = left(wrong, replace(CASE, v_layout="gap"), known := bug(CASE, ("out",), CAUSAL))
    assert blamed == [known]
    assert rest is not None
    assert rest.finding.tensor == "dv"


def test_gradients_beside_a_wrong_lse_are_another_bug() -> None:
    wrong = any_of(causal_lse, lambda case: {"dv"} if case.causal else set())
    rest, blamed = left(wrong, CASE, known := bug(CASE, ("lse",), CAUSAL))
    assert blamed == [known]
    assert rest is not None
    assert rest.finding.tensor == "dv"


@pytest.mark.parametrize(
    ("need", "values"),
    [
        (Condition(SCORES, ("other",), ("ordinary",)), {"q_values": "outliers"}),
        (Condition("sm_scale", (-1.0,), (None, 1.0)), {"sm_scale": -1.0}),
    ],
)
def test_a_scale_of_0_is_a_bug_of_its_own_unless_equal_scores_show_it(
    need: Condition, values: dict[str, Any]
) -> None:
    """A launcher may take a scale of 0 for none that was given. Ordinary scores cure this as they cure large ones."""
    known = bug(replace(CASE, **values), ("out",), need)
    of_0 = bug(replace(CASE, sm_scale=0.0), ("out",), Condition("sm_scale", (0.0,), (None, 1.0, -1.0)))
    own = of_0.failure.case

    def apart(case: Case) -> set[str]:
        shows = case.sm_scale in (0.0, -1.0) or case.q_values == "outliers"
        return {"out"} if shows else set()

    assert left(apart, own, known)[0] is not None
    assert left(apart, known.failure.case, of_0)[0] is not None
    assert not why_same(known, of_0, runner(apart), CLAIMS)

    def alike(case: Case) -> set[str]:
        return apart(case) or ({"out"} if case.k_values == "zeros" else set())

    assert left(alike, own, known) == (None, [known])


def test_a_scale_of_0_is_no_bug_of_its_own_if_all_but_the_default_show_it() -> None:
    of_0, other = (
        bug(replace(CASE, sm_scale=x), ("out",), Condition("sm_scale", (x,), (None,))) for x in (0.0, -1.0)
    )

    def ignored(case: Case) -> set[str]:
        return {"out"} if case.sm_scale is not None else set()

    for known, found in ((of_0, other), (other, of_0)):
        assert left(ignored, found.failure.case, known) == (None, [known])
        assert why_same(known, found, runner(ignored), CLAIMS)


@pytest.mark.parametrize(("values", "is_left"), [({}, True), ({"k_values": "outliers"}, False)])
def test_large_scores_do_not_explain_what_a_small_scale_shows(values: dict[str, Any], is_left: bool) -> None:
    known = bug(replace(CASE, q_values="outliers"), ("out",), Condition(SCORES, ("other",), ("ordinary",)))

    def wrong(case: Case) -> set[str]:
        return {"out"} if case.sm_scale == -0.01 or case.k_values == "outliers" else set()

    rest, _ = left(wrong, replace(CASE, sm_scale=-0.01, **values), known)
    assert (rest is not None) == is_left


def test_a_length_that_is_equal_to_head_dim_is_one_bug_at_every_head_dim() -> None:
    """Which axis of a tensor is which may be guessed by their sizes."""
    cases = [Case(seqlen_k=x, head_dim=x) for x in (16, 64)]
    needs = [
        (Condition("seqlen_k", (one,), (other,)), Condition("head_dim", (one,), (other,)))
        for one, other in ((16, 64), (64, 16))
    ]
    equal, equal_too = (bug(case, ("dv",), *need) for case, need in zip(cases, needs, strict=True))
    assert equal.is_like(equal_too)
    assert not equal.is_like(bug(replace(cases[1], seqlen_k=65), ("dv",), *needs[1]))


def test_an_error_that_is_small_by_its_numbers_is_asked_with_ordinary_ones() -> None:
    """Where these show an error as small, it is one of roundings, which tells nothing of what else is wrong."""
    small = finding({"out"}, relative=1e-4)
    assert small is not None

    def of_ordinary(relative: float) -> set[str]:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            return finding({"dv", "out"}, relative=relative)

        return symptoms_on_dense_case("forward", CASE, small, run, CLAIMS)

    assert of_ordinary(0.1) == {"dv", "out"}
    assert of_ordinary(1e-4) == set()


def test_rows_that_are_alike_do_not_tell_what_is_wrong() -> None:
    """Whatever weights it has, a mean of equal rows of v is right."""
    case = replace(CASE, v_layout="expanded_rows", seqlen_k=65)

    def wrong(case: Case) -> set[str]:
        return {"dv", "out"} - ({"out"} if case.v_layout == "expanded_rows" else set())

    failed = finding(wrong(case))
    assert failed is not None
    assert symptoms_on_dense_case("backward", case, failed, runner(wrong), CLAIMS) == {"dv", "out"}


def test_of_an_out_that_is_all_nan_every_gradient_counts_as_wrong() -> None:
    failed = Finding(claim="so", kind="nonfinite", tensor="out", tensors=("out", "lse"), nan=4, total=4)
    of_some = replace(failed, nan=3)
    for found, gradients in ((failed, {*GRADIENTS}), (of_some, set[str]())):
        wrong = symptoms_on_dense_case("forward", CASE, failed, lambda *_, x=found: x, CLAIMS)
        assert wrong == {"out", "lse"} | gradients


def test_a_law_that_sets_large_scores_meets_what_needs_them() -> None:
    known = bug(replace(CASE, q_values="outliers"), ("out",), Condition(SCORES, ("other",), ("ordinary",)))
    failed = finding({"out"})
    assert failed is not None
    always = runner(lambda case: {"out"})
    assert explain_by_known_bugs(FailingExample("exact", CASE, failed), [known], always, CLAIMS).rest is None
    assert (
        explain_by_known_bugs(FailingExample("forward", CASE, failed), [known], always, CLAIMS).rest
        is not None
    )


@pytest.mark.parametrize(
    ("law", "spoiled", "is_explained"),
    [
        ("determinism", {"dq", "dk"}, True),  # the gradients of each call follow from its own out
        ("determinism", {"lse"}, False),
        ("backward", {"dq"}, False),  # gradients are judged at the kernel's own out
    ],
)
def test_gradients_that_differ_between_calls_follow_from_a_wrong_out(
    law: str, spoiled: set[str], is_explained: bool
) -> None:
    """The weights of the first sequence are used in all."""
    known = bug(CASE, ("out",), CAUSAL)

    def run(asked: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return finding(({"out"} if asked == "forward" else spoiled) if case.causal else set())

    found = run(law, CASE, frozenset())
    assert found is not None
    outcome = explain_by_known_bugs(FailingExample(law, CASE, found), [known], run, CLAIMS)
    assert (outcome.rest is None, outcome.blamed) == (is_explained, [known] if is_explained else [])


def test_gradients_that_differ_where_out_is_right_are_another_bug() -> None:
    known = bug(CASE, ("out",), CAUSAL)

    def run(asked: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return finding({"dq"} if asked == "determinism" and case.causal else set())

    found = run("determinism", CASE, frozenset())
    assert found is not None
    outcome = explain_by_known_bugs(FailingExample("determinism", CASE, found), [known], run, CLAIMS)
    assert outcome.rest is not None
