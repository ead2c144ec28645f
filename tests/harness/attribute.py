"""Whether known bugs explain a failure: with another value of any field that a bug needs, it must go away."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kernels.contract import Capabilities
from strategies.case import SIMPLEST, Case
from strategies.cases import is_claimed
from tests.harness.bugs import Bug, Need, wrong_tensors
from tests.harness.vary import LENGTHS, PAIR, SCORES, TILES_OF, VALUES_OF, value_of, with_value
from tests.harness.verdict import NUMBERS, Finding

MOST_VALUES = 4
"""So many values of a field are tried."""

Try = Callable[[str, Case, frozenset[str]], Finding | None]
"""Runs a law on a case, some tensors not being judged; what it finds, or None."""


@dataclass(frozen=True)
class Broken:
    """A law that does not hold on a case, ``ignored`` being the tensors that were not judged.

    ``sizes`` are the sizes and options of calls that differ from the case, as ``Trial.sizes`` has them.
    """

    law: str
    case: Case
    finding: Finding
    ignored: frozenset[str] = frozenset()
    sizes: tuple[Mapping[str, Any], ...] = ()


@dataclass
class Outcome:
    """What is left of a failure when known bugs have explained their part: None if nothing is."""

    rest: Broken | None
    blamed: list[Bug] = field(default_factory=list)


def attribute(broken: Broken, bugs: Sequence[Bug], run: Try, capabilities: Capabilities) -> Outcome:
    """Take out of a failure what known bugs explain.

    A bug explains a failure if the bug's tensors are right with another value of any of the fields that it needs; of
    lengths and numbers, which may matter by accident, only where it needs nothing else. If they are still wrong,
    another bug is in the case, and the search goes on without the first. Tensors that the bug is not known to spoil
    are judged once more by themselves.
    """
    outcome = Outcome(broken)
    # Bugs that need most are the most particular, and tried first.
    left = sorted(bugs, key=lambda bug: -len(bug.needs))
    while left and outcome.rest is not None:
        bug = left.pop(0)
        if not bug.could_break(outcome.rest.finding):
            continue
        cured = _without(bug, outcome.rest, run, capabilities)
        if cured.is_explained:
            outcome.blamed.append(bug)
            outcome.rest = _beside(bug, outcome.rest, run) or cured.rest
        elif cured.rest is not None:
            outcome.rest = cured.rest
    return outcome


@dataclass(frozen=True)
class _Cured:
    """Whether a bug explains its part of a failure.

    ``rest`` is what fails after a field that the bug needs was changed.
    """

    is_explained: bool
    rest: Broken | None = None


def _without(bug: Bug, broken: Broken, run: Try, capabilities: Capabilities) -> _Cured:
    """What becomes of a failure without each of the bug's needs."""
    telling = [need for need in bug.needs if need.is_telling]
    if telling and not bug.is_met(broken.case):
        return _Cured(False)
    if not all(_is_present(need, broken.case) for need in bug.needs if need.name not in LENGTHS):
        return _Cured(False)
    other = None
    for need in telling or bug.needs:
        still, cured = None, 0
        for changed in cures(need, broken.case, capabilities):
            finding = run(broken.law, changed, broken.ignored)
            left = None if finding is None else Broken(broken.law, changed, finding, broken.ignored)
            shows = finding is not None and bug.could_break(finding)
            if finding is not None and finding.hides_numbers and not shows:
                continue  # it tells nothing of what else is in the case
            if shows:
                still = still or left
            else:
                cured += 1
                other = other or left
            if need.cures_by_all == shows:
                break
        if not cured or (still and need.cures_by_all):
            # Another length than one that holds may but bring the bug into the case.
            return _Cured(False, still if _is_present(need, broken.case) else None)
    return _Cured(True, other)


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
    """Whether two bugs that were found by themselves are one: the smallest case of each is cured as the other is."""
    if (known.is_huge and bug.is_huge) or known.is_like(bug):
        return True
    if not known.is_kin(bug):
        return False
    for one, other in ((known, bug), (bug, known)):
        tells = any(need.is_telling for need in other.needs)
        if one.is_everywhere and not tells and other.failure.finding.tensor in one.tensors:
            return True  # in the smallest case lengths and numbers may matter by accident
    if bug.failure.finding.ends_process:  # each run to make sure would end a process
        return bool({need.name for need in bug.needs} & {need.name for need in known.needs})
    both = ((known, bug), (bug, known))
    return all(_is_cured_as(one, other, run, capabilities) for one, other in both)


def _is_cured_as(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether changes that cure the other bug cure the smallest case of this one.

    All needs of the other bug that tell bugs apart must cure it; if none does, one need of any kind is enough.
    """
    f = one.failure
    if not other.needs:  # as far as is known: what it is not known to spoil may be wrong otherwise
        return other.could_break(f.finding) and f.finding.tensor in (*other.tensors, "")
    telling = [need for need in other.needs if need.is_telling]
    fails = partial(_shows, one, run)
    outcomes = (
        _is_present(need, f.case) and _is_needed(need, f.case, fails, capabilities)
        for need in map(partial(_as_in, one), telling or other.needs)
    )
    return all(outcomes) if telling else any(outcomes)


def _as_in(bug: Bug, need: Need) -> Need:
    """The need itself; a need of sm_scale becomes the one of large scores if this bug has that instead."""
    of_scores = next((mine for mine in bug.needs if mine.name == SCORES), need)
    return of_scores if need.name == "sm_scale" else need


def _shows(bug: Bug, run: Try, case: Case) -> bool:
    """Whether a case shows a bug again: under its law, in its tensors, and with NaN or infinity if it made these."""
    finding, mine = run(bug.failure.law, case, frozenset()), bug.failure.finding
    if finding is None or not bug.could_break(finding):
        return False
    return mine.kind != "nonfinite" or finding.kind == mine.kind


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
    telling = {need.name for need in kept if _resisted_shrinking(need)}
    for witness in witnesses[1:]:
        cured = [need for need in kept if _is_needed(need, witness, fails, capabilities)]
        if cured and (not telling or telling & {need.name for need in cured}):
            kept = cured
    return tuple(kept)


def _resisted_shrinking(need: Need) -> bool:
    """Whether shrinking has left a value that it would have made simpler, had the failure not needed it."""
    if need.name in SIMPLEST:
        return need.name != "dtype" and need.fails[0] != SIMPLEST[need.name]
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
