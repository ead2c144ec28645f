"""One bug stays one in further tensors, other numbers, dtypes and lengths, and if there are two ways to trigger it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from kernels.contract import GRADIENTS
from strategies.case import Case, Spike
from strategies.features import (
    BLIND,
    MASKED,
    NAN,
    NO_KEYS,
    NONE,
    ONE,
    SCORES,
    SEEN,
    SEVERAL,
    SLICES,
    with_slices_as,
    with_value,
)
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Bug, Condition, Severity, met_again
from tests.harness.bugs.dense import symptoms_on_dense_case
from tests.harness.bugs.duplicates import is_same
from tests.harness.bugs.failure import Explanation
from tests.harness.diagnosis.conditions import ConditionSearch, explained
from tests.harness.diagnosis.explanation import fields
from tests.harness.diagnosis.generalisation import (
    generalise_to_blind_rows,
    generalise_to_heads,
    generalise_to_masks,
    generalise_to_nan,
    generalise_to_slices,
)
from tests.harness.report.wording import conditions_of
from tests.harness.verdict import Finding
from tests.unit.support.bugs import (
    CASE,
    CAUSAL,
    CLAIMS,
    GROUP,
    LONG,
    OF_V,
    UNEQUAL,
    Wrong,
    any_of,
    bug,
    causal,
    finding,
    long_lse,
    runner,
)
from tests.unit.support.stubs import runs_of


def left(wrong: Wrong, case: Case, known: Bug) -> tuple[FailingExample | None, list[Bug]]:
    """Return what a known bug leaves of a failure of the forward law, and the bugs that are blamed."""
    run = runner(wrong)
    found = run("forward", case, frozenset())
    assert found is not None
    outcome = explain_by_known_bugs(FailingExample("forward", case, found), [known], run, CLAIMS)
    return outcome.rest, outcome.blamed


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


def test_roundings_that_ordinary_numbers_of_a_dtype_do_not_show_are_cured_by_a_third_dtype() -> None:
    of_dtype = Condition("dtype", ("float32",), ("float16", "bfloat16"))
    always = replace(bug(CASE, ("dv",), of_dtype, relative=1e-3), severity=Severity(20, 20))
    elsewhere, imprecise = replace(CASE, dtype="bfloat16", v_values="outliers"), ("rounded_scores=true",)
    special = bug(elsewhere, ("dv",), OF_V, relative=1e-3, explained_by=imprecise)

    def wrong(case: Case) -> set[str]:
        shows = case.dtype == "float32" or (case.dtype == "bfloat16" and case.v_values != "normal")
        return {"dv"} if shows else set()

    assert is_same(always, special, runner(wrong), CLAIMS)
    assert met_again(always, special) == always
    ordinary = replace(special, severity=Severity(3, 20))
    assert not is_same(always, ordinary, runner(wrong), CLAIMS)
    assert not is_same(always, special, runner(any_of(wrong, lambda case: {"dv"})), CLAIMS)
    small_but_wrong = bug(elsewhere, ("dv",), OF_V, relative=1e-3)
    assert not is_same(always, small_but_wrong, runner(wrong), CLAIMS)


def test_a_scale_that_holds_where_it_is_as_large_does_not_matter_by_making_large_scores() -> None:
    scores = Condition(SCORES, ("other",), ("ordinary",))
    negative, large = Condition("sm_scale", (-1.0,), (None, 1.0)), Condition("sm_scale", (30.0,), (None, 1.0))
    of_sign, of_size = replace(CASE, sm_scale=-1.0), replace(CASE, sm_scale=30.0)
    spiked = bug(replace(CASE, sm_scale=1.0, q_values="outliers"), ("out",), scores)

    def wrong(case: Case) -> set[str]:
        return {"out"} if abs(case.scale) > 1 or case.scale < 0 or case.q_values != "normal" else set()

    assert not is_same(bug(of_sign, ("out",), negative), spiked, runner(wrong), CLAIMS)
    spiked = bug(replace(CASE, q_values="outliers"), ("out",), scores)
    assert is_same(bug(of_size, ("out",), large), spiked, runner(wrong), CLAIMS)


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
    assert not is_same(known, of_0, runner(apart), CLAIMS)

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
        assert is_same(known, found, runner(ignored), CLAIMS)


@pytest.mark.parametrize(("values", "is_left"), [({}, True), ({"k_values": "outliers"}, False)])
def test_large_scores_do_not_explain_what_a_small_scale_shows(values: dict[str, Any], is_left: bool) -> None:
    known = bug(replace(CASE, q_values="outliers"), ("out",), Condition(SCORES, ("other",), ("ordinary",)))

    def wrong(case: Case) -> set[str]:
        return {"out"} if case.sm_scale == -0.01 or case.k_values == "outliers" else set()

    rest, _ = left(wrong, replace(CASE, sm_scale=-0.01, **values), known)
    assert (rest is not None) == is_left


def test_a_length_that_holds_by_its_numbers_is_no_other_bug() -> None:
    """The numbers of each smallest case show the bug at its own length alone."""
    one = bug(replace(CASE, seqlen_k=129), ("lse",), Condition("seqlen_k", (129,), (0, 128, 130, 259)))
    two = bug(replace(CASE, seqlen_k=259, seed=1), ("lse",), Condition("seqlen_k", (259,), (0, 128, 258)))

    def wrong(case: Case) -> set[str]:
        return {"lse"} if case.seqlen_k == (259 if case.seed else 129) else set()

    assert is_same(one, two, runner(wrong), CLAIMS)
    border = bug(replace(CASE, seqlen_k=129), ("lse",), Condition("seqlen_k", (129,), (0, 128)))
    short = bug(replace(CASE, seqlen_k=3), ("lse",), Condition("seqlen_k", (3,), (0, 128, 259)))
    assert not is_same(border, short, runner(lambda case: {"lse"}), CLAIMS)


def test_a_second_way_to_show_a_bug_begins_at_the_same_length() -> None:
    """Equal scores hide a maximum that is not the right one, unless a causal mask hides the keys that have it."""
    ordinary = replace(CASE, seqlen_k=129, causal=False)
    equal = replace(CASE, seqlen_k=129, q_values="zeros")
    one = bug(ordinary, ("lse",), Condition("seqlen_k", (129,), (0, 64, 128)))
    two = bug(equal, ("lse",), CAUSAL, Condition("seqlen_k", (129,), (0, 128, 130)))

    def wrong(case: Case) -> set[str]:
        shows = case.seqlen_k > 128 and (case.q_values == "normal" or case.causal)
        return {"lse"} if shows else set()

    for known, found in ((one, two), (two, one)):
        assert is_same(known, found, runner(wrong), CLAIMS)
    coarse = bug(replace(equal, seqlen_k=259), ("lse",), CAUSAL, Condition("seqlen_k", (259,), (0, 100, 260)))
    assert is_same(one, coarse, runner(wrong), CLAIMS)
    later = bug(replace(equal, seqlen_k=259), ("lse",), CAUSAL, Condition("seqlen_k", (259,), (0, 200)))
    assert not is_same(one, later, runner(wrong), CLAIMS)
    more = bug(equal, ("lse", "out"), CAUSAL, Condition("seqlen_k", (129,), (0, 128)))
    assert not is_same(one, more, runner(wrong), CLAIMS)
    of_masks = bug(equal, ("lse",), CAUSAL, GROUP)
    assert not is_same(bug(ordinary, ("lse",), GROUP), of_masks, runner(wrong), CLAIMS)


def test_what_is_told_of_the_smallest_case_corrects_the_needs_of_the_drawn_one() -> None:
    of_batch, of_scores = Condition("batch", (2,), (1,)), Condition(SCORES, ("other",), ("ordinary",))
    smallest = Case(batch=2, seqlen_k=2, sm_scale=0.5, causal=False)
    known = bug(smallest, ("dq",)).failure

    def told(*names: str) -> list[Condition]:
        fields_ = fields(smallest, lambda case: bool(case.sm_scale) and not case.causal, CLAIMS)
        chosen = tuple(x for x in fields_ if x.name in names)
        return explained([of_batch, of_scores], replace(known, explanation=Explanation(fields=chosen)))

    assert told() == [of_batch, of_scores]
    (kept, of_scale) = told("batch", "sm_scale", "causal", "seqlen_k")
    assert kept == of_scores
    assert (of_scale.name, of_scale.fails, set(of_scale.holds)) == ("sm_scale", (0.5,), {None})


def test_gradients_where_out_is_right_are_no_bug_of_the_forward() -> None:
    """A scale of 0 is taken for the default one; beside that dk is multiplied by the default in place of the scale."""
    zero, other = replace(CASE, causal=False, sm_scale=0.0), replace(CASE, causal=False, sm_scale=-0.5)
    needs_zero = Condition("sm_scale", (0.0,), (None, 1.0))
    needs_other = Condition("sm_scale", (-0.5,), (None,))

    def wrong(case: Case) -> set[str]:
        if case.sm_scale == 0:
            return {"out", "lse", "dq", "dk", "dv"}
        return set() if case.sm_scale is None else {"dk"}

    of_forward = bug(zero, ("dk", "dq", "dv", "lse", "out"), needs_zero)
    of_dk = bug(other, ("dk",), needs_other, law="backward")
    for known, found in ((of_forward, of_dk), (of_dk, of_forward)):
        assert not is_same(known, found, runner(wrong), CLAIMS)
    run = runner(wrong)
    for case, known, rest in ((zero, of_dk, {"dq", "dv", "lse", "out"}), (other, of_forward, {"dk"})):
        failure = run("backward", case, frozenset())
        assert failure is not None
        outcome = explain_by_known_bugs(FailingExample("backward", case, failure), [known], run, CLAIMS)
        assert outcome.rest is not None
        assert {*outcome.rest.finding.tensors} == rest
    one = bug(other, ("dk",), needs_other, law="backward")
    more = bug(replace(other, seed=1), ("dk", "out"), needs_other)
    assert is_same(
        one, more, runner(lambda case: {"dk", "out"} if case.sm_scale is not None else set()), CLAIMS
    )


def test_bugs_that_need_the_same_field_and_make_other_tensors_wrong_are_two() -> None:
    """All four show for grouped heads alone; the last shows for two members of a group, and the others for three."""
    makes = {"heads": {"out", "lse", "dq", "dk", "dv"}, "lse": {"lse"}, "dk": {"dk"}, "dv": {"dv"}}
    groups = {"heads": 3, "lse": 3, "dk": 3, "dv": 2}
    kernels = {x: (lambda case, x=x: makes[x] if case.group == groups[x] else set()) for x in makes}
    cases = {x: replace(CASE, causal=False, heads_kv=at, group=groups[x]) for at, x in enumerate(makes, 1)}
    bugs = {x: bug(cases[x], tuple(makes[x]), GROUP, law="backward") for x in makes}

    def wrong(case: Case) -> set[str]:
        return kernels[list(makes)[case.heads_kv - 1]](case)

    for one, other in permutations(makes, 2):
        assert not is_same(bugs[one], bugs[other], runner(wrong), CLAIMS)
        assert is_same(bugs[one], bugs[one], runner(wrong), CLAIMS)


def test_what_only_a_law_with_numbers_of_its_own_shows_explains_no_other_law() -> None:
    """Large scores overflow; beside that an ordinary case is wrong because of its causal mask."""
    exact = replace(bug(replace(CASE, causal=False), ("out",), law="exact"), severity=Severity(20, 20))
    assert not exact.is_everywhere
    rest, blamed = left(causal, CASE, exact)
    assert rest is not None
    assert not blamed
    large = bug(
        replace(CASE, q_values="outliers"), ("lse", "out"), Condition(SCORES, ("other",), ("ordinary",))
    )
    for known, found in ((exact, large), (large, exact)):
        assert is_same(known, found, runner(lambda case: set()), CLAIMS)
    assert not is_same(exact, bug(CASE, ("out",), CAUSAL), runner(causal), CLAIMS)


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


def test_a_change_that_brings_in_a_third_bug_tells_nothing() -> None:
    """Without a causal mask out is wrong as well, by another bug, so no change of the mask can make it right."""
    unmasked = replace(CASE, causal=False)
    without_mask = bug(unmasked, ("out",), Condition("causal", (False,), (True,)), law="backward")
    long, longer = Condition("seqlen_k", (65,), (0, 64)), Condition("seqlen_k", (90,), (0, 32, 70))
    one, two = bug(CASE, ("out",), long), bug(replace(CASE, seed=1), ("out",), CAUSAL, longer)
    run = runner(lambda case: {"out"} if not case.causal or case.seqlen_k > 64 else set())
    assert is_same(one, two, run, CLAIMS, [without_mask, one, two])
    assert not is_same(one, two, run, CLAIMS, [bug(unmasked, ("out",), GROUP, law="backward")])
    assert not is_same(one, two, run, CLAIMS, [replace(without_mask, tensors=("lse",))])


def test_a_third_bug_of_gradients_does_not_hide_which_of_two_makes_out_wrong() -> None:
    """Under a causal mask lse is wrong, and in long cases out too. With many keys a third bug makes dk wrong."""

    def wrong(case: Case) -> set[str]:
        return {"lse", *(("out",) if case.seqlen_q > 96 else ())} if case.causal else set()

    of_dk = bug(replace(CASE, seqlen_k=65), ("dk",), LONG)
    of_lse = bug(replace(CASE, seqlen_q=2, seqlen_k=8), ("lse",), CAUSAL)
    of_out = bug(
        replace(CASE, seqlen_q=97, seqlen_k=8), ("lse", "out"), Condition("seqlen_q", (97,), (96,)), CAUSAL
    )
    run = runner(any_of(wrong, lambda case: {"dk"} if case.seqlen_k > 64 else set()))
    assert not is_same(of_lse, of_out, run, CLAIMS, [of_dk])
    unknown = replace(of_dk, tensors=("dk", "out"))
    assert is_same(of_lse, of_out, run, CLAIMS, [unknown])


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


def test_out_of_a_bug_that_was_found_beside_one_that_spoils_it_tells_nothing() -> None:
    def wrong(case: Case) -> set[str]:
        return {"dk"} if case.causal or case.group == 1 else {"dk", "out"}

    scale = Condition("sm_scale", (None,), (1.0,))
    masked, open_ = (bug(replace(CASE, causal=x), ("dk",), scale, law="backward") for x in (True, False))
    assert not is_same(masked, open_, runner(wrong), CLAIMS)
    beside = replace(open_, failure=replace(open_.failure, ignored=frozenset({"out"}), number=1))
    assert is_same(masked, beside, runner(wrong), CLAIMS)


@pytest.mark.parametrize(("certain", "expected"), [(True, True), (False, False)])
def test_a_bug_of_no_known_need_is_cured_by_what_another_one_surely_needs(
    certain: bool, expected: bool
) -> None:
    """Unequal lengths matter in the small case of the other bug by accident, and the large case has equal ones."""
    scale = Condition("sm_scale", (None,), (1.0,), is_certain=certain)
    small = bug(Case(seqlen_k=2), ("dk",), UNEQUAL, scale, law="backward")
    large = bug(replace(CASE, seqlen_k=CASE.seqlen_q), ("dk",), law="backward")
    run = runner(lambda case: {"dk"} if case.sm_scale is None else set())
    assert is_same(large, small, run, CLAIMS) == expected


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


def search(case: Case) -> ConditionSearch:
    """Return the search for what a bug needs, whose smallest case is given."""
    runs = runs_of(CLAIMS)
    return ConditionSearch(runs, bug(case, ("out",)).failure)


def without_keys(case: Case) -> bool:
    return case.seqlen_k == 0


def hidden(case: Case) -> bool:
    return case.causal and case.seqlen_q > case.seqlen_k > 0


def nothing(case: Case) -> None:
    """Find nothing in a case."""


HIDDEN_ROWS = replace(CASE, seqlen_q=90, seqlen_k=70)
NEEDS = [CAUSAL, Condition("lengths", ("more queries than keys",), ("equal",))]


@pytest.mark.parametrize(
    ("case", "shows", "holds"),
    [
        (HIDDEN_ROWS, lambda case: hidden(case) or without_keys(case), (SEEN,)),
        (replace(CASE, seqlen_k=0), lambda case: hidden(case) or without_keys(case), (SEEN,)),
        (HIDDEN_ROWS, hidden, (SEEN, NO_KEYS)),
        (
            replace(HIDDEN_ROWS, seqlen_q=2, seqlen_k=1),
            lambda case: hidden(case) and (case.seqlen_q - case.seqlen_k) % 32,
            (SEEN, NO_KEYS),
        ),
    ],
)
def test_rows_that_see_no_key_are_one_need_however_they_come_about(
    case: Case, shows: Callable[[Case], bool], holds: tuple[str, ...]
) -> None:
    needs = generalise_to_blind_rows([*NEEDS, GROUP], case, shows, nothing, CLAIMS)
    assert [(need.name, need.holds) for need in needs] == [("group", (1,)), (BLIND, holds)]
    blind = needs[-1]
    known = bug(case, ("out",), blind)
    wrong = {"out"}
    rest, blamed = left(lambda case: wrong if shows(case) else set(), replace(HIDDEN_ROWS, seed=3), known)
    assert (rest, blamed) == (None, [known])


@pytest.mark.parametrize(
    ("case", "shows"),
    [
        (HIDDEN_ROWS, lambda case: case.causal and case.seqlen_q != case.seqlen_k),
        (replace(CASE, seqlen_k=0), without_keys),
        (CASE, lambda case: case.causal),
        (replace(CASE, seqlen_q=2, seqlen_k=1), lambda case: case.causal and case.seqlen_q > 1),
        (HIDDEN_ROWS, lambda case: hidden(case) and (case.seqlen_q - case.seqlen_k) % 64 == 20),
        (replace(HIDDEN_ROWS, spikes=(Spike("k", (0, 0, 0, 0), "nan"),)), hidden),
    ],
)
def test_a_wrong_mask_or_no_keys_alone_are_told_by_their_fields(
    case: Case, shows: Callable[[Case], bool]
) -> None:
    assert generalise_to_blind_rows(NEEDS, case, shows, nothing, CLAIMS) == NEEDS


@pytest.mark.parametrize(("row", "wrong", "is_told"), [(2, 20, True), (2, 21, False), (20, 1, False)])
def test_what_other_lengths_show_tells_nothing_where_only_rows_without_a_key_are_wrong(
    row: int, wrong: int, is_told: bool
) -> None:
    def shows(case: Case) -> bool:
        return case.causal and case.seqlen_q != case.seqlen_k

    def look(case: Case) -> Finding:
        assert (case.seqlen_q, case.seqlen_k) == (98, 78)
        return Finding(claim="so", kind="error", tensor="lse", index=(0, 0, row), wrong=wrong, total=98)

    needs = generalise_to_blind_rows(NEEDS, HIDDEN_ROWS, shows, look, CLAIMS)
    assert (needs != NEEDS) == is_told


def test_bugs_with_more_queries_and_with_more_keys_are_two() -> None:
    def more_keys(case: Case) -> set[str]:
        return {"out"} if case.causal and case.seqlen_k > case.seqlen_q else set()

    lengths = search(CASE).other_way_round(lambda case: bool(more_keys(case)))
    assert lengths == ["more queries than keys"]
    known = bug(
        CASE, ("out",), CAUSAL, Condition("lengths", ("more keys than queries",), ("equal", *lengths))
    )
    rest, _ = left(causal, HIDDEN_ROWS, known)
    assert rest is not None
    assert search(CASE).other_way_round(lambda case: bool(causal(case))) == []


def test_an_entry_that_hides_a_bug_the_other_way_round_does_not_make_it_two() -> None:
    entry = replace(CASE, dout_values="zeros", spikes=(Spike("dout", (0, 0, 0, 0), 1.0),))

    def shows(case: Case) -> bool:
        return case.seqlen_k > case.seqlen_q or (case.seqlen_q > case.seqlen_k and not case.spikes)

    assert search(entry).other_way_round(shows) == []


def test_one_slice_that_spoils_another_is_one_need_whether_they_are_heads_or_sequences() -> None:
    """The second slice is wrong if the first has an entry of q, as where the first decides for all of them."""

    def shows(case: Case) -> bool:
        slices = case.batch * case.heads_q
        in_first = any(x.index[0] % case.batch + x.index[1] % case.heads_q == 0 for x in case.spikes)
        return slices > 1 and in_first

    one = replace(CASE, group=1, heads_kv=1, spikes=(Spike("q", (0, 0, 1, 0), 1.0),))
    of_heads, of_batch = (Condition(name, (2,), (1,)) for name in ("heads_kv", "batch"))
    for name, need in (("heads_kv", of_heads), ("group", GROUP), ("batch", of_batch)):
        needs = generalise_to_slices([CAUSAL, need], with_value(one, name, 2), shows, CLAIMS)
        assert [(x.name, x.holds) for x in needs] == [("causal", (False,)), (SLICES, (ONE,))]
        assert conditions_of(bug(CASE, ("out",), *needs)) == f"only with causal True, {SEVERAL}"
        for met in (replace(one, batch=3), replace(one, group=2)):
            assert (
                left(lambda case: {"out"} if shows(case) else set(), met, bug(CASE, ("out",), needs[-1]))[0]
                is None
            )


def test_a_need_of_sequences_alone_or_of_heads_alone_stays() -> None:
    two = replace(CASE, group=1, heads_kv=1, batch=2)
    of_batch = [CAUSAL, Condition("batch", (2,), (1,))]
    assert generalise_to_slices(of_batch, two, lambda case: case.batch > 1, CLAIMS) == of_batch
    assert generalise_to_slices(of_batch, two, lambda case: True, CLAIMS) == of_batch
    assert generalise_to_slices([CAUSAL], two, lambda case: case.batch * case.heads_q > 1, CLAIMS) == [CAUSAL]


NEGATIVE = Condition("sm_scale", (-0.3,), (None, 1.0))


@pytest.mark.parametrize(
    ("case", "of_mask"),
    [
        (replace(CASE, causal=True, seqlen_q=2, seqlen_k=2, sm_scale=-0.3), (CAUSAL,)),
        (replace(CASE, causal=False, seqlen_k=65, sm_scale=-0.3), (Condition("seqlen_k", (65,), (64, 128)),)),
    ],
)
def test_masked_scores_are_one_need_whatever_masks_them(case: Case, of_mask: tuple[Condition, ...]) -> None:
    def shows(case: Case) -> bool:
        return (case.causal or case.seqlen_k % 64 > 0) and (case.sm_scale or 1.0) < 0

    needs = generalise_to_masks([*of_mask, NEGATIVE], case, shows, CLAIMS)
    assert [need.name for need in needs] == ["sm_scale", MASKED]
    assert conditions_of(bug(case, ("out",), *needs)) == "only with negative sm_scale, masked scores"
    assert needs[1].is_met(case)
    assert not needs[1].is_met(with_value(case, MASKED, NONE))


def test_each_mask_may_have_a_bug_of_its_own() -> None:
    case = replace(CASE, causal=True, seqlen_q=2, seqlen_k=2, sm_scale=-0.3)

    def two(case: Case) -> bool:
        return (case.causal and (case.sm_scale or 1.0) < 0) or case.seqlen_k % 64 > 0

    assert generalise_to_masks([CAUSAL, NEGATIVE], case, two, CLAIMS) == [CAUSAL, NEGATIVE]
    assert generalise_to_masks([CAUSAL], case, two, CLAIMS) == [CAUSAL]


def test_numbers_may_hide_what_one_slice_does_to_another() -> None:
    one = replace(CASE, batch=1, group=1, heads_kv=1, seed=4)

    def shows(case: Case) -> bool:
        return case.batch * case.heads_q > 1 and (case.heads_kv == 2 or case.seed % 4 == 3)

    (need,) = generalise_to_slices(
        [Condition("heads_kv", (2,), (1,))], replace(one, heads_kv=2), shows, CLAIMS
    )
    assert need.name == SLICES


def test_entries_stay_in_their_slices() -> None:
    of_q, of_k, of_none = (Spike(x, (i, j, 1, 2), 1.0) for x, i, j in (("q", 1, 5), ("k", 3, 1), ("v", 0, 0)))
    case = replace(CASE, batch=2, heads_kv=2, group=2, spikes=(of_q, of_k, of_none))
    for name, at in (("batch", lambda i: (i, 0, 1, 2)), ("heads_kv", lambda i: (0, i, 1, 2))):
        changed = with_slices_as(name, case)
        assert (getattr(changed, name), changed.batch * changed.heads_q) == (8, 8)
        assert [x.index for x in changed.spikes] == [at(i) for i in (5, 6, 7, 0, 1)]


NOT_FINITE = Finding(claim="so", kind="nonfinite", tensor="out", tensors=("out",))
OF_Q, OF_V_TOO = (replace(CASE, spikes=(Spike(x, (0, 0, 1, 0), "nan"),)) for x in ("q", "v"))


def has_nan(case: Case) -> bool:
    return any(spike.value == "nan" for spike in case.spikes)


def test_nan_is_one_need_in_whatever_tensor_it_is() -> None:
    numbers = Condition("qk_values", ("set",), ("normal",))
    needs = generalise_to_nan([CAUSAL, numbers], OF_Q, has_nan)
    assert [(need.name, need.holds) for need in needs] == [("causal", (False,)), (NAN, (False,))]
    known = bug(OF_Q, ("out",), needs[-1])
    assert left(lambda case: {"out"} if has_nan(case) else set(), OF_V_TOO, known) == (None, [known])


def test_nan_in_one_tensor_alone_is_a_need_of_its_numbers() -> None:
    numbers = [Condition("qk_values", ("set",), ("normal",))]
    assert generalise_to_nan(numbers, OF_Q, lambda case: any(x.tensor == "q" for x in case.spikes)) == numbers
    assert generalise_to_nan(numbers, OF_Q, lambda case: True) == numbers
    assert generalise_to_nan(numbers, CASE, has_nan) == numbers


def test_large_scores_do_not_explain_what_nan_makes_wrong() -> None:
    scores = Condition(SCORES, ("other",), ("ordinary",))
    known = bug(replace(CASE, q_values="outliers"), ("out",), scores)
    rest, _ = left(lambda case: {"out"} if has_nan(case) else set(), OF_Q, known)
    assert rest is not None
    large = replace(OF_Q, q_values="outliers")
    assert left(lambda case: {"out"} if case.q_values == "outliers" else set(), large, known) == (
        None,
        [known],
    )


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


def test_a_gradient_that_is_right_where_another_bug_shows_is_a_bug_of_its_own() -> None:
    """Every group makes dk wrong, and one of three makes dv wrong."""

    def wrong(case: Case) -> set[str]:
        return {"dk"} if case.group == 2 else {"dk", "dv"} if case.group == 3 else set()

    of_dk = bug(CASE, ("dk",), GROUP, law="backward")
    of_dv = bug(replace(CASE, group=3), ("dv",), Condition("group", (3,), (1,)), law="backward")
    assert not is_same(of_dk, of_dv, runner(wrong), CLAIMS)
    always_both = runner(lambda case: {"dk", "dv"} if case.group > 1 else set())
    assert is_same(of_dk, of_dv, always_both, CLAIMS)


def test_a_format_of_few_bits_rounds_ordinary_numbers_and_makes_small_ones_0() -> None:
    of_dtype, scores = (
        Condition("dtype", ("float32",), ("float16",)),
        Condition(SCORES, ("other",), ("ordinary",)),
    )
    rounds = replace(bug(CASE, ("dv", "out"), of_dtype, relative=1e-4), severity=Severity(20, 20))
    small = replace(CASE, dtype="bfloat16", q_values="wide")
    run = runner(lambda case: {"dv", "out"})
    flushes = bug(small, ("out",), scores, OF_V, Condition("seqlen_k", (2,), (1,)), relative=1.0)
    assert is_same(rounds, flushes, run, CLAIMS)
    assert is_same(flushes, rounds, run, CLAIMS)
    assert is_same(rounds, replace(flushes, tensors=("dk", "out")), run, CLAIMS)
    scaled = Condition("sm_scale", (-1.0,), (None, 0.125))
    tiny = bug(replace(small, sm_scale=-1.0), ("out",), scaled, OF_V, expected=9e-11, relative=1e-3)
    for other in (
        replace(flushes, needs=(*flushes.needs, CAUSAL)),
        replace(flushes, tensors=("lse", "out")),
        replace(flushes, needs=(scores,), failure=replace(flushes.failure, finding=NOT_FINITE)),
    ):
        assert not is_same(rounds, other, run, CLAIMS)
    wide = replace(rounds, needs=(replace(of_dtype, holds=("bfloat16", "float16")),))
    assert is_same(wide, tiny, run, CLAIMS)
    assert not is_same(wide, replace(tiny, needs=(replace(scaled, fails=(-0.1,)), OF_V)), run, CLAIMS)
    usual = replace(tiny.failure, finding=replace(tiny.failure.finding, expected=1.0))
    assert not is_same(wide, replace(tiny, failure=usual), run, CLAIMS)
    assert not is_same(replace(rounds, severity=Severity(3, 20)), flushes, run, CLAIMS)
    assert not is_same(rounds, replace(flushes, severity=Severity(3, 20)), run, CLAIMS)


def test_lengths_that_cure_small_cases_of_two_tensors_do_not_make_them_one_bug() -> None:
    tail, later = Condition("seqlen_k", (2,), (1, 32, 64)), Condition("seqlen_k", (32,), (31, 33, 64))
    of_out = bug(replace(CASE, seqlen_k=2), ("out",), tail)
    of_lse = bug(replace(CASE, seqlen_k=32), ("lse",), later, law="memory")

    def wrong(case: Case) -> set[str]:
        return {"out"} if case.seqlen_k == 2 else {"lse"} if case.seqlen_k == 32 else set()

    assert not is_same(of_out, of_lse, runner(wrong), CLAIMS)
    of_both = bug(replace(CASE, seqlen_k=32), ("lse", "out"), later)
    assert is_same(
        of_out, of_both, runner(lambda case: {"lse", "out"} if case.seqlen_k in (2, 32) else set()), CLAIMS
    )


def test_tiny_numbers_that_become_0_are_one_bug_whatever_makes_them_tiny() -> None:
    def flush(expected: float, *needs: Condition, **fields: Any) -> Bug:
        case = replace(CASE, dtype="float16", **fields)
        return bug(case, ("dk",), *needs, expected=expected, actual=0.0, relative=1.0)

    of_v, of_scores = flush(7e-6, OF_V), flush(-9e-7, Condition(SCORES, ("other",), ("ordinary",)), seed=1)
    assert of_v.is_like(of_scores)
    assert not of_v.is_like(flush(1e-3, CAUSAL))
    assert not replace(of_v, failure=replace(of_v.failure, case=CASE)).is_like(of_scores)


def test_small_errors_of_some_ordinary_cases_are_one_bug() -> None:
    seldom = Severity(2, 20)
    one, two = (replace(bug(CASE, ("out",), x, relative=1e-6), severity=seldom) for x in (CAUSAL, GROUP))
    assert one.is_like(two)
    assert not one.is_like(replace(two, severity=Severity(20, 20)))
    assert not one.is_like(replace(two, tensors=("dq",), failure=bug(CASE, ("dq",)).failure))
    large = bug(CASE, ("out",), GROUP, relative=0.5)
    assert not one.is_like(replace(large, severity=seldom))


@pytest.mark.parametrize(("heads_kv", "group"), [(3, 1), (1, 3)])
def test_a_number_of_heads_is_one_need_grouped_or_not(heads_kv: int, group: int) -> None:
    """An odd last head is left out."""
    case = replace(CASE, heads_kv=heads_kv, group=group)
    sizes = {"heads_kv": heads_kv, "group": group}
    needs = [CAUSAL, *(Condition(name, (x,), (1 if x > 1 else 2,)) for name, x in sizes.items())]

    def is_odd(case: Case) -> bool:
        return case.heads_q > 1 and case.heads_q % 2 == 1

    causal_need, heads = generalise_to_heads(needs, case, is_odd, CLAIMS)
    assert (causal_need, heads.name, heads.fails) == (CAUSAL, "heads_q", (3,))
    assert 1 in heads.holds
    other = replace(CASE, heads_kv=group, group=heads_kv)
    known = bug(case, ("out",), heads)
    assert left(lambda case: {"out"} if is_odd(case) else set(), other, known) == (None, [known])


def test_heads_that_are_grouped_are_needs_of_their_own() -> None:
    needs = [Condition("heads_kv", (2,), (1,)), GROUP]
    assert (
        generalise_to_heads(needs, CASE, lambda case: case.heads_kv > 1 and case.group > 1, CLAIMS) == needs
    )
    assert generalise_to_heads(needs[1:], CASE, lambda case: case.group > 1, CLAIMS) == needs[1:]


def test_ordinary_numbers_show_that_heads_are_alike_where_the_numbers_of_a_case_do_not() -> None:
    needs = [Condition("group", (2,), (1,)), LONG]
    case = replace(CASE, heads_kv=1, k_values="zeros")

    def of_query_heads(case: Case) -> bool:
        has_numbers = case.heads_kv == 1 or case.k_values == "normal"
        return case.heads_q > 1 and case.seqlen_k > 64 and has_numbers

    assert [need.name for need in generalise_to_heads(needs, case, of_query_heads, CLAIMS)] == [
        "seqlen_k",
        "heads_q",
    ]

    def with_another(case: Case) -> bool:
        return of_query_heads(case) or (case.heads_kv > 1 and case.k_values == "normal")

    assert generalise_to_heads(needs, case, with_another, CLAIMS) == needs


def test_a_number_of_heads_holds_only_if_ordinary_numbers_do_not_show_the_bug_in_it() -> None:
    case = replace(CASE, heads_kv=3, group=1, dout_values="zeros")

    def fails(case: Case) -> bool:
        """Fail if the last of an odd number of heads has numbers, which of zeros only the third one has."""
        return case.heads_kv % 2 == 1 and (case.dout_values == "normal" or case.heads_kv == 3)

    assert search(case).with_ordinary_numbers("heads_kv", (2, 4, 7), fails) == (2, 4)
    assert search(case).with_ordinary_numbers("heads_kv", (2, 4, 7), lambda case: case.heads_kv == 3) == (
        2,
        4,
        7,
    )


def test_a_bug_of_lengths_that_is_met_at_another_length_still_needs_some() -> None:
    """Else it would explain whatever is wrong in its tensors."""
    certain = bug(replace(CASE, seqlen_k=61), ("lse",), Condition("seqlen_k", (61,), (0, 60, 62, 64)))
    (need,) = met_again(certain, bug(replace(CASE, seqlen_k=62), ("lse",))).needs
    assert (need.fails, need.holds, need.side) == ((61, 62), (0, 60, 64), None)
    assert need.is_met(replace(CASE, seqlen_k=62))
    assert not need.is_met(replace(CASE, seqlen_k=64))
    above = bug(replace(CASE, seqlen_k=65), ("lse",), Condition("seqlen_k", (65,), (0, 64)))
    (need,) = met_again(above, bug(replace(CASE, seqlen_k=9), ("lse",))).needs
    assert need.is_met(replace(CASE, seqlen_k=9))
    above = bug(replace(CASE, seqlen_k=59), ("lse",), Condition("seqlen_k", (59,), (0, 32, 58)))
    (need,) = met_again(above, bug(replace(CASE, seqlen_k=58), ("lse",))).needs
    assert need.side == ("above", 32)


def test_a_length_of_which_no_other_is_known_to_hold_may_be_any() -> None:
    unknown = Condition("seqlen_q", (4,), ())
    assert unknown.side is None
    assert unknown.is_met(CASE)


def test_tensors_that_few_numbers_hide_are_told_by_normal_ones() -> None:
    """A key that is dropped makes dq wrong, unless k is 0; another bug makes dv wrong whatever the lengths are."""

    def wrong(case: Case) -> set[str]:
        dropped = {"out", "dk"} | ({"dq"} if case.k_values == "normal" else set())
        return {"dv"} | (dropped if case.seqlen_k > 64 else set())

    run = runner(wrong)
    runs = runs_of(CLAIMS, wrong=lambda law, case, ignored, *_: run(law, case, ignored))
    smallest = Case(seqlen_k=65, k_values="zeros", q_values="zeros")
    found = ConditionSearch(runs, bug(smallest, ("out",)).failure)
    assert found.tensors_of((LONG,), [smallest], lambda: None) == {"out", "dk", "dq"}
    by_numbers = Condition("qk_values", ("zeros",), ("normal",))
    assert "dq" not in found.tensors_of((LONG, by_numbers), [smallest], lambda: None)
