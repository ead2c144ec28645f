"""What the search for the smallest case of a failure, and for what matters in it, may take."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

SECONDS = {"cpu": 50.0, "cuda": 16.0}
"""By device type, how long smaller cases are looked for: each crash or hang costs the start of a process."""
EXPLAIN_SECONDS = 10.0
CALLS = 4000
LEAST_CALLS = 60
"""What one part of the report of a failure may cost on a machine that is too busy for more in its time."""
PATIENCE = 2.5
"""So many times its seconds such a part may take for that."""

GRACE_SECONDS = 10.0
"""How long after its end a run may still be busy with the report of a failure."""
LEAST_SECONDS = 4.0
"""What one part of the report of a failure may take however late in a run it comes."""
MOST_OF_THE_REST = 1 / 8
"""The share of the time left that one part of a report may take, so that other laws get their turns."""


@dataclass
class Clock:
    """The time that a run may take: ``seconds`` from its ``start``, without which it has not begun to pass.

    Without ``seconds`` a run ends when all is drawn.
    """

    seconds: float = math.inf
    until: float = math.nan

    def start(self) -> None:
        """The first example is about to be drawn; a second start changes nothing."""
        if math.isnan(self.until):
            self.until = time.perf_counter() + self.seconds

    @property
    def remaining(self) -> float:
        """Seconds up to the end, negative after it."""
        return self.seconds if math.isnan(self.until) else self.until - time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds left to draw examples, infinite without an end."""
        return max(0.0, self.remaining)

    def cut(self, seconds: float) -> float:
        """So many seconds, or as many as the run may still be busy with a report."""
        return min(seconds, max(0.0, self.remaining + GRACE_SECONDS))

    def share(self, seconds: float) -> float:
        """So many seconds, or as many as one part of the report of a failure may take of what is left."""
        return self.cut(min(seconds, max(LEAST_SECONDS, MOST_OF_THE_REST * self.left)))


class BudgetSpent(Exception):
    """The search has taken what it may."""


@dataclass(frozen=True)
class ShrinkBudget:
    """The time for the smallest case, and the runs of the kernel after Hypothesis's."""

    seconds: float
    calls: int = CALLS

    def within(self, clock: Clock) -> "ShrinkBudget":
        """This budget, cut to what the run has time for."""
        return replace(self, seconds=clock.share(self.seconds))

    @property
    def drawing_seconds(self) -> float:
        """A quarter is left for what the bug needs."""
        return self.seconds / 4

    @property
    def reducing_seconds(self) -> float:
        """The rest is for fields and entries."""
        return self.seconds - self.drawing_seconds


def meter(seconds: float, calls: float = math.inf, most: float | None = None) -> Callable[[], None]:
    """A function to call before each run; it raises BudgetSpent once the seconds or the calls are used up.

    A busy machine does less in the same time: ``LEAST_CALLS`` may take up to ``most`` seconds, by default no more
    than all others.
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
