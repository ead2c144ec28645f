"""Whether known bugs explain a failure: with another value of any field that a bug needs, it must go away."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import is_claimed
from tests.harness.bugs import Bug, Need, wrong_tensors
from tests.harness.vary import LENGTHS, PAIR, SIMPLE, TILES_OF, VALUES_OF, value_of, with_value
from tests.harness.verdict import NUMBERS, Finding

MOST_VALUES = 4
"""So many values of a field are tried."""

Try = Callable[[str, Case, frozenset[str]], Finding | None]
"""Runs a law on a case, some tensors not being judged; what it finds, or None."""


@dataclass(frozen=True)
class Broken:
    """A law that does not hold on a case, ``ignored`` being the tensors that were not judged."""

    law: str
    case: Case
    finding: Finding
    ignored: frozenset[str] = frozenset()


@dataclass
class Outcome:
    """What is left of a failure when known bugs have explained their part: None if nothing is."""

    rest: Broken | None
    blamed: list[Bug] = field(default_factory=list)


def attribute(broken: Broken, bugs: Sequence[Bug], run: Try, capabilities: Capabilities) -> Outcome:
    """Take out of a failure what known bugs explain.

    A bug explains a failure if the failure is gone with another value of any of the fields that the bug needs. If it
    is still there, another bug is in the case, and the search goes on without the first. Tensors that the bug is not
    known to spoil are judged once more by themselves.
    """
    outcome = Outcome(broken)
    # Bugs that need most are the most particular, and tried first.
    left = sorted(bugs, key=lambda bug: -len(bug.needs))
    while left and outcome.rest is not None:
        bug = left.pop(0)
        if not bug.could_break(outcome.rest.finding):
            continue
        still = _without(bug, outcome.rest, run, capabilities)
        if still is not None:
            outcome.rest = still
            continue
        outcome.blamed.append(bug)
        outcome.rest = _beside(bug, outcome.rest, run)
    return outcome


def _without(bug: Bug, broken: Broken, run: Try, capabilities: Capabilities) -> Broken | None:
    """What still fails without one of the bug's needs; None if all of them cure the case."""
    if not all(_is_present(need, broken.case) for need in bug.needs if need.name not in LENGTHS):
        return broken
    for need in bug.needs:
        still, cured = None, 0
        for changed in cures(need, broken.case, capabilities):
            finding = run(broken.law, changed, broken.ignored)
            cured += finding is None
            still = still or (finding and Broken(broken.law, changed, finding, broken.ignored))
            if need.cures_by_all == bool(finding):
                break
        if not cured or (still and need.cures_by_all):
            # Another length than one that holds may but bring the bug into the case.
            return still if still and _is_present(need, broken.case) else broken
    return None


def _is_present(need: Need, case: Case) -> bool:
    """Whether a case may have what is needed."""
    return value_of(case, need.name) not in need.holds


def _beside(bug: Bug, broken: Broken, run: Try) -> Broken | None:
    """What is wrong in tensors that the bug is not known to spoil, judged without those that it does."""
    others = wrong_tensors(broken.finding) - set(bug.tensors)
    if bug.is_huge or broken.finding.kind not in NUMBERS or not others:
        return None
    ignored = broken.ignored | set(bug.tensors)
    finding = run(broken.law, broken.case, ignored)
    return None if finding is None else Broken(broken.law, broken.case, finding, ignored)


def cures(need: Need, case: Case, capabilities: Capabilities) -> Iterator[Case]:
    """The case with values of a field that hold, as far as the kernel claims them; a length's nearest to its own."""
    tried = 0
    for value in _values(need, case):
        cured = with_value(case, need.name, value)
        if cured != case and is_claimed(cured, capabilities) and tried < MOST_VALUES:
            tried += 1
            yield cured


def _values(need: Need, case: Case) -> list[object]:
    if need.name == "lengths":
        return [x for x in dict.fromkeys((case.seqlen_k, case.seqlen_q)) if x]
    if need.name not in LENGTHS:
        return list(need.holds)
    own = getattr(case, need.name)
    block = case.blocks.get(TILES_OF[need.name], 0)
    whole = [own // block * block] if block else []
    other = case.seqlen_k if need.name == "seqlen_q" else case.seqlen_q
    near = sorted(need.holds, key=lambda value: abs(value - own))
    # Nothing is wrong in an empty tensor: 0 cures anything.
    return [x for x in dict.fromkeys([*whole, *near[:2], other, *near[2:]]) if x]


def is_same(known: Bug, bug: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether a bug that was found by itself is one that is known: it needs nothing else, and goes away with it."""
    if known.is_huge and bug.is_huge:
        return True
    mine, theirs = {need.name for need in bug.needs}, {need.name for need in known.needs}
    failure = bug.failure
    if failure.finding.ends_process and known.could_break(failure.finding) and mine & theirs:
        return True  # each run to make sure would end a process
    both = known.is_met(failure.case) and bug.is_met(known.failure.case)
    if mine == theirs and mine - set(LENGTHS) and both and known.could_break(failure.finding):
        return True  # beside a third bug, whose failure would be left without what they need
    if not mine - set(LENGTHS) <= theirs or not (mine & theirs or mine == theirs):
        return False
    # Where both need the same, a tensor of one beside those of the other is enough.
    alike = bool(mine) and mine - set(LENGTHS) == theirs - set(LENGTHS)
    for law in dict.fromkeys((failure.law, *(("forward", "backward") if alike else ()))):
        finding = run(law, failure.case, frozenset())
        if finding is not None and known.could_break(finding):
            return _without(known, Broken(law, failure.case, finding), run, capabilities) is None
    return False


def needs_of(
    fields: Sequence[Need],
    witnesses: Sequence[Case],
    fails: Callable[[Case], bool],
    capabilities: Capabilities,
) -> tuple[Need, ...]:
    """Those of the fields without which none of the failing ``witnesses`` fails, of which the first is the smallest.

    In a small case much matters by accident: other sizes are other numbers. What a bug needs, it needs in each case.
    A larger case that nothing cures, or no field that the smallest case has at another value than its simplest, has
    other bugs as well, and is no witness.
    """
    numbers = (_numbers(witnesses[0], name) for name in VALUES_OF)
    kept = [
        need
        for need in (*fields, *filter(None, numbers))
        if _is_needed(need, witnesses[0], fails, capabilities)
    ]
    telling = {need.name for need in kept if _is_telling(need)}
    for witness in witnesses[1:]:
        cured = [need for need in kept if _is_needed(need, witness, fails, capabilities)]
        if cured and (not telling or telling & {need.name for need in cured}):
            kept = cured
    return tuple(kept)


def _is_telling(need: Need) -> bool:
    """Whether shrinking has left a value that it would have made simpler, had the failure not needed it."""
    if need.name in SIMPLE:
        return need.name != "dtype" and need.fails[0] != SIMPLE[need.name]
    return need.name in VALUES_OF or need.name in ("lengths", "huge") or need.name.endswith(PAIR)


def _numbers(case: Case, name: str) -> Need | None:
    """The numbers of a tensor as a field, where they are not normal."""
    value = value_of(case, name)
    return None if value == "normal" else Need(name, (value,), ("normal",))


def _is_needed(need: Need, case: Case, fails: Callable[[Case], bool], capabilities: Capabilities) -> bool:
    """Whether other values of a field cure a case."""
    outcomes = (not fails(cured) for cured in cures(need, case, capabilities))
    if need.cures_by_all:
        return all(found := list(outcomes)) and bool(found)
    return any(outcomes)
