"""How much time and how many runs may be spent on a failure: on its smallest case, and on what matters in it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

SECONDS = 16.0
"""Seconds to look for smaller cases. Each crash or hang costs the start of a process."""
CALLS = 4000
"""Runs of the kernel to look for smaller cases, in addition to those of Hypothesis."""
LEAST_CALLS = 60
"""Runs that each part of a failure's report may take on a machine that is too busy to make them within its seconds."""
PATIENCE = 2.5
"""Such a part may take this many times its seconds to make ``LEAST_CALLS`` runs."""

GRACE_SECONDS = 10.0
"""Seconds after its end during which a run may still be busy with the report of a failure, unless told otherwise."""
LEAST_SECONDS = 4.0
"""Seconds that one part of a failure's report may take, however late in a run it comes: see ``Clock.least``."""
MOST_OF_THE_REST = 1 / 8
"""The share of the time left that one part of a report may take, so that other laws get their turns."""
MOST_OF_REPORT = 0.6
"""The share of the time left for a report that one part may take, so that there is some for a smaller case."""


@dataclass
class Clock:
    """The time that a run may take: ``seconds``, which begin to pass with ``start``.

    If ``seconds`` is infinite, the run ends when everything is drawn. ``grace`` are the seconds after its end during
    which it may still be busy with the report of a failure.
    """

    seconds: float = math.inf
    until: float = math.nan
    grace: float = GRACE_SECONDS

    def start(self) -> None:
        """Start the clock, as the first example is about to be drawn; a second start changes nothing."""
        if math.isnan(self.until):
            self.until = time.perf_counter() + self.seconds

    @property
    def remaining(self) -> float:
        """Return the seconds until the end, negative after it."""
        return self.seconds if math.isnan(self.until) else self.until - time.perf_counter()

    @property
    def left(self) -> float:
        """Return the seconds left to draw examples, infinite if the run has no end."""
        return max(0.0, self.remaining)

    def cut(self, seconds: float) -> float:
        """Return ``seconds``, or fewer if the run may not be busy with a report for so long."""
        return min(seconds, max(0.0, self.remaining + self.grace))

    @property
    def least(self) -> float:
        """Return the seconds that one part of a failure's report may take, however late it comes."""
        return min(LEAST_SECONDS, self.grace)

    def most_of_it(self, seconds: float) -> float:
        """Return ``seconds``, or fewer if that would leave too little for the rest of a failure's report."""
        return min(seconds, MOST_OF_REPORT * self.cut(math.inf))

    def meter(self, seconds: float, calls: float = math.inf) -> Callable[[], None]:
        """Return a meter of so many seconds and calls for one part of a failure's report; see ``meter`` below."""
        return meter(self.cut(seconds), calls, self.cut(PATIENCE * seconds))

    def share(self, seconds: float) -> float:
        """Return ``seconds``, or fewer if that is more than one part of a failure's report may take of what is left."""
        return self.cut(min(seconds, max(self.least, MOST_OF_THE_REST * self.left)))


class BudgetSpent(Exception):
    """The search has used up its time or its runs."""


@dataclass(frozen=True)
class ShrinkBudget:
    """The time for the smallest case, and the runs of the kernel in addition to those of Hypothesis."""

    seconds: float
    calls: int = CALLS

    def within(self, clock: Clock) -> "ShrinkBudget":
        """Return this budget, cut to what the run has time for."""
        return replace(self, seconds=clock.share(self.seconds))

    @property
    def reducing_seconds(self) -> float:
        """Return the seconds for making fields and entries simpler: three quarters of the budget."""
        return 0.75 * self.seconds


def meter(seconds: float, calls: float = math.inf, most: float | None = None) -> Callable[[], None]:
    """Return a function to call before each run; it raises BudgetSpent once the seconds or the calls are used up.

    A busy machine does less in the same time, so the first ``LEAST_CALLS`` calls may take up to ``most`` seconds, by
    default no more than all calls.
    """
    start, made = time.perf_counter(), 0

    def spend() -> None:
        nonlocal made
        made += 1
        passed = time.perf_counter() - start
        limit = seconds if made > LEAST_CALLS or most is None else most
        if made > calls or passed > limit:
            raise BudgetSpent

    return spend
