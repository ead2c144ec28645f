"""Mutation campaigns: which mutants count as caught, on which examples, and what the tables say of them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from kernels.registry import load
from strategies.case import Case
from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.session.subject import AT_ONCE
from tests.harness.verdict import Finding, Verdict
from tests.mutation.campaign import CANNOT_RUN, Campaign, FalseAlarm
from tests.mutation.schedule import FIRST, LAWS, ROUND, Schedule
from tests.mutation.score import quantile
from tests.mutation.targets import targets
from tests.unit.support.sound import CLAIMS

HELD = Verdict(status="held")
BROKEN = Verdict(status="broken", finding=Finding(claim="out is right", kind="error"))
RAISED = Verdict(status="broken", finding=Finding(claim="it runs", kind="exception"))
CRASHED = Verdict(status="broken", finding=Finding(claim="it ends by itself", kind="died"))
REFUSED = Verdict(status="refused", reason="not today")


class Answers:
    """Takes the place of a child: ``answer`` says what the kernel of a SPEC does on its n-th example."""

    device = "cpu"

    def __init__(self, answer: Callable[[str, int], Verdict]) -> None:
        self.answer = answer
        self.count: dict[str, int] = {}
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def run(self, run: Run, meanwhile: Callable[[], None]) -> Verdict:
        self.count[run.spec] = self.count.get(run.spec, 0) + 1
        return self.answer(run.spec, self.count[run.spec])


def campaign(answer: Callable[[str, int], Verdict]) -> Campaign:
    info = KernelInfo("sound", (), "sound", CLAIMS, {})
    return Campaign(info, cast(Child, Answers(answer)), SCHEDULE)


SCHEDULE = Schedule(CLAIMS, "cpu")


def test_a_mutant_is_caught_by_its_first_broken_law() -> None:
    attempt = campaign(lambda spec, n: BROKEN if spec == "mutant" and n == 3 else HELD).attempt(
        "mutant", 0, 10
    )
    assert (attempt.examples, attempt.law, attempt.finding) == (3, ROUND[2], BROKEN.finding)
    assert isinstance(attempt.case, Case)


def test_an_alarm_in_a_process_that_a_mutant_has_spoiled_is_none() -> None:
    spoiled = campaign(lambda spec, n: BROKEN if spec == "mutant" or n == 1 else HELD)
    assert spoiled.attempt("mutant", 0, 10).finding == BROKEN.finding
    assert cast(Any, spoiled.child).closed == 1
    with pytest.raises(FalseAlarm):
        campaign(lambda spec, n: BROKEN).attempt("mutant", 0, 10)


@pytest.mark.parametrize(("crashes", "caught"), [(1, None), (2, CRASHED.finding)])
def test_a_crash_counts_if_it_shows_in_a_new_process(crashes: int, caught: Finding | None) -> None:
    spoiled = campaign(lambda spec, n: CRASHED if spec == "mutant" and n <= crashes else HELD)
    assert spoiled.attempt("mutant", 0, 10).finding == caught


def test_a_mutant_that_holds_survives() -> None:
    attempt = campaign(lambda spec, n: HELD).attempt("mutant", 0, 10)
    assert (attempt.examples, attempt.finding, attempt.only_raised) == (10, None, False)


def test_an_exception_counts_only_where_it_is_the_bug() -> None:
    raising = campaign(lambda spec, n: RAISED if spec == "mutant" else HELD)
    assert raising.attempt("mutant", 0, 10).finding is None
    assert raising.attempt("mutant", 0, 10).only_raised
    assert raising.attempt("mutant", 0, 10, raises=True).finding == RAISED.finding


def test_a_fault_of_the_device_counts() -> None:
    fault = Verdict(status="broken", finding=Finding(claim="it runs", kind="fault"))
    attempt = campaign(lambda spec, n: fault if spec == "mutant" else HELD).attempt("mutant", 0, 10)
    assert (attempt.examples, attempt.finding) == (1, fault.finding)


def test_a_mutant_that_raises_on_some_cases_and_holds_on_the_others_only_raised() -> None:
    attempt = campaign(lambda spec, n: RAISED if spec == "mutant" and n == 3 else HELD).attempt(
        "mutant", 0, 10
    )
    assert (attempt.examples, attempt.finding, attempt.only_raised) == (10, None, True)


def test_a_mutant_that_cannot_run_is_not_tried_for_long() -> None:
    raising = campaign(lambda spec, n: RAISED if spec == "mutant" else HELD)
    assert raising.attempt("mutant", 0, 1000).examples == CANNOT_RUN + 1


def test_a_refusal_of_what_is_claimed_counts() -> None:
    attempt = campaign(lambda spec, n: REFUSED if spec == "mutant" else HELD).attempt("mutant", 0, 10)
    assert attempt.finding is not None
    assert attempt.finding.kind == "refused"


@pytest.mark.parametrize("verdict", [BROKEN, RAISED, REFUSED])
def test_nothing_counts_where_the_kernel_itself_fails(verdict: Verdict) -> None:
    with pytest.raises(FalseAlarm, match="sound itself breaks forward on Case"):
        campaign(lambda spec, n: verdict if spec == "sound" else BROKEN).attempt("mutant", 0, 10)


def test_a_case_that_the_kernel_may_refuse_and_does_tells_nothing() -> None:
    choosy = campaign(
        lambda spec, n: HELD if (spec, n) == ("sound", 3) else REFUSED if spec == "sound" else BROKEN
    )
    choosy.info = replace(choosy.info, capabilities=replace(CLAIMS, may_refuse=True))
    assert choosy.attempt("mutant", 0, 10).examples == 3


def test_the_kernel_itself_is_asked_once_for_each_example() -> None:
    both = campaign(lambda spec, n: BROKEN if spec != "sound" else HELD)
    for mutant in ("one", "other"):
        both.attempt(mutant, 0, 1)
    assert cast(Answers, both.child).count == {"one": 1, "other": 1, "sound": 1}


@pytest.mark.parametrize("law", ["forward", "backward"])
def test_the_first_cases_are_the_same_however_many_are_drawn(law: str) -> None:
    few, many = (SCHEDULE._draw(law, "float16", 0, 0, False, number) for number in (FIRST, AT_ONCE))
    assert len(few) == FIRST
    assert few == many[:FIRST]


def test_examples_follow_from_the_seed() -> None:
    first, again, other = (list(SCHEDULE.examples(seed, 40)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_round_has_every_law_and_rounds_have_every_dtype() -> None:
    examples = list(islice(SCHEDULE.examples(0, 3 * len(ROUND)), 3 * len(ROUND)))
    claimed = set(LAWS) - {"ragged", "rotary", "eight_bits"}
    assert {law for law, _ in examples[: len(ROUND)]} == claimed
    assert all(
        {case.dtype for name, case in examples if name == law} == set(CLAIMS.dtypes) for law in claimed
    )


def test_a_mutant_written_down_is_a_kernel(tmp_path: Path) -> None:
    target = next(t for t in targets("flash_v2") if t.module == "kernels.common.tiles")
    kernel = load(target.write(tmp_path))
    assert kernel.name == "flash_v2"
    assert target.mutant.function in target.change


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.95, 4), (0.25, 1), (1.0, 4)])
def test_quantile_is_one_of_the_values(share: float, value: float) -> None:
    assert quantile([4, 1, 3, 2], share) == value
