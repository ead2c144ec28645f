"""The score of a run: how much of what a kernel claims was tried and held, as a number from 0 to 1.

The score of a kernel is c times the mean, over the laws of the run and the claimed dtypes, of the share of drawn cases
that held. c is 1 if nothing speaks against the kernel, 3/4 if it is less precise than it claims or refuses nearly all
that it claims, and 1/2 if it breaks a law. So a score above 1/2 means that no law is broken, a score of 1 that all laws
were tried at all dtypes and every case held, and a score of 0 that no case held. One more case that holds never lowers
a score; one more that fails, is refused, or meets a known failure never raises it. Cases that this machine can't run
do not count.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tests.harness.programs.statuses import BROKEN, FAILING, NOT_CLAIMED, status_of

DIGITS = 4
"""The decimals of a score, which is rounded down: 1 is given for 1 alone."""
FACTORS = dict.fromkeys(FAILING, 0.75) | {BROKEN: 0.5}
"""What the mean is multiplied by if any law has the status."""


def of_kernel(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the score of a kernel, from its rows in summary.json; 0 if it has none."""
    statuses = [status_of(row) for row in rows]
    shares = [held(row) for row, status in zip(rows, statuses, strict=True) if status != NOT_CLAIMED]
    factor = min((FACTORS[x] for x in statuses if x in FACTORS), default=1.0)
    return int(factor * fmean(shares) * 10**DIGITS) / 10**DIGITS if shares else 0.0


def of_run(scores: Iterable[float]) -> float:
    """Return the score of a run: the lowest of its kernels' scores; 0 if it has no kernel."""
    return min(scores, default=0.0)


def held(row: Mapping[str, Any]) -> float:
    """Return the share of a law's drawn cases at a dtype that held; 0 if none was run.

    A case that was not run because it meets a known bug counts as one that fails.
    """
    asked = row["examples"] + row["refusals"] + row["known"] + row["set_aside"]
    return (row["examples"] - row["broken"]) / asked if asked else 0.0
