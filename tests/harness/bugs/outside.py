"""Whether two bugs are one read of memory outside of tensors, which is told, and what comes of it: wrong numbers."""

from dataclasses import replace

from kernels.contract import Capabilities
from tests.harness.bugs.bug import Bug
from tests.harness.running.exits import is_outside
from tests.harness.running.runs import Try
from tests.harness.verdict import NUMBERS


def are_one_read(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether one bug touches memory outside of a tensor, and the other gives numbers that were read there."""
    return any(
        is_outside(read.failure.finding) and _shows(read, numbers, run, capabilities)
        for read, numbers in ((one, other), (other, one))
    )


def _shows(read: Bug, numbers: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether the case of a read outside makes the same numbers wrong, and these depend on what lies outside.

    They do if the law of memory finds them wrong, or tells the same access, in the case of the numbers. Without queries
    nothing can be wrong, so the case of the read is run with one.
    """
    f, case = numbers.failure, read.failure.case
    judged = replace(case, seqlen_q=max(1, case.seqlen_q))
    if f.finding.kind not in NUMBERS or not capabilities.admits(judged):
        return False
    finding = run(f.law, judged, frozenset())
    if finding is None or not numbers.could_break(finding):
        return False
    depends = run("memory", f.case, frozenset())
    if depends is None:
        return False
    is_told = bool(depends.origin) and depends.origin == read.failure.finding.origin
    return is_told or numbers.could_break(depends)
