"""Whether a case that failed fails again, and how often: a race makes numbers wrong only now and then."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from tests.harness.bugs.attribution import Broken
from tests.harness.bugs.failure import Explanation, Failure
from tests.harness.clock import BudgetSpent
from tests.harness.running.runs import Runs

AGAIN = 2
"""A failure that shows again this many times in a row is taken to show on every run."""
REPEATS = 100
"""How often a case is repeated to learn the rate of a failure that comes and goes."""
REPEAT_SECONDS = 20.0
"""The most seconds for these repeats."""
AFTER_OTHERS = (
    "the case fails after other calls in the same process, and holds as the first call of a new one"
)
FIRST_CALL = "the case fails in the first call of a new process, and holds when it is repeated there"


def fails_again(broken: Broken, runs: Runs) -> bool:
    """Whether a failure shows on every run of its case, as far as a few repeats tell.

    A hang is not repeated, because that takes minutes, and where there is no time to repeat, the failure counts as one
    that shows again.
    """
    with suppress(BudgetSpent):
        return broken.finding.kind == "hung" or all(_fails(broken, runs) is not False for _ in range(AGAIN))
    return True


def intermittent(failure: Failure, runs: Runs, known_of_it: tuple[str, ...] = ()) -> Failure:
    """Repeat the case of a failure that comes and goes, and return the failure with its rate, and with sentences."""
    failed, made = rate(lambda: _fails(failure, runs), runs.clock.meter(REPEAT_SECONDS))
    with suppress(BudgetSpent):
        if not failed and fails_anew(failure, runs):
            known_of_it = (*known_of_it, FIRST_CALL)
    finding = replace(failure.finding, rate=(failed, made))
    return replace(failure, finding=finding, explanation=Explanation(known_of_it))


def rate(fails: Callable[[], bool | None], spend: Callable[[], None]) -> tuple[int, int]:
    """Return how many repeats have failed, and how many were made; ``spend`` may end them by raising BudgetSpent.

    A repeat that can't be run here, of which ``fails`` returns None, is not counted.
    """
    outcomes: list[bool | None] = []
    with suppress(BudgetSpent):
        while len(outcomes) < REPEATS:
            spend()
            outcomes.append(fails())
    return outcomes.count(True), len(outcomes) - outcomes.count(None)


def is_of_every_run(failure: Failure) -> bool:
    """Whether a failure has shown in every repeat, so that nothing comes and goes."""
    failed, made = failure.finding.rate
    return 0 < failed == made


def fails_anew(broken: Broken | Failure, runs: Runs) -> bool:
    """Whether the case fails in the first call of a new process. Raises BudgetSpent if there is no time for it."""
    runs.child.close()
    return _fails(broken, runs) is not False


def _fails(broken: Broken | Failure, runs: Runs) -> bool | None:
    """Whether a case fails in any way when it is run once more; None if it can't be run here, which tells nothing."""
    verdict = runs.in_time(broken.law, broken.case, ignored=broken.ignored)
    return None if verdict.status == "skipped" else runs.info.finding(verdict) is not None
