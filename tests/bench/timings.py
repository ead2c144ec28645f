"""What is measured of a provider at a shape, or why nothing is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.bench.clocks import Clocks
from tests.bench.providers import OTHERS
from tests.bench.shapes import DIRECTIONS, Shape

LARGE_SPREAD = 0.03
"""A spread above this makes a time uncertain.

If times are normally distributed, the standard error of the median of n times is 1.86 spreads / sqrt(n). A call of a
few milliseconds is timed about 30 times, so that a spread of 3 % is an error of 1 %, the last digit of a ratio.
"""
FEWEST_CALLS = 5
"""Of fewer calls, the quartiles say little more than the fastest and the slowest one."""

TIME_UP = "time up"
INTERRUPTED = "interrupted"
DIED = "process died"
NOT_REACHED = (TIME_UP, INTERRUPTED, DIED)
"""Why the measurements ended before they came to a provider at a shape."""


@dataclass(frozen=True)
class Times:
    """Median and quartiles in milliseconds of so many calls.

    ``clocks`` were read as soon as the calls had ended; None if they cannot be read.
    """

    median: float
    lower: float
    upper: float
    calls: int
    clocks: Clocks | None = None

    @classmethod
    def of(cls, times: Sequence[float], clocks: Clocks | None) -> "Times":
        """Return the median and the quartiles of the milliseconds that the calls took."""
        lower, median, upper = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
        return cls(median, lower, upper, len(times), clocks)

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, as a fraction of the median."""
        return (self.upper - self.lower) / 2 / self.median

    @property
    def is_uncertain(self) -> bool:
        """Whether the median may be wrong in the last digit of a ratio."""
        return self.spread > LARGE_SPREAD or self.calls < FEWEST_CALLS


@dataclass(frozen=True)
class Timing:
    """One direction of one provider at one shape: its times, or in ``refusal`` why there are none."""

    shape: Shape
    direction: str
    provider: str
    times: Times | None
    refusal: str = ""

    @property
    def clocks(self) -> Clocks | None:
        """What was read as its calls ended."""
        return self.times.clocks if self.times else None

    @property
    def tflops(self) -> float:
        """10^12 floating-point operations per second; 0 if it was not timed."""
        return self.shape.flops(self.direction) / self.times.median / 1e9 if self.times else 0.0


Row = tuple[Timing, ...]
"""The directions of one provider at one shape."""


def best_of_others(timings: Iterable[Timing]) -> float:
    """Return the TFLOPS of the fastest provider that is not ours; 0 if none was timed."""
    return max((t.tflops for t in timings if t.provider in OTHERS), default=0.0)


def not_reached(
    chosen: Sequence[Shape], providers: Sequence[str], timings: Sequence[Timing], why: str
) -> list[Timing]:
    """Return a timing with the reason ``why`` for each provider at each shape that has none in ``timings``."""
    reached = {(t.shape, t.provider) for t in timings}
    return [
        Timing(shape, direction, provider, None, why)
        for shape in chosen
        for provider in providers
        if (shape, provider) not in reached
        for direction in DIRECTIONS
    ]
