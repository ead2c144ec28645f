"""A bug all of whose failing cases another one explains is none of its own; any other stays."""

from dataclasses import replace
from itertools import permutations

import pytest

from strategies.case import Case, Spike
from strategies.features import SCORES
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Bug, Condition, Occurrences, Severity
from tests.harness.bugs.dense import leaves_out_right
from tests.harness.bugs.duplicates import (
    MODIFIED,
    OUTSIDE_OF_STORAGE,
    WRITES_TO_EXPANDED,
    is_duplicate,
    met_again,
    why_same,
)
from tests.harness.clock import BudgetSpent
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
    left,
    runner,
)

NUMBERS = (Spike("v", (0, 0, 39, 15), 1.0), Spike("q", (0, 0, 0, 13), 1.0))
BY_NUMBERS = replace(
    bug(Case(seqlen_k=42, spikes=NUMBERS), ("out",), Condition(SCORES, ("other",), ("ordinary",))),
    severity=Severity(0, 20),
)
"""What the smallest case of a bug of many keys may seem to need, if it has few numbers."""
BY_LENGTH = replace(
    bug(Case(seqlen_k=41), ("out",), Condition("seqlen_k", (41,), (40, 32))), severity=Severity(15, 20)
)

EVERYWHERE = replace(BY_LENGTH, needs=(), severity=Severity(20, 20))
SMALL_EVERYWHERE = replace(bug(Case(), ("out",), relative=1e-4), severity=Severity(20, 20))


def many_keys(case: Case) -> set[str]:
    return {"out"} if case.seqlen_k > 40 else set()


def numbers(case: Case) -> set[str]:
    return {"out"} if case.spikes else set()


def seen(*cases: Case) -> Occurrences:
    drawn = Occurrences()
    for case in cases:
        drawn.add("forward", case, "out")
    return drawn


@pytest.mark.parametrize(
    ("wrong", "one", "other", "drawn", "expected"),
    [
        (many_keys, BY_NUMBERS, BY_LENGTH, (), True),
        (many_keys, BY_NUMBERS, BY_LENGTH, (Case(seqlen_k=300, spikes=NUMBERS),), True),
        (any_of(many_keys, numbers), BY_NUMBERS, BY_LENGTH, (), False),
        # The smallest case has both bugs, and a drawn one tells that they are two.
        (
            lambda case: many_keys(case) | (numbers(case) if case.batch > 1 else set()),
            BY_NUMBERS,
            BY_LENGTH,
            (Case(batch=2, seqlen_k=8, spikes=NUMBERS),),
            False,
        ),
        (many_keys, BY_LENGTH, BY_NUMBERS, (), False),
        (lambda case: set(), BY_NUMBERS, BY_LENGTH, (), False),
        # What needs nothing hides all of its tensors if most ordinary cases show it by much.
        (many_keys, BY_NUMBERS, EVERYWHERE, (), True),
        (many_keys, replace(BY_NUMBERS, needs=(CAUSAL,)), EVERYWHERE, (), False),
        (
            many_keys,
            replace(BY_NUMBERS, needs=(CAUSAL,)),
            replace(EVERYWHERE, severity=Severity(17, 20)),
            (),
            True,
        ),
        (many_keys, replace(BY_NUMBERS, tensors=("dv", "out")), EVERYWHERE, (), False),
        # What seems to need nothing, and holds in ordinary cases, may need what the other one does.
        (many_keys, BY_NUMBERS, replace(EVERYWHERE, severity=Severity(14, 20)), (), True),
        (
            many_keys,
            replace(BY_NUMBERS, needs=(CAUSAL,)),
            replace(EVERYWHERE, severity=Severity(14, 20)),
            (),
            False,
        ),
        (many_keys, replace(BY_NUMBERS, needs=()), replace(EVERYWHERE, severity=Severity(14, 20)), (), False),
        (many_keys, BY_NUMBERS, replace(SMALL_EVERYWHERE, severity=Severity(14, 20)), (), False),
        (many_keys, BY_NUMBERS, SMALL_EVERYWHERE, (), False),
        (many_keys, replace(BY_NUMBERS, severity=Severity(16, 20)), BY_LENGTH, (), False),
    ],
)
def test_another_bug_has_to_explain_every_failing_case(
    wrong: Wrong, one: Bug, other: Bug, drawn: tuple[Case, ...], expected: bool
) -> None:
    assert is_duplicate(one, other, seen(*drawn), runner(wrong), CLAIMS) == expected


def test_a_third_bug_may_be_in_the_cases_that_cure_the_other_one() -> None:
    """The kernel has two bugs: out is wrong beyond 40 keys, and under a causal mask with fewer keys than queries."""

    def masked(case: Case) -> set[str]:
        return {"out"} if case.causal and case.seqlen_q > case.seqlen_k else set()

    drawn = seen(Case(seqlen_q=52, seqlen_k=193, causal=True))
    of_mask = bug(Case(seqlen_q=2, causal=True), ("out",), CAUSAL)
    of_mask = replace(of_mask, failure=replace(of_mask.failure, number=1))
    run = runner(any_of(many_keys, masked))
    assert not is_duplicate(BY_NUMBERS, BY_LENGTH, drawn, run, CLAIMS)
    assert is_duplicate(BY_NUMBERS, BY_LENGTH, drawn, run, CLAIMS, [of_mask])
    # If that explains a whole case, the case says nothing for the other bug.
    drawn = seen(Case(seqlen_q=52, seqlen_k=45, causal=True))
    run = runner(lambda case: many_keys(case) if case.seqlen_q == 1 else masked(case))
    assert not is_duplicate(BY_NUMBERS, BY_LENGTH, drawn, run, CLAIMS, [of_mask])


def test_the_other_bug_found_twice_is_no_third_one() -> None:
    drawn = seen(Case(seqlen_k=41))
    again = replace(BY_LENGTH, failure=replace(BY_LENGTH.failure, number=1))
    assert is_duplicate(BY_NUMBERS, BY_LENGTH, drawn, runner(many_keys), CLAIMS, [again])


@pytest.mark.parametrize(("left", "expected"), [(1e-4, True), (0.1, False)])
def test_roundings_that_are_left_of_a_large_error_are_another_matter(left: float, expected: bool) -> None:
    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return of_half if case.seqlen_k > 40 else finding({"out"}, relative=left)

    def found_by_half(one: Bug) -> Bug:
        return replace(one, failure=replace(one.failure, finding=of_half))

    of_half = Finding(claim="so", kind="error", tensor="out", tensors=("out",), relative=0.5)
    large, known = found_by_half(BY_NUMBERS), found_by_half(BY_LENGTH)
    assert is_duplicate(large, known, seen(), run, CLAIMS) == expected


def test_the_search_ends_with_its_time() -> None:
    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        raise BudgetSpent

    with pytest.raises(BudgetSpent):
        is_duplicate(BY_NUMBERS, BY_LENGTH, seen(), run, CLAIMS)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(seqlen_q=32, seqlen_k=15), True),  # long enough to tell, and out is right
        (Case(seqlen_q=32, seqlen_k=41), False),
        (Case(seqlen_q=32, seqlen_k=1), False),  # with one key, and 65 as well, out may be right by chance
    ],
)
def test_out_is_right_at_the_lengths_of_the_failure(case: Case, expected: bool) -> None:
    """A forward that is wrong for many keys does not explain gradients that are wrong for few."""

    def wrong(x: Case) -> set[str]:
        return {"dk"} | many_keys(x)

    of_dk = finding({"dk"})
    assert of_dk is not None
    assert leaves_out_right("backward", case, of_dk, runner(wrong), CLAIMS) == expected


@pytest.mark.parametrize(
    "refusal", [f"{WRITES_TO_EXPANDED}. Please clone() the tensor", f"q {MODIFIED}: version 4"]
)
def test_pytorch_refuses_what_follows_from_writing_to_an_input(refusal: str) -> None:
    text = f"the kernel raised RuntimeError: {refusal}"
    writes = bug(Case(), ("q",))
    writes = replace(
        writes, failure=replace(writes.failure, finding=Finding(claim="kept", kind="memory", tensor="q"))
    )
    raises = bug(Case(q_layout="expanded"), ())
    for claim, expected in ((text, True), ("the kernel raised ValueError: no such layout", False)):
        of_layout = replace(
            raises, failure=replace(raises.failure, finding=Finding(claim=claim, kind="exception"))
        )
        assert bool(why_same(writes, of_layout, runner(numbers), CLAIMS)) == expected
        assert not why_same(BY_LENGTH, of_layout, runner(numbers), CLAIMS)


def test_strides_of_expanded_inputs_are_refused_or_make_gradients_wrong() -> None:
    """A kernel allocates dk and dv with the strides of k and v, so that several elements lie in one place."""
    claim = f"the kernel raised RuntimeError: {WRITES_TO_EXPANDED}. Please clone() the tensor"

    def raises(name: str, claim: str = claim) -> Bug:
        need = Condition(name, ("expanded_rows",), ("contiguous",))
        told = bug(Case(seqlen_k=2, k_layout="expanded_rows", v_layout="expanded_rows"), (), need)
        return replace(told, failure=replace(told.failure, finding=Finding(claim=claim, kind="exception")))

    of_numbers = bug(
        Case(seqlen_k=2, k_layout="expanded"), ("dk",), Condition("k_layout", ("expanded",), ("contiguous",))
    )
    for one, other, expected in (
        (raises("k_layout"), raises("v_layout"), True),
        (raises("k_layout"), of_numbers, True),
        (raises("v_layout"), of_numbers, False),
        (raises("k_layout", "no such layout"), of_numbers, False),
    ):
        assert bool(why_same(one, other, runner(numbers), CLAIMS)) == expected
        assert bool(why_same(other, one, runner(numbers), CLAIMS)) == expected


@pytest.mark.parametrize(
    ("other", "text", "expected"),
    [
        (Condition("k_layout", ("gap",), ("contiguous",)), OUTSIDE_OF_STORAGE, True),
        (Condition("k_layout", ("gap",), ("contiguous",)), "no such layout", False),
        (Condition("v_layout", ("gap",), ("contiguous",)), OUTSIDE_OF_STORAGE, False),
        (CAUSAL, OUTSIDE_OF_STORAGE, False),
    ],
)
def test_pytorch_refuses_a_view_by_strides_that_elsewhere_make_numbers_wrong(
    other: Condition, text: str, *, expected: bool
) -> None:
    claim = f"the kernel raised RuntimeError: setStorage: strides [16, 1] {text} 512"
    raises = bug(Case(causal=True, k_layout="expanded_rows"), ())
    raises = replace(raises, failure=replace(raises.failure, finding=Finding(claim=claim, kind="exception")))
    numbers_of = bug(Case(causal=True, k_layout="gap"), ("out",), other)
    assert bool(why_same(numbers_of, raises, runner(numbers), CLAIMS)) == expected


@pytest.mark.parametrize(("need", "expected"), [(CAUSAL, True), (Condition("batch", (2,), (1,)), False)])
def test_an_exception_with_the_needs_of_a_wrong_shape_is_the_same_bug(
    need: Condition, expected: bool
) -> None:
    """A tensor that has lost a dimension is returned here, and used there."""
    raises, misshapen = (bug(Case(causal=True), (), x) for x in (CAUSAL, need))
    kinds = ("exception", "contract")
    raises, misshapen = (
        replace(one, failure=replace(one.failure, finding=Finding(claim="", kind=kind)))
        for one, kind in zip((raises, misshapen), kinds, strict=True)
    )
    assert bool(why_same(misshapen, raises, runner(numbers), CLAIMS)) is expected


def test_roundings_that_ordinary_numbers_of_a_dtype_do_not_show_are_cured_by_a_third_dtype() -> None:
    of_dtype = Condition("dtype", ("float32",), ("float16", "bfloat16"))
    always = replace(bug(CASE, ("dv",), of_dtype, relative=1e-3), severity=Severity(20, 20))
    elsewhere, imprecise = replace(CASE, dtype="bfloat16", v_values="outliers"), ("rounded_scores=true",)
    special = bug(elsewhere, ("dv",), OF_V, relative=1e-3, explained_by=imprecise)

    def wrong(case: Case) -> set[str]:
        shows = case.dtype == "float32" or (case.dtype == "bfloat16" and case.v_values != "normal")
        return {"dv"} if shows else set()

    assert why_same(always, special, runner(wrong), CLAIMS)
    assert met_again(always, special) == always
    ordinary = replace(special, severity=Severity(3, 20))
    assert not why_same(always, ordinary, runner(wrong), CLAIMS)
    assert not why_same(always, special, runner(any_of(wrong, lambda case: {"dv"})), CLAIMS)
    small_but_wrong = bug(elsewhere, ("dv",), OF_V, relative=1e-3)
    assert not why_same(always, small_but_wrong, runner(wrong), CLAIMS)


def test_a_scale_that_holds_where_it_is_as_large_does_not_matter_by_making_large_scores() -> None:
    scores = Condition(SCORES, ("other",), ("ordinary",))
    negative, large = Condition("sm_scale", (-1.0,), (None, 1.0)), Condition("sm_scale", (30.0,), (None, 1.0))
    of_sign, of_size = replace(CASE, sm_scale=-1.0), replace(CASE, sm_scale=30.0)
    spiked = bug(replace(CASE, sm_scale=1.0, q_values="outliers"), ("out",), scores)

    def wrong(case: Case) -> set[str]:
        return {"out"} if abs(case.scale) > 1 or case.scale < 0 or case.q_values != "normal" else set()

    assert not why_same(bug(of_sign, ("out",), negative), spiked, runner(wrong), CLAIMS)
    spiked = bug(replace(CASE, q_values="outliers"), ("out",), scores)
    assert why_same(bug(of_size, ("out",), large), spiked, runner(wrong), CLAIMS)


def test_a_length_that_holds_by_its_numbers_is_no_other_bug() -> None:
    """The numbers of each smallest case show the bug at its own length alone."""
    one = bug(replace(CASE, seqlen_k=129), ("lse",), Condition("seqlen_k", (129,), (0, 128, 130, 259)))
    two = bug(replace(CASE, seqlen_k=259, seed=1), ("lse",), Condition("seqlen_k", (259,), (0, 128, 258)))

    def wrong(case: Case) -> set[str]:
        return {"lse"} if case.seqlen_k == (259 if case.seed else 129) else set()

    assert why_same(one, two, runner(wrong), CLAIMS)
    border = bug(replace(CASE, seqlen_k=129), ("lse",), Condition("seqlen_k", (129,), (0, 128)))
    short = bug(replace(CASE, seqlen_k=3), ("lse",), Condition("seqlen_k", (3,), (0, 128, 259)))
    assert not why_same(border, short, runner(lambda case: {"lse"}), CLAIMS)


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
        assert why_same(known, found, runner(wrong), CLAIMS)
    coarse = bug(replace(equal, seqlen_k=259), ("lse",), CAUSAL, Condition("seqlen_k", (259,), (0, 100, 260)))
    assert why_same(one, coarse, runner(wrong), CLAIMS)
    later = bug(replace(equal, seqlen_k=259), ("lse",), CAUSAL, Condition("seqlen_k", (259,), (0, 200)))
    assert not why_same(one, later, runner(wrong), CLAIMS)
    more = bug(equal, ("lse", "out"), CAUSAL, Condition("seqlen_k", (129,), (0, 128)))
    assert not why_same(one, more, runner(wrong), CLAIMS)
    of_masks = bug(equal, ("lse",), CAUSAL, GROUP)
    assert not why_same(bug(ordinary, ("lse",), GROUP), of_masks, runner(wrong), CLAIMS)


@pytest.mark.parametrize(
    ("holds", "expected"),
    [((128, 1024), True), ((128, 1098), True), ((128, 512), False), ((128, 2048), False)],
)
def test_two_bugs_hardly_begin_beyond_the_same_length_that_is_more_than_a_tile(
    holds: tuple[int, ...], expected: bool
) -> None:
    """Another kernel, which is wrong in dq and dk, is taken for more than 1,024 keys."""
    one = bug(replace(CASE, seqlen_k=4098), ("dk",), Condition("seqlen_k", (4098,), (64, 1024)))
    other = bug(replace(CASE, seqlen_k=3000), ("dq",), Condition("seqlen_k", (3000,), holds))
    assert bool(why_same(one, other, runner(lambda case: {"dk", "dq"}), CLAIMS)) == expected


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
        assert not why_same(known, found, runner(wrong), CLAIMS)
    run = runner(wrong)
    for case, known, rest in ((zero, of_dk, {"dq", "dv", "lse", "out"}), (other, of_forward, {"dk"})):
        failure = run("backward", case, frozenset())
        assert failure is not None
        outcome = explain_by_known_bugs(FailingExample("backward", case, failure), [known], run, CLAIMS)
        assert outcome.rest is not None
        assert {*outcome.rest.finding.tensors} == rest
    one = bug(other, ("dk",), needs_other, law="backward")
    more = bug(replace(other, seed=1), ("dk", "out"), needs_other)
    assert why_same(
        one, more, runner(lambda case: {"dk", "out"} if case.sm_scale is not None else set()), CLAIMS
    )


def test_last_bits_that_differ_by_one_claim_are_one_bug_whatever_law_and_numbers_show_them() -> None:
    """The kernel splits keys by what else is in the batch, as a law of batches shows, and a law of ragged calls."""

    def of_bits(claim: str, law: str, tensor: str, *needs: Condition, relative: float = 1e-7) -> Bug:
        known = bug(CASE, (tensor,), *needs, law=law, relative=relative, allowed=0.0, other=1)
        finding = replace(known.failure.finding, claim=f"{claim} {tensor}")
        failure = replace(known.failure, finding=finding)
        return replace(known, failure=failure, severity=Severity(5, 20))

    alone = "a sequence alone has the same"
    batch = of_bits(alone, "determinism", "lse", GROUP)
    run = runner(lambda case: {"lse", "out"})
    for one, expected in (
        (of_bits(alone, "ragged", "out", CAUSAL), True),
        (of_bits("the same call gives the same", "determinism", "out", CAUSAL), False),
        (of_bits(alone, "ragged", "out", CAUSAL, relative=0.5), False),
    ):
        assert bool(why_same(batch, one, run, CLAIMS)) == expected


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
        assert not why_same(bugs[one], bugs[other], runner(wrong), CLAIMS)
        assert why_same(bugs[one], bugs[one], runner(wrong), CLAIMS)


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
        assert why_same(known, found, runner(lambda case: set()), CLAIMS)
    assert not why_same(exact, bug(CASE, ("out",), CAUSAL), runner(causal), CLAIMS)


def test_a_change_that_brings_in_a_third_bug_tells_nothing() -> None:
    """Without a causal mask out is wrong as well, by another bug, so no change of the mask can make it right."""
    unmasked = replace(CASE, causal=False)
    without_mask = bug(unmasked, ("out",), Condition("causal", (False,), (True,)), law="backward")
    long, longer = Condition("seqlen_k", (65,), (0, 64)), Condition("seqlen_k", (90,), (0, 32, 70))
    one, two = bug(CASE, ("out",), long), bug(replace(CASE, seed=1), ("out",), CAUSAL, longer)
    run = runner(lambda case: {"out"} if not case.causal or case.seqlen_k > 64 else set())
    assert why_same(one, two, run, CLAIMS, [without_mask, one, two])
    assert not why_same(one, two, run, CLAIMS, [bug(unmasked, ("out",), GROUP, law="backward")])
    assert not why_same(one, two, run, CLAIMS, [replace(without_mask, tensors=("lse",))])


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
    assert not why_same(of_lse, of_out, run, CLAIMS, [of_dk])
    unknown = replace(of_dk, tensors=("dk", "out"))
    assert why_same(of_lse, of_out, run, CLAIMS, [unknown])


def test_out_of_a_bug_that_was_found_beside_one_that_spoils_it_tells_nothing() -> None:
    def wrong(case: Case) -> set[str]:
        return {"dk"} if case.causal or case.group == 1 else {"dk", "out"}

    scale = Condition("sm_scale", (None,), (1.0,))
    masked, open_ = (bug(replace(CASE, causal=x), ("dk",), scale, law="backward") for x in (True, False))
    assert not why_same(masked, open_, runner(wrong), CLAIMS)
    beside = replace(open_, failure=replace(open_.failure, ignored=frozenset({"out"}), number=1))
    assert why_same(masked, beside, runner(wrong), CLAIMS)


@pytest.mark.parametrize(("certain", "expected"), [(True, True), (False, False)])
def test_a_bug_of_no_known_need_is_cured_by_what_another_one_surely_needs(
    certain: bool, expected: bool
) -> None:
    """Unequal lengths matter in the small case of the other bug by accident, and the large case has equal ones."""
    scale = Condition("sm_scale", (None,), (1.0,), is_certain=certain)
    small = bug(Case(seqlen_k=2), ("dk",), UNEQUAL, scale, law="backward")
    large = bug(replace(CASE, seqlen_k=CASE.seqlen_q), ("dk",), law="backward")
    run = runner(lambda case: {"dk"} if case.sm_scale is None else set())
    assert bool(why_same(large, small, run, CLAIMS)) == expected


NOT_FINITE = Finding(claim="so", kind="nonfinite", tensor="out", tensors=("out",))


def test_a_gradient_that_is_right_where_another_bug_shows_is_a_bug_of_its_own() -> None:
    """Every group makes dk wrong, and one of three makes dv wrong."""

    def wrong(case: Case) -> set[str]:
        return {"dk"} if case.group == 2 else {"dk", "dv"} if case.group == 3 else set()

    of_dk = bug(CASE, ("dk",), GROUP, law="backward")
    of_dv = bug(replace(CASE, group=3), ("dv",), Condition("group", (3,), (1,)), law="backward")
    assert not why_same(of_dk, of_dv, runner(wrong), CLAIMS)
    always_both = runner(lambda case: {"dk", "dv"} if case.group > 1 else set())
    assert why_same(of_dk, of_dv, always_both, CLAIMS)


def test_a_format_of_few_bits_rounds_ordinary_numbers_and_makes_small_ones_0() -> None:
    of_dtype, scores = (
        Condition("dtype", ("float32",), ("float16",)),
        Condition(SCORES, ("other",), ("ordinary",)),
    )
    rounds = replace(bug(CASE, ("dv", "out"), of_dtype, relative=1e-4), severity=Severity(20, 20))
    small = replace(CASE, dtype="bfloat16", q_values="wide")
    run = runner(lambda case: {"dv", "out"})
    flushes = bug(small, ("out",), scores, OF_V, Condition("seqlen_k", (2,), (1,)), relative=1.0)
    assert why_same(rounds, flushes, run, CLAIMS)
    assert why_same(flushes, rounds, run, CLAIMS)
    assert why_same(rounds, replace(flushes, tensors=("dk", "out")), run, CLAIMS)
    scaled = Condition("sm_scale", (-1.0,), (None, 0.125))
    tiny = bug(replace(small, sm_scale=-1.0), ("out",), scaled, OF_V, expected=9e-11, relative=1e-3)
    for other in (
        replace(flushes, needs=(*flushes.needs, CAUSAL)),
        replace(flushes, tensors=("lse", "out")),
        replace(flushes, needs=(scores,), failure=replace(flushes.failure, finding=NOT_FINITE)),
    ):
        assert not why_same(rounds, other, run, CLAIMS)
    wide = replace(rounds, needs=(replace(of_dtype, holds=("bfloat16", "float16")),))
    assert why_same(wide, tiny, run, CLAIMS)
    assert not why_same(wide, replace(tiny, needs=(replace(scaled, fails=(-0.1,)), OF_V)), run, CLAIMS)
    usual = replace(tiny.failure, finding=replace(tiny.failure.finding, expected=1.0))
    assert not why_same(wide, replace(tiny, failure=usual), run, CLAIMS)
    assert not why_same(replace(rounds, severity=Severity(3, 20)), flushes, run, CLAIMS)
    assert not why_same(rounds, replace(flushes, severity=Severity(3, 20)), run, CLAIMS)


def test_lengths_that_cure_small_cases_of_two_tensors_do_not_make_them_one_bug() -> None:
    tail, later = Condition("seqlen_k", (2,), (1, 32, 64)), Condition("seqlen_k", (32,), (31, 33, 64))
    of_out = bug(replace(CASE, seqlen_k=2), ("out",), tail)
    of_lse = bug(replace(CASE, seqlen_k=32), ("lse",), later, law="memory")

    def wrong(case: Case) -> set[str]:
        return {"out"} if case.seqlen_k == 2 else {"lse"} if case.seqlen_k == 32 else set()

    assert not why_same(of_out, of_lse, runner(wrong), CLAIMS)
    of_both = bug(replace(CASE, seqlen_k=32), ("lse", "out"), later)
    assert why_same(
        of_out, of_both, runner(lambda case: {"lse", "out"} if case.seqlen_k in (2, 32) else set()), CLAIMS
    )
