"""The statuses of ``verdict.json``: those of a law at a dtype, of a law, of a kernel and of a run."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

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


def status_of(row: Mapping[str, Any]) -> str:
    """Return the status of a law at a dtype, from its row in summary.json."""
    could_not_run = row["skipped"] > 0 and not row["examples"] + row["refusals"]
    return ENVIRONMENT if could_not_run and row["mark"] == NOT_TRIED else row["mark"]


def of_law(statuses: Iterable[str]) -> str:
    """Return the status of a law: the worst of those that it has at the dtypes."""
    return min(statuses, key=STATUSES.index, default=NOT_TRIED)


def of_kernel(statuses: Iterable[str], of_forward: Iterable[str] = ()) -> str:
    """Return the status of a kernel from those of its laws at all dtypes.

    It is held if nothing speaks against it and some law held: what was not tried is told of each law. It is not held
    if none of the statuses ``of_forward``, which are those of the law that matters most, is of a case that was judged.
    """
    found, forward = {*statuses}, {*of_forward} - {NOT_CLAIMED}
    against = [x for x in FAILING if x in found]
    if against:
        return against[0]
    if forward and forward <= {NOT_TRIED, ENVIRONMENT}:
        return of_law(forward)
    return HELD if HELD in found else of_law(found)


def of_run(kernels: Iterable[str], exit_status: int | None) -> str:
    """Return the status of a run; ``exit_status`` is None if it has not ended.

    It is held if nothing speaks against a kernel, some kernel held, and of each it was tried what matters. A run that
    failed though nothing speaks against a kernel, or was interrupted, has an error of the environment.
    """
    if exit_status is None:
        return RUNNING
    worst = of_kernel(kernels)
    if worst != HELD or exit_status == 0:
        return worst
    return NOT_TRIED if exit_status == pytest.ExitCode.NO_TESTS_COLLECTED else ENVIRONMENT
