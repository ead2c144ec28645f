"""``--budget``: a time in which the whole run ends, from the start of its process to the last line."""

import math
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.harness.clock import GRACE_SECONDS

SECONDS_OF = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
"""The seconds of each unit; a number without a unit is in seconds."""
FORM = re.compile(rf"([-+.\w]*?)\s*([{''.join(SECONDS_OF)}]?)")
"""A number and a unit."""

PART = 1 / 10
"""The share of a budget that is kept for each thing that comes after the last example."""
CLOSING_SECONDS = 1.0
"""The most seconds that are kept for ``Budget.closing``."""
LEAST_SECONDS = 1.0
"""Seconds for examples, however small the budget is."""


@dataclass(frozen=True)
class Budget:
    """The seconds of a whole run."""

    seconds: float

    @property
    def grace(self) -> float:
        """The seconds after the last example during which a failure may still be looked into."""
        return min(GRACE_SECONDS, PART * self.seconds)

    @property
    def concluding(self) -> float:
        """The seconds to find which bugs are the same and, as many again, which claims would be true."""
        return PART * self.seconds

    @property
    def closing(self) -> float:
        """The seconds in which the last script is tried, processes end and files are written."""
        return min(CLOSING_SECONDS, 2 * PART * self.seconds)

    def drawing(self, passed: float) -> float:
        """Return the seconds for examples, if so many have passed since the process began."""
        left = self.seconds - passed - self.grace - self.concluding - self.closing
        return max(LEAST_SECONDS, left)


def budget_of(text: str) -> Budget:
    """Read a budget, such as "20s", "2m", "1.5h" or "20". Raises ValueError, in one line."""
    seconds = math.nan
    if found := FORM.fullmatch(text.strip()):
        with suppress(ValueError):
            seconds = float(found[1]) * SECONDS_OF[found[2]]
    if not 0 < seconds < math.inf:
        raise ValueError(f"got {text!r}, expected a time above 0, such as 20s, 2m or 1h")
    return Budget(seconds)


_begun: list[float] = []
"""The latest moment that was taken for the start of this process, if there is any."""


def begin() -> None:
    """Take this moment for the start of the process, as where it has waited for what it is to do."""
    _begun[:] = [time.perf_counter()]


def age() -> float:
    """Return the seconds since this process began; 0 where the system does not tell."""
    if _begun:
        return time.perf_counter() - _begun[0]
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
