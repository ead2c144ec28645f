"""Whether two bugs of a kernel are one, by what is certified of them before anything else."""

from collections.abc import Collection
from dataclasses import replace

from tests.harness.bugs.attribution import FailingExample
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.duplicates import why_same
from tests.harness.bugs.restatement import restate_by_basic_law
from tests.harness.certificates.certified import are_apart, certain_in, explained_by, left_by
from tests.harness.law import law_named
from tests.harness.running.runs import Runs, Try
from tests.harness.symptoms import wrong_tensors


def why_duplicates(known: Bug, bug: Bug, run: Try, runs: Runs, others: Collection[Bug] = ()) -> str:
    """Return why two bugs are duplicates, in words for a report; "" if they are distinct.

    They are distinct if a certificate of one leaves the other wrong; else ``why_same`` decides. ``others`` are known
    bugs of the kernel. Raises OutOfTime.
    """
    if _are_two(known, bug, runs):
        return ""
    return why_same(known, bug, run, runs.claims_of(bug.failure.law), others)


def _are_two(one: Bug, other: Bug, runs: Runs) -> bool:
    """Whether what is certified of all calls of one of two bugs leaves the smallest case of the other one wrong.

    Raises OutOfTime.
    """
    for known, bug in ((one, other), (other, one)):
        f = bug.failure
        broken = FailingExample(f.law, f.case, f.finding, f.ignored)
        if alternatives := certain_in([known], broken):
            rest = left_by(broken, tuple(dict.fromkeys((*f.alternatives, *alternatives))), runs)
            if rest is not None and are_apart(alternatives, wrong_tensors(rest)):
                return True
    return False


def explains(known: Bug, bug: Bug, run: Try, runs: Runs) -> bool:
    """Whether the smallest case of a bug holds, judged against what the kernel computes because of a known one.

    If its law compares calls, one that is wrong by itself is judged. Raises OutOfTime.
    """
    f = bug.failure
    if not known.failure.finding.alternatives or bug.is_beside(known):
        return False
    finding = run(f.law, f.case, f.ignored)
    if finding is None:
        return False
    broken = FailingExample(f.law, f.case, finding, f.ignored)
    return bool(explained_by(restate_by_basic_law(broken, run, runs.claims_of(f.law)), [known], runs))


def certified_as(known: Bug, again: Bug, runs: Runs) -> Bug:
    """Return a known bug with the certificate of a later find of it, if it has none and that explains its case too.

    Raises OutOfTime.
    """
    f, told = known.failure, again.failure.finding
    if f.finding.certificate or not told.alternatives or not law_named(f.law).is_basic:
        return known
    if not runs.holds_as(f.law, f.case, f.ignored, (*f.alternatives, *told.alternatives)):
        return known
    return replace(known, failure=replace(f, finding=f.finding.told_instead_as(told)))
