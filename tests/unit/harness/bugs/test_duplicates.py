"""A bug all of whose failing cases another one explains is none of its own; any other stays."""

from dataclasses import replace

import pytest

from strategies.case import Case, Spike
from strategies.features import SCORES
from tests.harness.bugs.bug import Bug, Condition, Occurrences, Severity
from tests.harness.bugs.dense import leaves_out_right
from tests.harness.bugs.duplicates import OUTSIDE_OF_STORAGE, WRITES_TO_EXPANDED, is_duplicate
from tests.harness.clock import BudgetSpent
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CAUSAL, CLAIMS, Wrong, any_of, bug, finding, runner

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


def test_pytorch_refuses_to_write_to_an_expanded_input_that_a_bug_writes_to() -> None:
    text = f"the kernel raised RuntimeError: {WRITES_TO_EXPANDED}. Please clone() the tensor"
    writes = bug(Case(), ("q",))
    writes = replace(
        writes, failure=replace(writes.failure, finding=Finding(claim="kept", kind="memory", tensor="q"))
    )
    raises = bug(Case(q_layout="expanded"), ())
    for claim, expected in ((text, True), ("the kernel raised ValueError: no such layout", False)):
        of_layout = replace(
            raises, failure=replace(raises.failure, finding=Finding(claim=claim, kind="exception"))
        )
        assert is_duplicate(of_layout, writes, seen(), runner(numbers), CLAIMS) == expected
        assert not is_duplicate(of_layout, BY_LENGTH, seen(), runner(numbers), CLAIMS)


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
    assert is_duplicate(raises, numbers_of, seen(), runner(numbers), CLAIMS) == expected


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
    assert is_duplicate(raises, misshapen, seen(), runner(numbers), CLAIMS) is expected
    assert not is_duplicate(misshapen, raises, seen(), runner(numbers), CLAIMS)
