"""What a kernel answers is learned from the cases that it refuses, and asked where a bug's needs are looked for."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kernels.contract.parsing import PLAIN_FUNCTION
from strategies.case import Case
from tests.harness.diagnosis.confirmation import confirmed
from tests.harness.running.learned_claims import ALL_CLAIMED, FEWEST, Answered, AnsweredLaws, Asked


def learned(cases: list[Case], is_answered: Callable[[Case], bool]) -> Answered:
    answered = Answered(PLAIN_FUNCTION)
    for case in cases:
        answered.note(case, is_refused=not is_answered(case))
    return answered


@pytest.fixture(scope="module")
def lengths() -> list[Case]:
    """Return cases of all pairs of some lengths, one in four of which are multiples of 8."""
    some = (3, 8, 12, 16, 17, 30, 40, 65, 96, 129, 7, 20)
    return [Case(seqlen_q=q, seqlen_k=k) for q in some for k in some]


def test_a_rule_that_a_claim_can_say_is_learned_from_few_refusals(lengths: list[Case]) -> None:
    answered = learned(lengths, lambda case: case.seqlen_q % 8 == case.seqlen_k % 8 == 0)
    assert answered.claims == replace(PLAIN_FUNCTION, seqlen_multiple=8)
    assert answered.of_turn(1) == answered.claims
    assert answered.of_turn(ALL_CLAIMED) is PLAIN_FUNCTION


def test_nothing_is_learned_of_a_kernel_that_refuses_little_or_everything(lengths: list[Case]) -> None:
    assert learned(lengths, lambda case: case.seqlen_q > 3).claims is PLAIN_FUNCTION
    assert learned(lengths, lambda case: False).claims is PLAIN_FUNCTION


def test_an_answer_that_is_a_surprise_widens_what_was_learned(lengths: list[Case]) -> None:
    answered = learned(lengths, lambda case: case.seqlen_q % 8 == case.seqlen_k % 8 == 0)
    answered.note(Case(seqlen_q=12, seqlen_k=20), is_refused=False)
    assert answered.claims == replace(PLAIN_FUNCTION, seqlen_multiple=4)


def test_a_refused_dtype_is_not_learned_and_does_not_hide_other_rules(lengths: list[Case]) -> None:
    wide = [replace(case, dtype="float16") for case in lengths] + lengths[: 5 * FEWEST]
    answered = learned(
        wide, lambda case: case.dtype == "float16" and not (case.seqlen_q % 8 or case.seqlen_k % 8)
    )
    assert answered.claims == replace(PLAIN_FUNCTION, seqlen_multiple=8)


def asked(refuses: Callable[[Case], bool]) -> Asked:
    return Asked(**vars(PLAIN_FUNCTION), refuses=refuses)


def test_a_case_that_is_refused_is_not_claimed() -> None:
    claims = asked(lambda case: case.causal and case.seqlen_q > case.seqlen_k)
    assert PLAIN_FUNCTION.admits(Case(seqlen_q=2, causal=True))
    assert not claims.admits(Case(seqlen_q=2, causal=True))
    assert claims.admits(Case(seqlen_k=2, causal=True))


def test_lengths_that_are_refused_are_no_border_of_a_bug() -> None:
    case = Case(seqlen_q=65, seqlen_k=64, group=2)
    claims = asked(lambda case: case.seqlen_q > 128)
    shown = list(confirmed((), case, lambda case: not claims.refuses(case), claims))
    assert not any(need.holds for need in shown)
    shown = list(confirmed((), case, lambda case: case.seqlen_q > 64 and not claims.refuses(case), claims))
    assert [(need.name, str(need.rule)) for need in shown if need.holds] == [("seqlen_q", "above 64")]


def test_a_kernel_that_refuses_nearly_everything_is_asked_what_it_answers() -> None:
    """Of cases that are drawn it answers one in a hundred; those that are asked differ from one that it answers."""

    def refuses(case: Case) -> bool:
        is_usual = case.head_dim in (64, 128) and case.group == 1 and case.seqlen_q == case.seqlen_k
        return not is_usual or case.seqlen_q % 16 > 0

    answered = Answered(PLAIN_FUNCTION)
    for length in range(3, 60):
        answered.note(
            drawn := Case(seqlen_q=length, seqlen_k=2 * length, group=1 + length % 3), is_refused=True
        )
        answered.ask("float32", refuses)
        assert refuses(drawn)
    narrowed = answered.claims
    assert narrowed.admits(Case(seqlen_q=48, seqlen_k=48, head_dim=64))
    assert not narrowed.admits(Case(seqlen_q=40, seqlen_k=40, head_dim=64))
    assert not narrowed.admits(Case(seqlen_q=48, seqlen_k=96, head_dim=64))
    assert not narrowed.admits(Case(seqlen_q=48, seqlen_k=48, head_dim=64, group=2))


def test_what_is_answered_without_gradients_is_learned_by_itself() -> None:
    laws = AnsweredLaws(PLAIN_FUNCTION)
    assert laws.under("forward") is not laws.under("special")
    assert laws.under("special").law == "backward"
    forward_alone = AnsweredLaws(replace(PLAIN_FUNCTION, backward=False))
    assert forward_alone.under("special").law == "forward"
