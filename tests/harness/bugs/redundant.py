"""Whether a bug is none of its own, because another one explains each of its failing cases.

Of failing cases that are drawn after a bug is known, those that it explains count for it. A bug that was found before,
with what seems to matter in its smallest case, has failing cases that would have counted for the other one. A read of
memory outside of a tensor and the wrong numbers that come of it are one bug too.
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
"""How PyTorch refuses to write to a tensor with strides of 0, as a kernel does that writes to an input."""
OUTSIDE_OF_STORAGE = "are out of bounds for storage of size"
"""How PyTorch refuses a view by strides that reach beyond the end of a tensor's memory."""

MOST = 0.75
"""The share of ordinary cases from which on a bug is said to show in most of them."""


def is_redundant(
    bug: Bug,
    other: Bug,
    seen: Occurrences,
    run: Try,
    capabilities: Capabilities,
    beside: Collection[Bug] = (),
) -> bool:
    """Whether each failing case that is known of a bug has what another bug needs, and is explained by that.

    A case that holds now, as those of a bug that comes and goes may, is explained by nothing. A bug that needs nothing
    explains all of a tensor that it spoils in most ordinary cases: what else may be wrong there, no run can tell.
    Where a change that cures a case of the other bug brings in one of those ``beside``, that may explain what is left,
    but not the whole case. It may do that if it is another find of the other bug. An error as small as roundings may be
    left of a large one, which is what the bug was reported for.
    ``seen`` has the drawn cases. If there are few, no fewer ordinary cases must show the other bug. ``run`` may
    raise BudgetSpent, which ends the search.
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
    """Whether these bugs explain a failure. Of a large error, one as small as roundings may be left."""
    rest = explain_by_known_bugs(broken, bugs, run, capabilities).rest
    return rest is None or leaves_roundings(broken.finding, rest.finding)


def _is_refused_by_pytorch(bug: Bug, other: Bug) -> bool:
    """Whether PyTorch raises for what the other bug does with a layout: a write to an input, or reads by wrong strides.

    Where these lead beyond the tensor's memory there is an exception, and elsewhere they make numbers wrong.
    """
    f, kind = bug.failure, other.failure.finding.kind
    text = f.finding.claim + f.finding.detail
    of_layout = any(laid_out(need.name, f.case) for need in other.needs if feature(need.name).is_layout)
    reads_elsewhere = kind in NUMBERS and of_layout and other.is_met(f.case)
    return (kind == "memory" and WRITES_TO_EXPANDED in text) or (
        reads_elsewhere and OUTSIDE_OF_STORAGE in text
    )


def _is_of_wrong_shape(bug: Bug, other: Bug) -> bool:
    """Whether an exception needs the same as an output of a wrong shape or dtype, which is used first elsewhere."""
    mine, others = ({(need.name, need.fails[0]) for need in one.needs} for one in (bug, other))
    is_known = any(need.is_telling for need in bug.needs)
    return other.failure.finding.kind == "contract" and is_known and mine == others


def _hides(other: Bug, bug: Bug) -> bool:
    """Whether a bug makes most ordinary cases wrong by much, in all tensors that another one is known to spoil.

    A bug that shows in all of them needs nothing. It then does not explain a case that a layout or an option cures.
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
    """Whether ``other``, of which no need was found although some ordinary cases hold, may need the same as ``bug``.

    Both make the same tensor wrong by much, and ``bug`` needs lengths and numbers only, which do not tell bugs apart.
    """
    both, unknown = (other, bug), 0 < _share(other) < 1
    found_by = {one.failure.finding.tensor for one in both}
    by_much = all(one.failure.finding.kind == "error" and not is_small(one.failure.finding) for one in both)
    return by_much and len(found_by) == 1 and unknown and bool(bug.needs) and not _is_telling(bug)


def _is_telling(bug: Bug) -> bool:
    """Whether a bug needs more than lengths, numbers and a dtype."""
    return any(need.is_telling and need.name != SCORES for need in bug.needs)


def _share(bug: Bug) -> float:
    """Return the share of ordinary cases that show a bug, 0 if none was tried."""
    return bug.severity.share or 0.0


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
