"""Whether a case that failed fails again, and how often: a race makes numbers wrong only now and then."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from tests.harness.attribute import Broken
from tests.harness.budget import BudgetSpent
from tests.harness.explain import Explanation
from tests.harness.report import Failure
from tests.harness.runs import Runs

AGAIN = 2
"""A failure that shows again this many times in a row is taken to show on every run."""
REPEATS = 100
"""How often a case is repeated to learn the rate of a failure that comes and goes."""
REPEAT_SECONDS = 20.0
"""The most seconds for these repeats."""
FIRST_CALL = "the case fails in the first call of a new process, and holds when it is repeated there"


def fails_again(broken: Broken, runs: Runs) -> bool:
    """Whether a failure shows on every run of its case, as far as a few repeats tell.

    A hang is not repeated, because that takes minutes, and where there is no time to repeat, the failure counts as one
    that shows again.
    """
    with suppress(BudgetSpent):
        return broken.finding.kind == "hung" or all(_fails(broken, runs) for _ in range(AGAIN))
    return True


def intermittent(failure: Failure, runs: Runs) -> Failure:
    """Repeat the case of a failure that comes and goes, and return the failure with its rate."""
    failed, made = rate(lambda: _fails(failure, runs), runs.clock.meter(REPEAT_SECONDS))
    told = (FIRST_CALL,) if not failed and _fails_anew(failure, runs) else ()
    return replace(
        failure, finding=replace(failure.finding, rate=(failed, made)), explanation=Explanation(told)
    )


def rate(fails: Callable[[], bool], spend: Callable[[], None]) -> tuple[int, int]:
    """Return how many repeats have failed, and how many were made; ``spend`` may end them by raising BudgetSpent."""
    failed = made = 0
    with suppress(BudgetSpent):
        while made < REPEATS:
            spend()
            failed += fails()
            made += 1
    return failed, made


def _fails_anew(failure: Failure, runs: Runs) -> bool:
    """Whether the case fails in the first call of a new process, as where autotuning spoils an output."""
    runs.child.close()
    with suppress(BudgetSpent):
        return _fails(failure, runs)
    return False


def _fails(broken: Broken | Failure, runs: Runs) -> bool:
    """Whether a case fails in any way when it is run once more; one that can't be run here tells nothing against it."""
    verdict = runs.in_time(broken.law, broken.case, ignored=broken.ignored)
    return verdict.status == "skipped" or runs.info.finding(verdict) is not None
