"""What the investigation of a failure finds out before it shrinks a case, and of bugs that show in every case."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.contract import Capabilities
from strategies.case import Case, Spike
from strategies.features import HEADS, SCORES
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Condition
from tests.harness.bugs.failure import UNEXPLAINED, Failure
from tests.harness.clock import BudgetSpent, Clock, ShrinkBudget
from tests.harness.diagnosis.conditions import (
    ConditionSearch,
    diagnosed,
    without_accidents,
    without_several_keys,
)
from tests.harness.diagnosis.generalisation import generalise_to_scores
from tests.harness.diagnosis.investigation import Investigation
from tests.harness.diagnosis.severity import with_contrast
from tests.harness.running.runs import Seen
from tests.harness.verdict import Finding
from tests.unit.support.bugs import bug
from tests.unit.support.stubs import runs_of

CLAIMS = Capabilities(head_dims=(16, 32, 64), launch={"block_m": (64, 128)})
WRONG_LSE = Finding(claim="", kind="error", tensor="lse", tensors=("lse",), actual=0.0)
DRAWN = Case(
    batch=2,
    heads_kv=2,
    group=2,
    seqlen_q=70,
    seqlen_k=90,
    head_dim=32,
    causal=True,
    sm_scale=1.0,
    q_layout="bnhd",
    k_layout="gap",
    v_values="outliers",
    launch=(("block_m", 128),),
)


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda case: True, []),
        (lambda case: case.causal, [("causal", (False,))]),
        (lambda case: case.group > 1 and case.heads_kv > 1, [("heads_kv", (1,)), ("group", (1,))]),
        (lambda case: case.k_layout == "gap", [("k_layout", ("contiguous",))]),
        (lambda case: case.causal and case.seqlen_q != case.seqlen_k, [("causal", (False,)), ("lengths", ("equal",))]),
        (lambda case: case.seqlen_k % 64 > 0, [("seqlen_k", (64, 128))]),
        (lambda case: case.dtype == "float32", [("dtype", ("float16", "bfloat16"))]),
        (lambda case: case.head_dim > 16, [("head_dim", (16,))]),
        (lambda case: case.v_values != "normal", [("v_values", ("normal",))]),
        (lambda case: dict(case.launch)["block_m"] == 128, [("block_m", (64,))]),
        (lambda case: case.sm_scale is not None, [("sm_scale", (None,))]),
    ],
)  # fmt: skip
def test_what_a_drawn_case_needs(fails: Callable[[Case], bool], expected: list[Any]) -> None:
    runs: list[Case] = []

    def counted(case: Case) -> bool:
        runs.append(case)
        return fails(case)

    assert [(need.name, need.holds) for need in diagnosed(DRAWN, counted, CLAIMS)] == expected
    assert len(runs) <= 24


def test_what_is_known_at_the_end_of_the_time_is_kept() -> None:
    runs: list[Case] = []

    def fails(case: Case) -> bool:
        runs.append(case)
        if len(runs) > 6:
            raise BudgetSpent
        return case.group > 1 and case.heads_kv > 1 and case.v_values != "normal"

    of_cpu = runs_of(CLAIMS)
    failure: Any = SimpleNamespace(case=DRAWN, finding=WRONG_LSE, law="forward")
    needs = ConditionSearch(of_cpu, failure).diagnosed(fails)
    assert [need.name for need in needs] == ["heads_kv", "group"]


def test_what_the_witnesses_tell_is_kept_where_larger_cases_take_too_long() -> None:
    """With 60 runs there is no time for what ordinary numbers tell: that only lengths above 32 show the bug."""

    def needs(most: int) -> list[list[str]]:
        runs: list[Case] = []

        def fails(case: Case) -> bool:
            runs.append(case)
            if len(runs) > most:
                raise BudgetSpent
            return case.causal and case.seqlen_k > 32

        found: list[list[str]] = []
        case = Case(seqlen_q=1, seqlen_k=33, causal=True)
        failure: Any = SimpleNamespace(
            case=case, finding=WRONG_LSE, law="forward", explanation=UNEXPLAINED, ignored=frozenset()
        )
        with suppress(BudgetSpent):
            for told in ConditionSearch(runs_of(CLAIMS), failure).needs([case], fails):
                found.append([need.name for need in told if need.is_telling or need.is_certain])
        return found

    assert needs(1000) == [["causal"], ["causal", "seqlen_k"]]
    assert needs(60)[0] == needs(60)[-1] == ["causal"]
    assert needs(2) == []


def investigation(hard: Callable[..., Finding | None], case: Case, **runs: Any) -> Investigation:
    """Return the investigation of a wrong lse in a case, for a kernel of which ``hard`` says what a run finds."""
    known: Any = SimpleNamespace(
        bugs={}, precision=SimpleNamespace(common=[], needed=()), write=lambda failure, script: None
    )
    all_runs = runs_of(CLAIMS, judged=hard, forget=lambda: None, clock=Clock(), **runs)
    failure = Failure("k.py:f", (), "forward", case, kernel="k", finding=WRONG_LSE, environment={})
    return Investigation(all_runs, failure, known, ShrinkBudget(60.0))


def test_ordinary_cases_that_another_bug_breaks_tell_no_needs() -> None:
    """Whatever they have in common, the failure's own case does without it."""

    def hard(law: str, case: Case, *ignored: object, **options: object) -> Finding | None:
        return WRONG_LSE if case.seqlen_k > 64 or case.sm_scale else None

    def needs(case: Case) -> list[str]:
        of = investigation(hard, case)
        of.search.tensors_of = lambda *about: {"lse"}  # type: ignore[method-assign]
        ordinary = [(x, hard("forward", x)) for x in (Case(seqlen_k=64), Case(seqlen_k=100))]
        bug = with_contrast(of.as_it_is, ordinary, of.search, of.counted, lambda: None)
        return [need.name for need in bug.needs]

    assert needs(Case(seqlen_k=32, sm_scale=-1.0)) == []
    assert needs(Case(seqlen_k=70)) == ["seqlen_k"]


def test_a_case_that_a_known_bug_may_break_too_does_not_come_and_go() -> None:
    case = Case(seqlen_k=32, sm_scale=-1.0)
    own = investigation(
        lambda law, case, *ignored, **options: WRONG_LSE, case, look=lambda run: Seen(("so",), ())
    )
    own.new = lambda case: None  # type: ignore[method-assign]
    own.explain()
    assert own.failure.explanation.sentences == ("so",)


def test_a_smallest_case_leaves_known_bugs() -> None:
    """Grouped heads are wrong, and so are keys that fill no tile, which is known: with one key both are met."""

    def wrong(case: Case) -> set[str]:
        return {"lse"} if case.group > 1 or case.seqlen_k % 64 else set()

    def hard(law: str, case: Case, *ignored: object, **options: object) -> Finding | None:
        return WRONG_LSE if wrong(case) else None

    of_tail = bug(Case(seqlen_k=1), ("lse",), Condition("seqlen_k", (1,), (64, 128)), law="exact")
    own = investigation(hard, Case(group=2, seqlen_k=1))
    own.known.bugs["tail"] = of_tail
    own.known.write = lambda failure, script: None  # type: ignore[method-assign]
    own.leave_known_bugs(partial(own.fails_alike, lambda: None))
    assert own.failure.case == Case(group=2, seqlen_k=64)
    own.failure = replace(own.failure, case=Case(seqlen_k=1))
    own.leave_known_bugs(partial(own.fails_alike, lambda: None))
    assert own.failure.case == Case(seqlen_k=1)


def test_ordinary_cases_in_which_a_known_bug_shows_do_not_tell_that_another_one_always_shows() -> None:
    of = investigation(lambda *_, **__: WRONG_LSE, Case(group=2), device_type="cpu")
    ordinary = [Case(seqlen_k=9), Case(group=2)]
    for need, cases, is_hidden in (
        (Condition("sm_scale", (None,), (1.0,), is_certain=True), ordinary, True),
        (Condition("sm_scale", (None,), (1.0,), is_certain=True), [*ordinary, Case(sm_scale=1.0)], False),
        (Condition("sm_scale", (None,), (1.0,)), ordinary, False),
        (Condition("seqlen_k", (9,), (64,), is_certain=True), ordinary, False),
    ):
        of.known.bugs["known"] = bug(Case(), ("lse",), need, law="backward")
        assert of.is_hidden_in(cases) == is_hidden
    of.known.bugs["known"] = bug(
        Case(), ("dk",), Condition("group", (2,), (1,), is_certain=True), law="backward"
    )
    assert not of.is_hidden_in([Case(group=2)])


@pytest.mark.parametrize(("relative", "moves"), [(1e-4, False), (0.5, True)])
def test_small_errors_that_always_show_are_not_shown_by_a_case_with_large_ones(
    relative: float, monkeypatch: pytest.MonkeyPatch, *, moves: bool
) -> None:
    """The smallest case has what a known bug needs. All others have large errors, as of a bug that is not known."""
    mine, large = (replace(WRONG_LSE, relative=x) for x in (relative, 0.5))
    monkeypatch.setattr(Investigation, "explain", lambda _: None)
    monkeypatch.setattr(Investigation, "scripted", lambda _, failure: (failure, None))
    smallest = Case(causal=True)
    of = investigation(
        lambda _, case, *__, **___: mine if case == smallest else large, smallest, device_type="cpu"
    )
    of.failure = replace(of.failure, finding=mine)
    shown = of.shown_apart_from([bug(smallest, ("lse",), Condition("causal", (True,), (False,)))])
    assert (shown.case != smallest) == moves


def test_what_needs_large_scores_needs_no_head_dim() -> None:
    """It matters by the default scale, and by the number of products in a score."""
    needs = [
        Condition(SCORES, ("other",), ("ordinary",)),
        Condition("head_dim", (16,), (32,)),
        Condition("causal", (True,), (False,)),
    ]
    assert [need.name for need in without_accidents(needs)] == [SCORES, "causal"]
    assert [need.name for need in without_accidents(needs[1:])] == ["head_dim", "causal"]


@pytest.mark.parametrize(("by_sign", "name"), [(False, SCORES), (True, "sm_scale")])
def test_a_scale_matters_by_the_scores_that_it_makes_or_by_itself(name: str, *, by_sign: bool) -> None:
    """Two kernels are asked: one is wrong where a score is below -30, the other one where sm_scale is negative."""
    case = Case(sm_scale=-1.0, q_values="zeros", k_values="ones", spikes=(Spike("q", (0, 0, 0, 0), 40.0),))

    def fails(case: Case) -> bool:
        (q,) = case.spikes
        return case.scale < 0 if by_sign else case.scale * float(q.value) < -30

    of_scale = bug(case, ("lse",), Condition("sm_scale", (-1.0,), (None, 1.0)))
    assert fails(case)
    assert [need.name for need in generalise_to_scores(of_scale.needs, of_scale.failure, fails)] == [name]
    of_many = replace(of_scale.failure, case=replace(case, q_values="normal"))
    assert [need.name for need in generalise_to_scores(of_scale.needs, of_many, fails)] == ["sm_scale"]


@pytest.mark.parametrize(
    ("scale", "holds", "is_of_sign"),
    [(-1.0, (None, 1.0), True), (0.0, (None,), True), (-1.0, (None,), False), (30.0, (None, 1.0), False)],
)
def test_nan_of_a_negative_scale_does_not_come_from_large_scores(
    scale: float, holds: tuple[float | None, ...], *, is_of_sign: bool
) -> None:
    made_nan = bug(Case(seqlen_k=2, sm_scale=scale), ("out",), Condition("sm_scale", (scale,), holds))
    failure = replace(made_nan.failure, finding=replace(made_nan.failure.finding, kind="nonfinite"))
    needs = generalise_to_scores(made_nan.needs, failure, lambda case: case.sm_scale == scale)
    assert [need.name for need in needs] == ["sm_scale" if is_of_sign else SCORES]


def test_a_bug_that_any_scale_but_one_shows_does_not_need_large_scores() -> None:
    unscaled = bug(Case(q_values="zeros", seqlen_k=2), ("dk",), Condition("sm_scale", (None,), (1.0,)))
    needs = generalise_to_scores(unscaled.needs, unscaled.failure, lambda case: case.sm_scale != 1)
    assert needs == list(unscaled.needs)


@pytest.mark.parametrize(
    ("relative", "wrong", "ratio", "left"),
    [(0.5, 90, 50.0, True), (1e-4, 90, 50.0, False), (0.5, 5, 2.0, True), (0.5, 5, 50.0, False)],
)
def test_a_large_error_is_cured_where_roundings_are_left(
    relative: float, wrong: int, ratio: float, *, left: bool
) -> None:
    """A causal mask makes a large error, or one of roundings, and without it there are roundings.

    A small error that is far above its bound in few elements is none of roundings.
    """
    rounded = Finding(
        claim="",
        kind="error",
        tensor="out",
        tensors=("out",),
        relative=1e-4,
        wrong=wrong,
        total=100,
        ratio=ratio,
    )
    mine = replace(rounded, relative=relative)
    of_mask = bug(Case(causal=True), ("out",), Condition("causal", (True,), (False,)), relative=relative)

    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return mine if case.causal else rounded

    told = explain_by_known_bugs(FailingExample("forward", Case(causal=True), mine), [of_mask], run, CLAIMS)
    assert (told.blamed == [of_mask]) == left
    assert told.rest is not None


def test_a_gradient_of_scores_needs_several_keys_whatever_the_bug_is() -> None:
    group, keys = Condition("group", (2,), (1,)), Condition("seqlen_k", (2,), (0, 1))
    scale = Condition("sm_scale", (None,), (1.0,))
    assert without_several_keys((group, keys)) == (group,)
    assert without_several_keys((scale, keys)) == (scale,)
    assert without_several_keys((keys,)) == (keys,)
    assert len(without_several_keys((group, replace(keys, fails=(33,), holds=(32,))))) == 2


def test_a_count_of_1_tells_nothing_beside_special_numbers() -> None:
    single, several = Condition(HEADS, (1,), (2, 3)), Condition("group", (2,), (1,))
    scores = Condition(SCORES, ("other",), ("ordinary",))
    assert without_accidents([single, several, scores]) == (several, scores)
    assert without_accidents([single, several]) == (single, several)


@pytest.mark.parametrize(("elsewhere", "needed"), [("died", False), ("exception", False), (None, True)])
def test_a_crash_in_another_dtype_does_not_make_the_dtype_a_need(elsewhere: str | None, needed: bool) -> None:
    """Where no numbers came back, nothing is known of the tensor that is wrong in this dtype."""
    other = None if elsewhere is None else Finding(claim="", kind=elsewhere)

    def wrong(law: str, case: Case, *options: Any) -> Finding | None:
        return WRONG_LSE if case.dtype == "float32" else other

    runs = runs_of(Capabilities(), judged_raw=wrong, device_type="cpu")
    failure: Any = SimpleNamespace(finding=WRONG_LSE, case=Case(), law="forward", ignored=frozenset())
    needs = ConditionSearch(runs, failure).dtypes(lambda: None)
    assert [need.name for need in needs] == (["dtype"] if needed else [])


def test_bugs_that_numbers_decide_are_one() -> None:
    one = bug(Case(seqlen_k=2), ("out",), Condition("seqlen_k", (2,), (0, 1)))
    other = bug(Case(dtype="float16"), ("dv", "out"), Condition(SCORES, ("other",), ("ordinary",)))
    both = [replace(x, by_numbers=True) for x in (one, other)]
    assert not one.is_like(other)
    assert not one.is_like(both[1])
    assert both[0].is_like(both[1])


def test_numbers_that_a_known_bug_makes_wrong_are_no_nan() -> None:
    of_causal = bug(Case(causal=True), ("out",), Condition("causal", (True,), (False,)))
    of_nan, of_numbers = (Finding(claim="so", kind=kind, tensor="out") for kind in ("nonfinite", "error"))
    failure = replace(of_causal.failure, finding=of_nan, number=1)
    known: Any = SimpleNamespace(bugs={"causal": of_causal})
    search = Investigation(runs_of(CLAIMS), failure, known, ShrinkBudget(0.0))
    assert search.is_of_another(of_numbers, Case(causal=True))
    assert not search.is_of_another(of_numbers, Case())
    assert not search.is_of_another(of_nan, Case(causal=True))
    assert not search.is_of_another(None, Case(causal=True))
