"""The statuses of ``verdict.json``: those of a law at a dtype, of a law, of a kernel and of a run."""

from collections.abc import Iterable, Mapping
from typing import Any

BROKEN, LESS_PRECISE, REFUSED, HELD = "broken", "less precise", "refused", "held"
ENVIRONMENT, NOT_TRIED, NOT_CLAIMED = "error of the environment", "not tried", "not claimed"

STATUSES = (BROKEN, LESS_PRECISE, REFUSED, "known", ENVIRONMENT, NOT_TRIED, HELD, NOT_CLAIMED)
"""The statuses of a law, the worst first: it is held only if it is held at each dtype that is claimed.

The status is "known" if cases meet a known failure that the kernel declares, and an error of the environment if there
were cases, but none could be run on this machine.
"""
FAILING = (BROKEN, LESS_PRECISE, REFUSED)
"""The statuses that speak against a kernel."""
RUNNING, USAGE_ERROR = "running", "usage error"
"""Further statuses of a run: it has not ended, or its command line is wrong."""

ENDED = (0, 1)
"""The exit statuses of a run that came to its end: every law held, or one was broken."""


def status_of(row: Mapping[str, Any]) -> str:
    """Return the status of a law at a dtype, from its row in summary.json."""
    could_not_run = row["skipped"] > 0 and not row["examples"] + row["refusals"]
    return ENVIRONMENT if could_not_run and row["mark"] == NOT_TRIED else row["mark"]


def of_law(statuses: Iterable[str]) -> str:
    """Return the status of a law: the worst of those that it has at the dtypes."""
    return min(statuses, key=STATUSES.index, default=NOT_TRIED)


def of_kernel(statuses: Iterable[str]) -> str:
    """Return the status of a kernel from those of its laws at all dtypes.

    It is held if nothing speaks against it and some law held: what was not tried is told of each law. The same holds
    for a run and the statuses of its kernels.
    """
    found = {*statuses}
    against = [x for x in FAILING if x in found]
    return against[0] if against else HELD if HELD in found else of_law(found)


def of_run(kernels: Iterable[str], exit_status: int | None) -> str:
    """Return the status of a run; ``exit_status`` is None if it has not ended.

    A run that failed though nothing speaks against a kernel, or was interrupted, has an error of the environment.
    """
    if exit_status is None:
        return RUNNING
    worst = of_kernel(kernels)
    is_told = exit_status == 0 or (exit_status in ENDED and worst != HELD)
    return worst if is_told or worst != HELD else ENVIRONMENT
