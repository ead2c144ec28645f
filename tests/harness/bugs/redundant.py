"""Whether a bug is a duplicate, because another bug explains each of its failing cases.

A bug may be found before the bug that it duplicates, with conditions that matter only in its smallest case. Failing
cases that are drawn once a bug is known count for that bug, but these were drawn before. A read of memory outside of a
tensor, and the wrong numbers that come of it, are one bug too.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from kernels.contract import Capabilities
from strategies.features import SCORES, feature, laid_out
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Bug, Occurrences
from tests.harness.bugs.restatement import restate_by_basic_law
from tests.harness.running.exits import is_outside
from tests.harness.running.runs import Try
from tests.harness.symptoms import is_small, leaves_roundings
from tests.harness.verdict import NUMBERS

MOST_CASES = 3
"""How many failing cases of a bug are tried, beside the smallest."""

WRITES_TO_EXPANDED = "more than one element of the written-to tensor refers to a single memory location"
"""How PyTorch refuses to write to a tensor with strides of 0, as where a kernel writes to an expanded input."""
OUTSIDE_OF_STORAGE = "are out of bounds for storage of size"
"""How PyTorch refuses a view by strides that reach beyond the end of a tensor's memory."""

MOST = 0.75
"""The share of ordinary cases from which on a bug counts as one that shows in most of them."""


def is_redundant(
    bug: Bug,
    other: Bug,
    seen: Occurrences,
    run: Try,
    capabilities: Capabilities,
    beside: Collection[Bug] = (),
) -> bool:
    """Whether each known failing case of ``bug`` meets the conditions of ``other``, and is explained by it.

    ``seen`` has the drawn cases. ``run`` may raise BudgetSpent, which ends the search.

    1. An exception: duplicate if it follows from what ``other`` does with a layout or with the shape of an output.
    2. ``other`` has no conditions: duplicate if it makes most ordinary cases wrong by much in all tensors of ``bug``,
       since no run can show what else is wrong there.
    3. Distinct if kinds or tensors differ, or if there are few drawn cases while more ordinary cases show ``bug`` than
       ``other``.
    4. Distinct if a case holds when it is run again, as a race may, or if a case does not meet the conditions of
       ``other``.
    5. Distinct if changing a condition of ``other`` does not fix the case. A rounding error may be left of a large
       error.
    6. Such a change may bring in a third bug, one of ``beside``, which may then explain what is left. If the third bugs
       explain the whole case without ``other``, the bugs are distinct. A third bug that is itself a duplicate of
       ``other`` is not tried.
    """
    f = bug.failure
    if f.finding.kind == "exception":
        return _is_refused_by_pytorch(bug, other) or _is_of_wrong_shape(bug, other)
    if f.finding.kind not in NUMBERS or other.failure.finding.kind not in NUMBERS:
        return False
    if other.needs_arguments_of not in ("", bug.needs_arguments_of):
        return False
    if not other.needs:
        return _hides(other, bug) or _may_need_as(other, bug)
    drawn = [ran for ran in seen.cases if ran != (f.law, f.case)][:MOST_CASES]
    if not bug.is_kin(other) or (_share(bug) > _share(other) and len(drawn) < MOST_CASES):
        return False
    third = [
        x
        for x in beside
        if x.key not in (bug.key, other.key) and not (x.is_kin(other) and x.needs_the_same(other))
    ]
    for law, case in ((f.law, f.case), *drawn):
        if not other.is_met(case):
            return False
        finding = run(law, case, f.ignored)
        if finding is None:
            return False
        broken = restate_by_basic_law(FailingExample(law, case, finding, f.ignored), run, capabilities)
        if not _is_explained(broken, [other, *third], run, capabilities):
            return False
        alone = [x for x in third if x.is_met(broken.case)]
        if alone and _is_explained(broken, alone, run, capabilities):
            return False
    return True


def _is_explained(broken: FailingExample, bugs: Sequence[Bug], run: Try, capabilities: Capabilities) -> bool:
    """Whether these bugs explain a failure. A rounding error may be left of a large error."""
    rest = explain_by_known_bugs(broken, bugs, run, capabilities).rest
    return rest is None or leaves_roundings(broken.finding, rest.finding)


def _is_refused_by_pytorch(bug: Bug, other: Bug) -> bool:
    """Whether an exception is PyTorch's refusal of what ``other`` does: write to an input, or read by wrong strides.

    Strides that lead beyond the tensor's memory raise an exception; in other cases the same strides give wrong numbers.
    """
    f, kind = bug.failure, other.failure.finding.kind
    text = f.finding.claim + f.finding.detail
    of_layout = any(laid_out(need.name, f.case) for need in other.needs if feature(need.name).is_layout)
    reads_elsewhere = kind in NUMBERS and of_layout and other.is_met(f.case)
    return (kind == "memory" and WRITES_TO_EXPANDED in text) or (
        reads_elsewhere and OUTSIDE_OF_STORAGE in text
    )


def _is_of_wrong_shape(bug: Bug, other: Bug) -> bool:
    """Whether an exception comes of the wrong shape or dtype of an output that ``other`` reports.

    Both have the same conditions. Example: lse of a wrong shape with causal, and an exception with causal where it is
    used.
    """
    mine, others = ({(need.name, need.fails[0]) for need in one.needs} for one in (bug, other))
    is_known = any(need.is_telling for need in bug.needs)
    return other.failure.finding.kind == "contract" and is_known and mine == others


def _hides(other: Bug, bug: Bug) -> bool:
    """Whether ``other`` makes most ordinary cases wrong by much, in all tensors that ``bug`` is known to make wrong.

    If ``other`` shows in all of them, it does not depend on a layout or an option. It then hides no bug that does.
    """
    f = other.failure
    return (
        _share(other) >= max(MOST, _share(bug))
        and not (_is_telling(bug) and _share(other) == 1)
        and not is_small(f.finding)
        and f.finding.kind == bug.failure.finding.kind
        and {*bug.tensors} <= {*other.tensors}
        and not other.needs_own_numbers
    )


def _may_need_as(other: Bug, bug: Bug) -> bool:
    """Whether ``other``, without a known condition although some ordinary cases hold, may have those of ``bug``.

    Both make the same tensor wrong by much, and ``bug`` needs lengths and numbers only, which do not distinguish bugs.
    """
    both, unknown = (other, bug), 0 < _share(other) < 1
    found_by = {one.failure.finding.tensor for one in both}
    by_much = all(one.failure.finding.kind == "error" and not is_small(one.failure.finding) for one in both)
    return by_much and len(found_by) == 1 and unknown and bool(bug.needs) and not _is_telling(bug)


def _is_telling(bug: Bug) -> bool:
    """Whether a bug has a condition besides lengths, numbers and dtype."""
    return any(need.is_telling and need.name != SCORES for need in bug.needs)


def _share(bug: Bug) -> float:
    """Return the share of ordinary cases that show a bug, 0 if none was tried."""
    return bug.severity.share or 0.0


def are_one_read(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether one of two bugs touches memory outside of a tensor, and the other is wrong numbers read there."""
    return any(
        is_outside(read.failure.finding) and _shows(read, numbers, run, capabilities)
        for read, numbers in ((one, other), (other, one))
    )


def _shows(read: Bug, numbers: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether the case of a read outside makes the numbers of another bug wrong, and these depend on what lies outside.

    They depend on it if the law of memory, on the case of the numbers, finds the same tensors wrong or reports the same
    access. The case of the read is run with at least one query, since without queries no number can be wrong.
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
