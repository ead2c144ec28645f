"""Cases are drawn by Hypothesis, some at a time, before any of them is run.

So a run of a kernel is no part of a test of Hypothesis, which would take what it raises for a failure of its own.
"""

from collections.abc import Iterator
from random import Random

import hypothesis
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from strategies.case import Case

AT_ONCE = 8
"""Cases that one Hypothesis run draws. Some of those of longer runs are copies of earlier ones."""


def stream(strategy: SearchStrategy[Case], seeds: Random) -> Iterator[Case]:
    """Yield cases without end, from Hypothesis runs whose seeds are drawn from ``seeds``."""
    while found := drawn(strategy, seeds.getrandbits(64)):
        yield from found


def drawn(strategy: SearchStrategy[Case], seed: object, number: int = AT_ONCE) -> list[Case]:
    """Return ``number`` cases that Hypothesis draws, or fewer if there are no more; the same for the same seed."""
    found: list[Case] = []

    @hypothesis.seed(seed)
    @settings(max_examples=number + 1, database=None)
    @given(case=strategy)
    def run(case: Case) -> None:
        found.append(case)

    run()
    return found[1:]  # a run begins with its simplest case, whatever the seed
