"""Bugs are one if what the kernel computes instead is the same for some tensor."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from tests.harness.bugs.attribution import FailingExample
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.failure import Failure
from tests.harness.certificates.certified import beside_certified, certified, explained_by
from tests.harness.certificates.same import certified_as, explains
from tests.harness.clock import Clock
from tests.harness.running.child import ChildDied
from tests.harness.running.runs import Runs
from tests.harness.verdict import Finding
from tests.unit.support.stubs import runs_of


def bug(*records: tuple[str, list[str], dict[str, Any]]) -> Bug:
    told = tuple(json.dumps(x) for x in records)
    finding = Finding(claim="dq is right", kind="error", tensor="dq", certificate="x", alternatives=told)
    return Bug(
        Failure("mine:attention", (), "backward", Case(), kernel="attention", finding=finding, environment={})
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("no_delta", ["dq", "dk"], {}), ("no_delta", ["dq"], {}), True),
        (("no_delta", ["dq"], {}), ("no_delta", ["dk"], {}), False),
        (("delta_times", ["dq"], {"value": 1.0100001}), ("delta_times", ["dq"], {"value": 1.0099}), True),
        (("delta_times", ["dq"], {"value": 1.01}), ("delta_times", ["dq"], {"value": 1.5}), False),
        (("lone_row_lost", ["dk"], {"tile": 64}), ("lone_row_lost", ["dk"], {"tile": 32}), True),
    ],
)
def test_certificates_are_compared_tensor_by_tensor(one: Any, other: Any, same: bool) -> None:
    assert bug(one).is_like(bug(other)) is same


def test_bugs_without_a_certificate_are_not_compared() -> None:
    first, second = bug().failure.finding, bug().failure.finding
    assert not first.is_told_as(second)


@pytest.mark.parametrize(
    ("clock", "asked"),
    [(Clock(60.0), [8.0]), (Clock(-60.0), []), (Clock(3.0, grace=2.0), [3.0])],
    ids=["in time", "late", "in a hurry"],
)
def test_calls_are_made_as_long_as_there_is_time(clock: Clock, asked: list[float]) -> None:
    failure, made = bug().failure, list[float]()

    def nothing(run: Any, tensor: str, kinds: Any, seconds: float) -> tuple[str, tuple[str, ...], bool]:
        made.append(seconds)
        return "", (), True

    runs = runs_of(Capabilities(), clock=clock, certificate=nothing, read_outside=lambda *_: ())
    plain = replace(failure, finding=replace(failure.finding, certificate="", alternatives=()))
    assert certified(plain, runs, {"seqlen_q"}, 8.0) == plain
    assert made == asked


def test_calls_near_the_failing_one_are_asked_first_beside_what_is_known() -> None:
    """If other calls end the process, those near the failing one are asked alone."""
    asked = list[tuple[tuple[str, ...], list[Any]]]()

    def told(run: Any, tensor: str, kinds: list[Any], seconds: float) -> tuple[str, tuple[str, ...], bool]:
        asked.append((run.alternatives, kinds))
        if len(kinds) > 1:
            raise ChildDied("signal 11", hung=False, stderr="")
        return "in words", ('["no_delta", ["dq"], {}]',), False

    known, failure = (
        bug(("no_mask", ["out"], {})),
        replace(bug().failure, case=Case(seqlen_q=7, sm_scale=0.5)),
    )
    runs = runs_of(Capabilities(), clock=Clock(60.0), certificate=told, read_outside=lambda *_: ())
    found = certified(failure, runs, {"seqlen_q"}, 8.0, [known]).finding
    assert (found.certificate, found.alternatives, found.of_some) == (
        "in words",
        ('["no_delta", ["dq"], {}]',),
        False,
    )
    (taken, kinds), (_, alone) = asked
    assert taken == known.failure.finding.alternatives
    assert alone == kinds[:1]
    assert [len({case.batch for case in cases}) for cases, _ in kinds] == [1, 3, 3]
    assert kinds[0][0][0] == failure.case


class Answers:
    """Runs that hold for the certificates that are told."""

    assumed: tuple[str, ...] = ()

    def __init__(self, *held: tuple[str, ...]) -> None:
        self.held = held

    @contextmanager
    def assuming(self, alternatives: tuple[str, ...]) -> Iterator[None]:
        self.assumed = alternatives
        yield
        self.assumed = ()

    def read_outside(self, law: str, case: Case, finding: Finding) -> tuple[str, ...]:
        return finding.outside

    def holds_as(self, law: str, case: Case, ignored: frozenset[str], alternatives: tuple[str, ...]) -> bool:
        return tuple(json.loads(x)[0] for x in alternatives) in self.held


def reading(*places: str) -> Bug:
    """Return a bug whose kernel reads memory at these places."""
    known = bug().failure
    return Bug(replace(known, finding=replace(known.finding, kind="nonfinite", outside=places)))


def as_runs(answers: Answers) -> Runs:
    """Return what stands in for the runs of a kernel."""
    return cast(Runs, answers)


def test_a_failure_is_explained_by_one_bug_or_by_all_together() -> None:
    first, second, unknown = bug(("no_delta", ["dq"], {})), bug(("no_mask", ["out"], {})), bug()
    known = [first, second, unknown]
    broken = FailingExample("backward", Case(), first.failure.finding)
    assert explained_by(broken, known, as_runs(Answers(("no_mask",)))) == [second]
    assert explained_by(broken, known, as_runs(Answers(("no_delta", "no_mask")))) == [first, second]
    assert explained_by(broken, known, as_runs(Answers())) == []


def test_of_another_head_dim_other_sizes_are_asked_for() -> None:
    class OfTile16(Answers):
        def holds_as(
            self, law: str, case: Case, ignored: frozenset[str], alternatives: tuple[str, ...]
        ) -> bool:
            return all(json.loads(x)[2]["tile"] == 16 for x in alternatives)

    known, runs = bug(("tail_dropped", ["dq"], {"tile": 64})), as_runs(OfTile16())
    broken = FailingExample("forward", Case(), replace(known.failure.finding, wrong=100))
    wide = replace(broken, case=Case(head_dim=128))
    assert explained_by(broken, [known], runs) == []
    assert explained_by(wide, [known], runs) == [known]
    assert explained_by(replace(broken, case=Case(dtype="float16")), [known], runs) == [known]
    of_out = replace(wide, finding=replace(wide.finding, tensor="out"))
    assert explained_by(of_out, [known], runs) == [], "sizes are not asked for of what it is not about"
    assert beside_certified(wide, [known], runs) is wide, "the rest would be that of another tile"


def test_a_later_find_gives_a_known_bug_its_certificate_if_that_explains_it_too() -> None:
    told = bug(("no_delta", ["dq"], {}))
    plain = replace(told.failure, finding=replace(told.failure.finding, certificate="", alternatives=()))
    known = replace(told, failure=plain)
    assert certified_as(known, told, as_runs(Answers(("no_delta",)))) == told
    assert certified_as(known, told, as_runs(Answers())) is known
    other = bug(("no_mask", ["dq"], {}))
    assert certified_as(other, told, as_runs(Answers(("no_delta",)))) is other


def test_a_crash_is_explained_by_no_certificate() -> None:
    known, died = [bug(("no_delta", ["dq"], {}))], Finding(claim="it runs", kind="died")
    assert explained_by(FailingExample("forward", Case(), died), known, as_runs(Answers(("no_delta",)))) == []


@pytest.mark.parametrize(
    ("left", "is_told"),
    [
        ({"tensors": ("dq",), "wrong": 90}, True),
        ({"tensors": ("dk",), "wrong": 90}, True),
        ({"tensors": ("dq", "dk"), "wrong": 99}, True),
        ({"tensors": ("dq", "dk"), "wrong": 101}, False),
        ({"tensors": ("dk", "dv"), "wrong": 10}, False),
    ],
)
def test_what_is_left_of_a_failure_is_judged_against_certificates_unless_more_is_wrong(
    left: dict[str, Any], is_told: bool
) -> None:
    class Left(Answers):
        def judged(self, law: str, case: Case, ignored: frozenset[str], *, explained: bool) -> Finding:
            assert self.assumed == certified.failure.finding.alternatives
            return replace(whole, tensor=left["tensors"][0], **left)

    certified = bug(("dq_unscaled", ["dq"], {}))
    whole = replace(certified.failure.finding, tensors=("dq", "dk"), wrong=100)
    broken = FailingExample("backward", Case(), whole)
    rest = beside_certified(broken, [certified, bug()], as_runs(Left()))
    assert (rest.alternatives == certified.failure.finding.alternatives) is is_told
    assert (rest.finding != whole) is is_told
    of_some = replace(certified.failure, finding=replace(certified.failure.finding, of_some=True))
    assert beside_certified(broken, [replace(certified, failure=of_some)], as_runs(Left())) is broken


def test_what_is_wrong_beside_a_certified_bug_is_no_duplicate_of_it() -> None:
    certified = bug(("dq_unscaled", ["dq"], {}))
    beside = bug()
    beside = replace(
        beside, failure=replace(beside.failure, alternatives=certified.failure.finding.alternatives)
    )
    assert beside.is_beside(certified)
    assert not certified.is_kin(beside)
    assert not certified.is_like(beside)


def test_other_calls_are_not_judged_against_a_number_that_is_fitted_to_some() -> None:
    fitted = bug(("delta_times", ["dq"], {"value": 1.01}))
    assert fitted.is_certified
    assert not fitted.is_certified_exactly
    assert bug(("lone_row_lost", ["dk"], {"tile": 64})).is_certified_exactly
    broken = FailingExample("backward", Case(), replace(fitted.failure.finding, wrong=100))
    assert beside_certified(broken, [fitted], as_runs(Answers())) is broken


def test_a_smallest_case_that_a_certificate_explains_is_that_bug() -> None:
    certified, other = bug(("no_delta", ["dq"], {})), bug()
    runs: Any = runs_of(Capabilities())
    runs.holds_as = Answers(("no_delta",)).holds_as
    assert explains(certified, other, lambda *_: other.failure.finding, runs)
    assert not explains(certified, other, lambda *_: None, runs)
    assert not explains(other, certified, lambda *_: other.failure.finding, runs)
    runs.holds_as = Answers().holds_as
    assert not explains(certified, other, lambda *_: other.failure.finding, runs)


def test_a_failure_is_explained_by_a_bug_that_reads_at_the_same_place() -> None:
    known = [bug(("no_delta", ["dq"], {})), reading("behind k", "behind v"), reading("before q")]
    runs = as_runs(Answers())
    for places, expected in ((("behind v",), known[1:2]), (("before q",), known[2:]), (("before k",), [])):
        broken = FailingExample("forward", Case(), reading(*places).failure.finding)
        assert explained_by(broken, known, runs) == expected


def test_bugs_that_read_at_a_common_place_are_one() -> None:
    assert reading("behind k", "behind v").is_like(reading("behind k"))
    assert not reading("behind k").failure.finding.is_told_as(reading("behind v").failure.finding)
    assert reading("behind k").failure.finding.tells_instead


def test_where_nan_comes_from_memory_outside_that_is_the_certificate() -> None:
    failure = replace(reading("behind k").failure, finding=Finding(claim="", kind="nonfinite", tensor="out"))
    runs = runs_of(Capabilities(), read_outside=lambda *_: ("before q", "behind k"))
    told = certified(failure, runs, (), 1.0).finding
    assert told.certificate == "memory is read that lies before q and behind k"
    assert told.outside == ("before q", "behind k")
