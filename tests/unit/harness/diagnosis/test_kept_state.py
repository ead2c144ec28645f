"""A kernel that keeps state has one bug: what fails after other calls alone is counted for it, and nothing else is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from tests.harness.bugs.attribution import FailingExample
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.duplicates import met_again, why_same
from tests.harness.bugs.failure import headline
from tests.harness.clock import ShrinkBudget
from tests.harness.device.left_behind import OF_EARLIER
from tests.harness.diagnosis import triage
from tests.harness.diagnosis.known_bugs import KnownBugs
from tests.harness.diagnosis.reruns import makes_several_calls, right_alone
from tests.harness.diagnosis.triage import Triage
from tests.harness.running.child import OutOfTime
from tests.harness.running.tally import Tally
from tests.harness.verdict import AFTER_OTHERS, INTERMITTENT, LEAVES, STATE, STAYS, Finding
from tests.unit.support.bugs import bug
from tests.unit.support.stubs import runs_of

CASE = Case(seqlen_q=9, seqlen_k=9)
AFTER_ONE = replace(CASE, earlier=("same",))
WITH_NUMBERS: dict[str, Any] = {"expected": 1.0, "actual": 2.0, "relative": 1.0}


def wrong(*tensors: str) -> Finding:
    return Finding(claim="so", kind="error", tensor=tensors[0], tensors=tensors, **WITH_NUMBERS)


def keeping(*tensors: str) -> Bug:
    """Return a bug of which the earlier call that it needs is known."""
    return bug(AFTER_ONE, tensors, law="sequences", **WITH_NUMBERS)


def after_others(*tensors: str) -> Bug:
    """Return a bug of which it is known that it needs other calls, and not which ones."""
    known = bug(CASE, tensors, **WITH_NUMBERS)
    return replace(known, failure=replace(known.failure, finding=right_alone(wrong(*tensors))))


def test_what_shows_after_the_same_calls_is_one_bug_in_whatever_tensor() -> None:
    """A function that is kept without its scale makes lse wrong in one case, and dk in another."""

    def after(call: str, tensor: str) -> Bug:
        need = Condition("earlier", ((call,),), ((),))
        return bug(replace(CASE, earlier=(call,)), (tensor,), need, law="sequences")

    of_lse = after("scale", "lse")
    assert of_lse.keeps_state_as(after("scale", "dk"))
    assert not of_lse.keeps_state_as(after("shorter", "dk"))


def test_another_forward_before_the_backward_is_another_call() -> None:
    """A kernel keeps a buffer for each shape: the next forward overwrites what the backward of the first one needs."""
    of_way = Condition("way", ("other_scale",), ("none",))
    kept = bug(replace(CASE, way="other_scale"), ("dq", "dk", "dv"), of_way)
    alone = bug(replace(CASE, way="v_alone"), ("dv",), Condition("way", ("v_alone",), ("none",)))
    raised = Finding(claim="it runs", kind=AFTER_OTHERS)
    assert kept.may_spoil_later(raised)
    assert not alone.may_spoil_later(raised)


def test_memory_that_is_returned_again_is_what_a_later_call_writes_over() -> None:
    """Once the law on processes finds an lse in the memory of an earlier one, once a later call has changed that."""

    def told(claim: str, kind: str, tensor: str, law: str) -> Bug:
        known = bug(CASE, (tensor,), law=law, **WITH_NUMBERS)
        return replace(
            known, failure=replace(known.failure, finding=Finding(claim=claim, kind=kind, tensor=tensor))
        )

    reused = told(LEAVES + OF_EARLIER.format("lse"), STATE, "", "process")
    for name, expected in (("lse", True), ("out", False)):
        changed = told(STAYS.format(name), "error", name, "sequences")
        assert reused.keeps_state_as(changed) is expected
        assert not changed.keeps_state_as(reused)


@pytest.mark.parametrize("made", [keeping, after_others])
def test_what_is_kept_of_a_forward_spoils_all_and_what_is_kept_of_a_backward_gradients_alone(
    made: Callable[..., Bug],
) -> None:
    assert headline(made("dv").failure).endswith("dv keeps state (float32)")
    assert made("lse").may_spoil_later(wrong("dk"))
    assert made("lse").may_spoil_later(wrong("out"))
    assert made("dv").may_spoil_later(wrong("dk"))
    assert not made("dv").may_spoil_later(wrong("out", "dv"))
    assert not made("out").may_spoil_later(Finding(claim="it runs", kind="exception"))
    assert made("out").may_spoil_later(Finding(claim="it runs", kind=AFTER_OTHERS))


def test_a_bug_of_single_calls_spoils_no_later_one() -> None:
    assert not bug(CASE, ("out",), **WITH_NUMBERS).may_spoil_later(wrong("out"))
    assert not bug(AFTER_ONE, ("out",), **WITH_NUMBERS).may_spoil_later(wrong("out"))


def test_bugs_of_which_one_needs_unknown_calls_are_one_if_it_may_be_spoilt_by_the_other() -> None:
    assert keeping("dv").keeps_state_as(after_others("dk"))
    assert after_others("out").keeps_state_as(after_others("lse"))
    assert not keeping("dv").keeps_state_as(after_others("out"))
    assert not bug(CASE, ("dk",), **WITH_NUMBERS).keeps_state_as(after_others("dk"))


def test_a_failure_that_comes_and_goes_is_one_that_is_right_in_a_new_process() -> None:
    """Repeating its case made the calls on which it depends, or made others."""

    def now_and_then(tensor: str) -> Bug:
        seldom = bug(CASE, (tensor,), **WITH_NUMBERS)
        finding = replace(seldom.failure.finding, kind=INTERMITTENT, rate=(1, 9))
        return replace(seldom, failure=replace(seldom.failure, finding=finding))

    assert after_others("out").keeps_state_as(now_and_then("out"))
    assert after_others("out").keeps_state_as(now_and_then("dq"))
    assert not after_others("dq").keeps_state_as(now_and_then("out"))
    assert not bug(CASE, ("out",), **WITH_NUMBERS).keeps_state_as(now_and_then("out"))


def test_a_bug_whose_smallest_case_holds_alone_is_what_another_one_keeps() -> None:
    plain = bug(replace(CASE, causal=True), ("dk",), law="backward", **WITH_NUMBERS)

    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return wrong("dk") if case.causal and fails else None

    for fails in (False, True):
        for one, other in ((keeping("dv"), plain), (plain, keeping("dv"))):
            assert why_same(one, other, run, Capabilities()) is not fails
    fails = False
    assert not why_same(keeping("dv"), bug(CASE, ("out",), **WITH_NUMBERS), run, Capabilities())


def test_a_bug_that_other_cases_made_leaves_what_the_known_one_needs() -> None:
    known = replace(keeping("dv"), needs=(Condition("earlier", (("same",),), ((),)),))
    again = met_again(known, bug(CASE, ("dk",), law="backward", **WITH_NUMBERS))
    assert (again.needs, again.tensors) == (known.needs, ("dk", "dv"))


def test_no_rate_is_told_of_what_needs_other_calls() -> None:
    found = right_alone(wrong("out"))
    assert (found.kind, found.rate) == (AFTER_OTHERS, ())
    assert found.certificate == "is right as the first call of a process, and wrong after other calls"


@pytest.mark.parametrize(
    ("law", "way", "several"),
    [
        ("forward", "", False),
        ("backward", "second_backward", False),
        ("determinism", "", True),
        ("additivity", "", True),
        ("calls", "second_backward", True),
        ("calls", "dout_transposed", False),
    ],
)
def test_some_laws_and_ways_call_a_kernel_again(law: str, way: str, several: bool) -> None:
    case = replace(CASE, way=way) if way else CASE
    assert makes_several_calls(FailingExample(law, case, wrong("dq"))) is several


@pytest.fixture
def known(tmp_path: Path) -> KnownBugs:
    return KnownBugs("k", "float32", tmp_path, verbose=False)


def test_a_bug_of_which_it_is_known_what_it_needs_is_blamed_first(known: KnownBugs) -> None:
    assert known.keeping(wrong("dk")) is None
    known.bugs = {"a": after_others("out"), "b": keeping("dv"), "c": bug(CASE, ("dk",), **WITH_NUMBERS)}
    assert known.keeping(wrong("dk")) is known.bugs["b"]
    assert known.keeping(wrong("out")) is known.bugs["a"]


class TestSpoilt:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
        """Return the cases for which a new process is asked; those with a mask fail there."""
        cases: list[Case] = []

        def fails_anew(broken: FailingExample, runs: Any) -> bool:
            cases.append(broken.case)
            return broken.case.causal

        monkeypatch.setattr(triage, "fails_anew", fails_anew)
        return cases

    @pytest.fixture
    def sorting(self, known: KnownBugs) -> Triage:
        runs: Any = SimpleNamespace(in_copies=False, tally=Tally())
        known.bugs = {"k": keeping("dv")}
        return Triage(runs, known, {}, ShrinkBudget(0.0))

    def test_a_new_process_is_asked_ever_more_rarely(self, sorting: Triage, asked: list[Case]) -> None:
        broken = FailingExample("backward", CASE, wrong("dk"))
        assert all(sorting._is_spoilt(broken) for _ in range(9))
        assert len(asked) == 4
        assert sorting.known.seen[sorting.known.bugs["k"].key].total == 9
        assert sorting._is_spoilt(replace(broken, law="determinism"))
        assert len(asked) == 5

    def test_what_fails_there_as_well_is_another_bug(self, sorting: Triage, asked: list[Case]) -> None:
        broken = FailingExample("backward", replace(CASE, causal=True), wrong("dk"))
        assert not sorting._is_spoilt(broken)
        assert not sorting._is_spoilt(replace(broken, finding=wrong("out")))
        assert not sorting._is_spoilt(replace(broken, case=CASE, is_alone=True))
        assert len(asked) == 1

    def test_earlier_calls_of_a_case_count_as_other_ones(self, sorting: Triage, asked: list[Case]) -> None:
        assert sorting._is_spoilt(FailingExample("sequences", replace(AFTER_ONE, rounds=9), wrong("dk")))
        assert asked == [CASE]

    def test_without_time_the_known_bug_is_blamed(
        self, sorting: Triage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(broken: FailingExample, runs: Any) -> bool:
            raise OutOfTime

        monkeypatch.setattr(triage, "fails_anew", late)
        assert sorting._is_spoilt(FailingExample("backward", CASE, wrong("dk")))


@pytest.mark.parametrize(
    ("law", "relative", "is_wrong_alone", "is_counted"),
    [
        ("additivity", 1.0, False, True),
        ("additivity", 1.0, True, False),
        ("additivity", 1e-4, False, False),
        ("backward", 1.0, False, False),
    ],
)
def test_what_a_law_of_several_calls_finds_is_kept_if_each_call_is_right_alone(
    known: KnownBugs, law: str, relative: float, *, is_wrong_alone: bool, is_counted: bool
) -> None:
    bug_of_state = replace(keeping("dv"), needs=(Condition("earlier", (("same",),), ((),)),))
    known.bugs = {bug_of_state.key: bug_of_state}

    def judged(asked: str, case: Case, *_: Any, **options: Any) -> Finding | None:
        return wrong("dv") if asked == law or is_wrong_alone else None

    runs = runs_of(Capabilities(), judged=judged, in_copies=True)
    runs.info.known_failures = ()
    sorting = Triage(runs, known, {}, ShrinkBudget(0.0))
    found = replace(wrong("dv"), relative=relative)
    rest = sorting._unexplained(FailingExample(law, CASE, found, is_alone=True))
    assert (rest is None) is is_counted
