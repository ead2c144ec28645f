"""Cases are drawn by Hypothesis, some at a time, before any of them is run.

So a run of a kernel is no part of a test of Hypothesis, which would take what it raises for a failure of its own.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import hypothesis
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from strategies.case import Case

AT_ONCE = 8
"""Cases that one Hypothesis run draws. Some of those of longer runs are copies of earlier ones."""


class Stream(Iterator[Case]):
    """Cases from Hypothesis runs whose seeds are drawn from ``seeds``: so many as ``most``, by default without end."""

    def __init__(self, strategy: SearchStrategy[Case], seeds: Random, most: float = math.inf) -> None:
        self.strategy, self.seeds, self.left = strategy, seeds, most
        self.coming: deque[Case] = deque()

    def __next__(self) -> Case:
        self._draw()
        if not self.coming:
            raise StopIteration
        return self.coming.popleft()

    def draw_ahead(self) -> None:
        """Draw what comes next, if it has to be drawn, while a case is run. What it raises, ``next`` will raise."""
        with suppress(Exception):
            self._draw()

    def _draw(self) -> None:
        if not self.coming and self.left:
            found = drawn(self.strategy, self.seeds.getrandbits(64), int(min(AT_ONCE, self.left)))
            self.coming.extend(found)
            self.left = self.left - len(found) if found else 0


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
