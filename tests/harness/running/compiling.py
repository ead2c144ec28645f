"""Turns of a kernel in Triton: compiled for any sizes and strides, or for those of each case."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

BY_VALUE = 1 / 4
"""The share of the time for drawn cases in which a kernel in Triton is compiled for each case's own sizes and strides.

In the rest of the time it is compiled for any.
"""


@dataclass
class Compiling:
    """What the kernel of a run is compiled for: any sizes and strides, or those of each case, as users run it.

    Compiled for any, it hardly ever has to be compiled for one more case. ``is_general`` says whether it is compiled
    for any while a failure is looked into, and ``takes_turns`` whether it is for most drawn cases. It is for none if it
    ``is_apart``: then it was seen to fail only as compiled for any. ``seconds`` has the time of the drawn cases that
    were run with the kernel compiled for any sizes and strides (True), and for their own (False).
    """

    is_general: bool = False
    takes_turns: bool = False
    is_apart: bool = False
    seconds: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    @property
    def is_turn_of_general(self) -> bool:
        """Whether the next drawn case is run with the kernel compiled for any values."""
        has_had_share = BY_VALUE * self.seconds[True] > (1 - BY_VALUE) * self.seconds[False]
        return self.takes_turns and not self.is_apart and not has_had_share

    @contextmanager
    def timed(self, *, general: bool) -> Iterator[None]:
        """Count the time of a drawn case."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[general] += time.perf_counter() - start
