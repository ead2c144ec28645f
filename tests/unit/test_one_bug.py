"""One bug stays one in further tensors, other numbers, dtypes and lengths, and if there are two ways to trigger it."""

from dataclasses import replace
from itertools import permutations

from strategies.case import Case
from tests.harness.attribute import Broken, attribute, is_same
from tests.harness.bugs import Bug, Need, Severity, met_again
from tests.harness.vary import SCORES
from tests.unit.bugs import CASE, CAUSAL, CLAIMS, GROUP, OF_V, Wrong, any_of, bug, causal, long_lse, runner


def left(wrong: Wrong, case: Case, known: Bug) -> tuple[Broken | None, list[Bug]]:
    """Return what a known bug leaves of a failure of the forward law, and the bugs that are blamed."""
    run = runner(wrong)
    found = run("forward", case, frozenset())
    assert found is not None
    outcome = attribute(Broken("forward", case, found), [known], run, CLAIMS)
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
    of_dtype = Need("dtype", ("float32",), ("float16", "bfloat16"))
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
    scores = Need(SCORES, ("other",), ("ordinary",))
    negative, large = Need("sm_scale", (-1.0,), (None, 1.0)), Need("sm_scale", (30.0,), (None, 1.0))
    of_sign, of_size = replace(CASE, sm_scale=-1.0), replace(CASE, sm_scale=30.0)
    spiked = bug(replace(CASE, sm_scale=1.0, q_values="outliers"), ("out",), scores)

    def wrong(case: Case) -> set[str]:
        return {"out"} if abs(case.scale) > 1 or case.scale < 0 or case.q_values != "normal" else set()

    assert not is_same(bug(of_sign, ("out",), negative), spiked, runner(wrong), CLAIMS)
    spiked = bug(replace(CASE, q_values="outliers"), ("out",), scores)
    assert is_same(bug(of_size, ("out",), large), spiked, runner(wrong), CLAIMS)


def test_a_length_that_holds_by_its_numbers_is_no_other_bug() -> None:
    """The numbers of each smallest case show the bug at its own length alone."""
    one = bug(replace(CASE, seqlen_k=129), ("lse",), Need("seqlen_k", (129,), (0, 128, 130, 259)))
    two = bug(replace(CASE, seqlen_k=259, seed=1), ("lse",), Need("seqlen_k", (259,), (0, 128, 258)))

    def wrong(case: Case) -> set[str]:
        return {"lse"} if case.seqlen_k == (259 if case.seed else 129) else set()

    assert is_same(one, two, runner(wrong), CLAIMS)
    border = bug(replace(CASE, seqlen_k=129), ("lse",), Need("seqlen_k", (129,), (0, 128)))
    short = bug(replace(CASE, seqlen_k=3), ("lse",), Need("seqlen_k", (3,), (0, 128, 259)))
    assert not is_same(border, short, runner(lambda case: {"lse"}), CLAIMS)


def test_a_second_way_to_show_a_bug_begins_at_the_same_length() -> None:
    """Equal scores hide a maximum that is not the right one, unless a causal mask hides the keys that have it."""
    ordinary = replace(CASE, seqlen_k=129, causal=False)
    equal = replace(CASE, seqlen_k=129, q_values="zeros")
    one = bug(ordinary, ("lse",), Need("seqlen_k", (129,), (0, 64, 128)))
    two = bug(equal, ("lse",), CAUSAL, Need("seqlen_k", (129,), (0, 128, 130)))

    def wrong(case: Case) -> set[str]:
        shows = case.seqlen_k > 128 and (case.q_values == "normal" or case.causal)
        return {"lse"} if shows else set()

    for known, found in ((one, two), (two, one)):
        assert is_same(known, found, runner(wrong), CLAIMS)
    later = bug(equal, ("lse",), CAUSAL, Need("seqlen_k", (129,), (0, 100)))
    assert not is_same(one, later, runner(wrong), CLAIMS)
    more = bug(equal, ("lse", "out"), CAUSAL, Need("seqlen_k", (129,), (0, 128)))
    assert not is_same(one, more, runner(wrong), CLAIMS)
    of_masks = bug(equal, ("lse",), CAUSAL, GROUP)
    assert not is_same(bug(ordinary, ("lse",), GROUP), of_masks, runner(wrong), CLAIMS)


def test_gradients_where_out_is_right_are_no_bug_of_the_forward() -> None:
    """A scale of 0 is taken for the default one; beside that dk is multiplied by the default in place of the scale."""
    zero, other = replace(CASE, causal=False, sm_scale=0.0), replace(CASE, causal=False, sm_scale=-0.5)
    needs_zero = Need("sm_scale", (0.0,), (None, 1.0))
    needs_other = Need("sm_scale", (-0.5,), (None,))

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
        outcome = attribute(Broken("backward", case, failure), [known], run, CLAIMS)
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
    large = bug(replace(CASE, q_values="outliers"), ("lse", "out"), Need(SCORES, ("other",), ("ordinary",)))
    for known, found in ((exact, large), (large, exact)):
        assert is_same(known, found, runner(lambda case: set()), CLAIMS)
    assert not is_same(exact, bug(CASE, ("out",), CAUSAL), runner(causal), CLAIMS)


def test_a_length_that_is_equal_to_head_dim_is_one_bug_at_every_head_dim() -> None:
    """Which axis of a tensor is which may be guessed by their sizes."""
    cases = [Case(seqlen_k=x, head_dim=x) for x in (16, 64)]
    needs = [
        (Need("seqlen_k", (one,), (other,)), Need("head_dim", (one,), (other,)))
        for one, other in ((16, 64), (64, 16))
    ]
    equal, equal_too = (bug(case, ("dv",), *need) for case, need in zip(cases, needs, strict=True))
    assert equal.is_like(equal_too)
    assert not equal.is_like(bug(replace(cases[1], seqlen_k=65), ("dv",), *needs[1]))
