"""Kernels that leave memory behind at each call: found by repeating one case in a process that has grown."""

from strategies.case import Case
from tests.harness.bugs.bug import Need
from tests.harness.diagnosis.gentle import RUNS, smallest
from tests.harness.run import Run
from tests.harness.running.child import ChildDied, HarnessError
from tests.harness.running.runs import Runs
from tests.harness.verdict import LEAK, Finding

GROWN_BYTES = 2**29
"""By so much a process has grown before a case is repeated in it, and twice as much after each time in vain."""
LEAK_SECONDS = 4.0
"""Seconds for the repeats of one case."""
REDUCING_SECONDS = 40.0
"""Seconds to find a smaller case."""


def left_behind(law: str, case: Case, runs: Runs) -> float:
    """Return how many bytes the kernel leaves behind at each repeat of a case, in a process that ends with that."""
    request = Run(runs.info.spec, runs.info.claims, law, case).request("leak", seconds=LEAK_SECONDS)
    try:
        left: float = runs.child.ask(request, runs.child.run_seconds)["left"]
    except (ChildDied, HarnessError):
        return 0.0
    finally:
        runs.child.close()
    return left


def reduced(law: str, case: Case, runs: Runs) -> tuple[Case, tuple[Need, ...]]:
    """Return a small case that leaves memory behind too, with what it needs, as far as few repeats tell."""

    def fails(smaller: Case) -> bool:
        # Other memory that is given back meanwhile may hide a leak once.
        return any(left_behind(law, smaller, runs) > 0.0 for _ in range(2))

    return smallest(case, fails, runs.info.capabilities, runs.clock.meter(REDUCING_SECONDS, RUNS))


def finding(left: float) -> Finding:
    """Return the finding that so many bytes stay behind at each repeat of a case."""
    size = f"{left / 2**20:.3g} MiB stay behind each time"
    return Finding(
        claim=f"memory is given back after a call, but when its case is repeated, {size}", kind=LEAK
    )
