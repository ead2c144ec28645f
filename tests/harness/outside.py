"""Whether two bugs are one read of memory outside of tensors: what is read is wrong, or at a fence ends the process."""

from dataclasses import replace

from kernels.contract import Capabilities
from tests.harness.apart import Try
from tests.harness.bugs import Bug
from tests.harness.death import is_at_fence
from tests.harness.verdict import NUMBERS


def are_one_read(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether one bug ends the process at a fence, and the other gives numbers that were read behind it."""
    return any(
        is_at_fence(fenced.failure.finding) and _shows(fenced, numbers, run, capabilities)
        for fenced, numbers in ((one, other), (other, one))
    )


def _shows(fenced: Bug, numbers: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether the case that ends at the fence makes the same numbers wrong, and these depend on what lies outside.

    Without queries nothing can be wrong, so the case is run with one.
    """
    f, case = numbers.failure, fenced.failure.case
    judged = replace(case, seqlen_q=max(1, case.seqlen_q))
    if f.finding.kind not in NUMBERS or not capabilities.admits(judged):
        return False
    found = (run(law, tried, frozenset()) for law, tried in ((f.law, judged), ("memory", f.case)))
    return all(finding is not None and numbers.could_break(finding) for finding in found)
