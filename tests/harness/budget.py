"""What the search for the smallest case of a failure, and for what matters in it, may take."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

SECONDS = {"cpu": 50.0, "cuda": 16.0}
"""By device type, how long smaller cases are looked for: each crash or hang costs the start of a process."""
EXPLAIN_SECONDS = 10.0
CALLS = 4000


class BudgetSpent(Exception):
    """The search has taken what it may."""


@dataclass(frozen=True)
class ShrinkBudget:
    """The time for the smallest case, and the runs of the kernel after Hypothesis's."""

    seconds: float
    calls: int = CALLS

    @property
    def drawing_seconds(self) -> float:
        """A quarter is left for what the bug needs."""
        return self.seconds / 4

    @property
    def reducing_seconds(self) -> float:
        """The rest is for fields and entries."""
        return self.seconds - self.drawing_seconds


def meter(seconds: float, calls: float = math.inf) -> Callable[[], None]:
    """A function to call before each run; it raises BudgetSpent once the seconds or the calls are used up."""
    until, made = time.perf_counter() + seconds, 0

    def spend() -> None:
        nonlocal made
        made += 1
        if made > calls or time.perf_counter() > until:
            raise BudgetSpent

    return spend
