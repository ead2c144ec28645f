"""Whether known bugs explain a failure: it must go away when any field that such a bug needs gets another value."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from kernels.contract import GRADIENTS, OUTPUTS, Capabilities
from strategies.case import SIMPLEST, Case, Spike
from strategies.features import (
    BLIND,
    LENGTHS,
    NAN,
    SCORES,
    SEEN,
    UNEQUAL,
    VALUES_OF,
    value_of,
    with_no_more_than,
    with_normal_numbers,
    with_value,
    with_zeros,
)
from tests.harness.bugs.bug import ENOUGH, Bug, Condition, with_tensors
from tests.harness.bugs.counterfactuals import counterfactuals, is_needed, is_present, may_be_present
from tests.harness.bugs.dense import (
    are_apart,
    brought_in,
    leaves_out_right,
    show_at_same_lengths,
    symptoms_apart_from_forward,
    symptoms_on_dense_case,
)
from tests.harness.law import law_named
from tests.harness.running.runs import Try
from tests.harness.symptoms import are_kindred, is_small, is_tiny, leaves_roundings, wrong_tensors
from tests.harness.verdict import NUMBERS, Finding

MOST_CHANGES = 4
"""How often a failing case may be changed to one without the part that a bug explains, after which all are tried."""
OF_FLOAT16 = 2.0**-11
"""The largest relative error of a rounding to float16. Those to other formats of as few bits have a wide range."""
OTHER_NUMBERS = 8
"""How many seeds are tried to see whether a case shows something that its own numbers may hide."""


@dataclass(frozen=True)
class FailingExample:
    """A law that does not hold on a case, where ``ignored`` are the tensors that were not judged.

    ``sizes`` are the sizes, options and layouts of calls that differ from those of the case: see ``Trial.sizes``.
    """

    law: str
    case: Case
    finding: Finding
    ignored: frozenset[str] = frozenset()
    sizes: tuple[Mapping[str, Any], ...] = ()


@dataclass
class Outcome:
    """What is left of a failure once known bugs have explained their part; ``rest`` is None if nothing is left."""

    rest: FailingExample | None
    blamed: list[Bug] = field(default_factory=list)


def explain_by_known_bugs(
    broken: FailingExample, bugs: Sequence[Bug], run: Try, capabilities: Capabilities
) -> Outcome:
    """Take out of a failure what known bugs explain.

    A bug explains a failure if its tensors become right when any field that it needs gets another value. Lengths and
    numbers may matter by accident, so they count only if the bug needs nothing else. If the tensors are still wrong,
    another bug is in the case, and the search goes on without the first. Tensors that the bug is not known to spoil
    are judged once more by themselves. If it turns out that the bug spoils them too, the bug that is blamed has them.
    A bug that makes out wrong does not explain what is wrong where out is right, one that shows with finite numbers
    does not explain what NaN or infinity makes wrong, and one that only a law with numbers or tables of its own shows
    does not explain what another law finds. A law that sets large scores in any case meets all bugs that need them.
    """
    outcome, remembered = Outcome(broken), cache(run)
    # Bugs that need most are the most particular, so they are tried first.
    left, passed = sorted(bugs, key=lambda bug: -len(bug.needs)), list[Bug]()
    visited = {broken.case}
    while left and outcome.rest is not None:
        bug, rest = left.pop(0), outcome.rest
        cured = _Cured(False)
        if _is_suspect(bug, rest, remembered, capabilities):
            cured = _without(_in_law(rest.law, bug), rest, run, capabilities)
        if cured.is_explained:
            beside = _beside(bug, rest, run)
            if beside is not None and _spoils_also(bug, beside, run, capabilities, bugs):
                bug, beside = with_tensors(bug, wrong_tensors(beside.finding)), None
            outcome.blamed.append(bug)
            outcome.rest = beside or cured.rest
        else:
            outcome.rest = cured.rest or rest
            passed.append(bug)
        if outcome.rest is not None and outcome.rest.case not in visited and len(visited) <= MOST_CHANGES:
            # What does not explain a case may explain another one, in which it is all that is left.
            left, passed = [*passed, *left], []
            visited.add(outcome.rest.case)
    return outcome


def _is_suspect(bug: Bug, broken: FailingExample, run: Try, capabilities: Capabilities) -> bool:
    """Whether a bug may be to blame for a failure, by its law, by what is wrong, and by what makes it wrong."""
    if not bug.may_show_under(broken.law):
        return False
    if not bug.could_break(broken.finding) or _is_of_nan(broken, bug, run):
        return False
    if _is_of_blind_rows(broken, bug, run, capabilities):
        return False
    if "scores" not in law_named(broken.law).sets and _is_of_other_scores(bug, broken.law, broken.case, run):
        return False
    wrong = broken.law, broken.case, broken.finding
    return "out" not in bug.tensors or not leaves_out_right(*wrong, run, capabilities)


def _in_law(law: str, bug: Bug) -> Bug:
    """Return the bug without a need of large scores, if a law sets these in any case."""
    are_set = "scores" in law_named(law).sets
    return replace(bug, needs=tuple(x for x in bug.needs if not (are_set and x.name == SCORES)))


def _is_of_nan(broken: FailingExample, bug: Bug, run: Try) -> bool:
    """Whether NaN or infinity in an input makes a failure, and not the numbers with which a bug is known to show.

    A bug that needs certain numbers, and shows with finite ones, loses no NaN. Other numbers cure what it does, but
    they take the NaN away as well, so that they do not tell. Any bug is in the case if its own law shows it there
    without the NaN, or with ordinary numbers: of a dout of zeros, all gradients are 0. A large scale may hide it too.
    """
    if not bug.lacks_nan_of(broken.case):
        return False
    if "lost" in broken.finding.of_nan and bug.needs_numbers:
        return True
    normal = with_normal_numbers(broken.case)
    finite = (with_value(broken.case, NAN, False), normal, replace(normal, sm_scale=None))
    return not _is_shown_in(finite, bug, bug.failure.law, run)


def _is_shown_in(cases: Iterable[Case], bug: Bug, law: str, run: Try) -> bool:
    """Whether a law finds in any of the cases what a bug may have caused, if no tensor but its own is judged.

    For a bug that writes to an input all are judged, because a write is reported only where numbers are wrong.
    """
    others = frozenset(OUTPUTS).difference({*bug.tensors}.intersection(OUTPUTS) or OUTPUTS)
    found = (run(law, case, others) for case in cases)
    return any(finding is not None and bug.could_break(finding) for finding in found)


def _is_of_blind_rows(broken: FailingExample, bug: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether rows that see no key make NaN or infinity in a failure, and not a bug that is known by wrong numbers.

    Other lengths that cure what the bug does may leave no such row either, so that they do not tell. Lengths that leave
    none, and with which the bug still makes wrong numbers, tell that it makes no more than these. But where rows of lse
    are mixed up, that of a blind row is one of the numbers.
    """
    kinds, blind = (bug.failure.finding.kind, broken.finding.kind), value_of(broken.case, BLIND)
    if kinds != ("error", "nonfinite") or blind in (SEEN, value_of(bug.failure.case, BLIND)):
        return False
    if broken.finding.has_lse_of_no_keys:
        return False
    for case in counterfactuals(Condition(BLIND, (blind,), (SEEN,)), broken.case, capabilities):
        finding = run(broken.law, case, broken.ignored) if bug.is_met(case) else None
        if finding is not None and bug.could_break(finding):
            return finding.kind == "error"
    return False


def _is_of_other_scores(bug: Bug, law: str, case: Case, run: Try) -> bool:
    """Whether the scores of a case can't show a bug, although ordinary ones would cure the case.

    With a scale of 0 all scores are 0. If they may be so by the numbers of q or k as well, it is not the scale that
    shows.
    """
    if bug.is_of_scores_in(case):
        return False
    own = bug.failure.case
    if 0 not in (case.sm_scale, own.sm_scale):
        return True
    law, of_0 = (law, case) if case.sm_scale == 0 else (bug.failure.law, own)
    alike = (with_zeros(tensor, replace(of_0, sm_scale=None)) for tensor in VALUES_OF["qk_values"])
    return not _is_shown_in(alike, bug, law, run)


@dataclass(frozen=True)
class _Cured:
    """Whether a bug explains its part of a failure.

    ``rest`` is what fails after a field that the bug needs was changed.
    """

    is_explained: bool
    rest: FailingExample | None = None


def _without(bug: Bug, broken: FailingExample, run: Try, capabilities: Capabilities) -> _Cured:
    """Change each field that the bug needs, and see whether the failure goes away."""
    telling = [need for need in bug.needs if need.is_telling]
    necessary = bug.needs if telling else [need for need in bug.needs if need.is_certain]
    if not all(need.is_met(broken.case) for need in necessary):
        return _Cured(False)
    if not all(is_present(need, broken.case) for need in bug.needs if need.name not in LENGTHS):
        return _Cured(False)
    other = None
    for need in telling or bug.needs:
        still, cured = None, 0
        for changed in counterfactuals(need, broken.case, capabilities):
            finding = run(broken.law, changed, broken.ignored)
            left = None if finding is None else FailingExample(broken.law, changed, finding, broken.ignored)
            shows = finding is not None and bug.could_break(finding) and not _is_gone(bug, broken, finding)
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
            # Another length that still fails counts only if the case already has what the bug needs.
            return _Cured(False, still if is_present(need, broken.case) else None)
    return _Cured(True, other)


def _is_gone(bug: Bug, broken: FailingExample, left: Finding) -> bool:
    """Whether what a bug makes is gone from a failure, although something of another kind is left.

    That is wrong numbers where it makes NaN or infinity, or an error of roundings where it makes a large one.
    """
    kinds = bug.failure.finding.kind, broken.finding.kind, left.kind
    of_nan = kinds == ("nonfinite", "nonfinite", "error")
    by_much = {*kinds} == {"error"} and all(
        leaves_roundings(x, left) for x in (bug.failure.finding, broken.finding)
    )
    return of_nan or by_much


def _beside(bug: Bug, broken: FailingExample, run: Try) -> FailingExample | None:
    """Return what is wrong in tensors that the bug is not known to spoil, judged without those that it spoils.

    NaN and infinity of out reach the gradients, which are then no bug of their own.
    """
    others = wrong_tensors(broken.finding) - set(bug.tensors)
    if bug.is_huge or broken.finding.kind not in NUMBERS or not others:
        return None
    ignored = broken.ignored | set(bug.tensors)
    finding = run(broken.law, broken.case, ignored)
    # The case gave numbers before. A failure that hides them, such as a crash that is only expected, tells nothing.
    if finding is None or finding.hides_numbers:
        return None
    of_out = broken.finding.tensor == "out" and "out" in bug.tensors
    if of_out and broken.finding.kind == finding.kind == "nonfinite":
        return None
    return FailingExample(broken.law, broken.case, finding, ignored)


def _spoils_also(
    bug: Bug, beside: FailingExample, run: Try, capabilities: Capabilities, known: Collection[Bug]
) -> bool:
    """Whether a bug makes further tensors wrong: each field that it needs cures them, and nothing else is needed.

    Numbers may hide wrong tensors by chance, so several are tried: in a case that has no more than the bug needs, and
    in one that lacks a needed field. A bug that makes out wrong does not make gradients wrong where out is right.
    ``known`` are all known bugs: tensors that one of these makes wrong only in more rows are not this one's. There is
    no gradient of a bias without one, so that a case which shows dbias keeps its bias.
    """
    wrong, needs = wrong_tensors(beside.finding), [need for need in bug.needs if need.name not in LENGTHS]
    if not needs or not are_kindred(set(bug.tensors), wrong):
        return False
    f = bug.failure
    kept = ("bias",) if "dbias" in wrong else ()
    with_it = replace(f.case, bias=beside.case.bias) if kept else f.case
    own = symptoms_on_dense_case(f.law, with_it, f.finding, run, capabilities, bug.needs)
    of_others = {tensor for x in brought_in(f.case, known) for tensor in x.tensors}
    if own and not wrong <= own - of_others:
        return False

    def found(case: Case) -> set[str]:
        finding = run(beside.law, case, beside.ignored)
        return wrong_tensors(finding) & wrong if finding and finding.kind in NUMBERS else set()

    def with_some_numbers(case: Case) -> Iterator[set[str]]:
        return (found(replace(case, seed=seed)) for seed in (case.seed, *range(OTHER_NUMBERS)))

    def fails(case: Case) -> bool:
        return any(with_some_numbers(case))

    bare = with_no_more_than([*(need.name for need in needs), *kept], beside.case)
    return (
        capabilities.admits(bare)
        and wrong in with_some_numbers(bare)
        and all(is_needed(need, beside.case, fails, capabilities) for need in needs)
        and not ("out" in bug.tensors and wrong & symptoms_apart_from_forward(bare, run, capabilities, known))
    )


def is_same(known: Bug, bug: Bug, run: Try, capabilities: Capabilities, others: Collection[Bug] = ()) -> bool:
    """Whether two bugs that were found separately are one, where ``others`` are the known bugs of the kernel.

    They are if what cures the smallest case of either cures the other's, unless they make other tensors wrong. A change
    that brings a third bug into a case tells nothing.
    """
    if (known.is_huge and bug.is_huge) or known.keeps_state_as(bug) or bug.keeps_state_as(known):
        return True
    if known.needs_arguments_of != bug.needs_arguments_of:
        return False
    both = ((known, bug), (bug, known))
    if known.is_kin(bug) and any(_rounds_also(one, other) for one, other in both):
        return True
    third = [x for x in others if x.key not in (known.key, bug.key)]
    if known.is_kin(bug) and _are_roundings_by_chance(known, bug):
        return True
    if known.is_kin(bug) and not _needs_of_no_rule(known).isdisjoint(_needs_of_no_rule(bug)):
        return True
    if not known.is_kin(bug) or are_apart(known, bug, run, capabilities, third):
        return False
    if any(_hides_nan_by_itself(one, other, run, capabilities) for one, other in both):
        return False
    if any(_is_found_beside(one, other, run, capabilities) for one, other in both):
        return True
    if _differ_by_chance(known, bug):
        return False
    if known.is_like(bug) or show_at_same_lengths(known, bug, run, capabilities):
        return True
    if all(_is_of_other_scores(one, other.failure.law, other.failure.case, run) for one, other in both):
        return False
    for one, other in both:
        of_scores = SCORES in {need.name for need in other.needs} and {*one.tensors} <= {*other.tensors}
        if one.needs_own_numbers and "scores" in law_named(one.failure.law).sets and of_scores:
            return True
        if one.needs_no_more_than_dtype and _is_shown_by(one, other, run, capabilities):
            return True
    if bug.failure.finding.ends_process:  # each run to make sure would end a process
        return False
    cured = partial(_is_cured_as, run=run, capabilities=capabilities, others=third)
    return any(_begins_like(one, other) and cured(one, other) for one, other in both) or all(
        cured(one, other) for one, other in both
    )


def _are_roundings_by_chance(one: Bug, other: Bug) -> bool:
    """Whether two bugs make errors of roundings that no ordinary case shows, and nothing is sure of what they need.

    Numbers decide whether such roundings are seen, so that anything may seem to be needed.
    """
    return all(
        is_small(bug.failure.finding)
        and not bug.severity.shown
        and not any(need.is_telling and need.is_certain for need in bug.needs)
        for bug in (one, other)
    )


def _needs_of_no_rule(bug: Bug) -> set[str]:
    """Return the lengths on which it depends by no tiles whether a bug shows; hardly two bugs do so by one length."""
    return {need.name for need in bug.needs if need.is_irregular}


def _hides_nan_by_itself(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether a bug hides the NaN of an input, and another one that needs certain finite numbers does not do that.

    A bound for scores, say, does both. It shows in one row of two large scores as well.
    """
    f = one.failure
    if f.finding.of_nan != ("lost",) or not (other.needs_numbers and other.lacks_nan_of(f.case)):
        return False
    entries = (("q", (0, 0, 0, 0), 2.0**15), ("k", (0, 0, 0, 0), 2.0), ("k", (0, 0, 1, 0), 4.0))
    two_scores = replace(
        with_no_more_than((), f.case),
        seqlen_q=1,
        seqlen_k=2,
        q_values="zeros",
        k_values="zeros",
        spikes=tuple(Spike(*entry) for entry in entries),
    )
    finding = run("forward", two_scores, frozenset()) if capabilities.admits(two_scores) else None
    return finding is None or not other.could_break(finding)


def _differ_by_chance(one: Bug, other: Bug) -> bool:
    """Whether two bugs have no tensor in common, and need lengths or numbers alone, which may cure any small case."""
    found_by = {one.failure.finding.tensor, other.failure.finding.tensor}
    telling = any(need.is_telling for bug in (one, other) for need in bug.needs)
    return not telling and "" not in found_by and found_by.isdisjoint({*one.tensors} & {*other.tensors})


def _begins_like(one: Bug, other: Bug) -> bool:
    """Whether a bug may show another, which needs lengths alone, by a second way to trigger it.

    The same tensors are wrong and, as far as the lengths that were tried tell, from the same lengths on.
    """
    begins = ({need.name: need.begins for need in bug.needs} for bug in (one, other))
    mine, others = begins
    if not others or not others.keys() < mine.keys() or not {*one.tensors} <= {*other.tensors}:
        return False
    pairs = ((mine[name], begin) for name, begin in others.items())
    return all(own and begin and own[0] <= begin[0] < begin[1] <= own[1] for own, begin in pairs)


def _is_found_beside(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether a bug is another one, found in tensors that were judged beside that one's own.

    It needs all that the other bug needs, and is cured with it. Without what it seems to need in addition the other bug
    still shows, and its own tensors are only not known to be wrong: the other bug makes them wrong elsewhere, or they
    are wrong there with ordinary numbers, or all of out is NaN there, so that no gradient can be judged.
    """
    f, spoiled = one.failure, {*other.tensors}
    mine, others = ({need.name: need for need in bug.needs} for bug in (one, other))
    telling = any(need.is_telling for need in other.needs) or len(others) > 1
    if f.ignored.isdisjoint(spoiled) or not telling or not others.keys() <= mine.keys():
        return False
    more = [mine[name] for name in mine.keys() - others.keys()]
    without = [case for need in more for case in counterfactuals(need, f.case, capabilities)]
    found = [run(f.law, case, frozenset()) for case in (f.case, *without)]
    if not all(x is not None and other.could_break(x) for x in found):
        return False
    unjudged = bool(without) and all(x is not None and x.is_all_nan for x in found[1:])
    is_its_own = (
        unjudged
        or not spoiled.isdisjoint(one.tensors)
        or any(
            symptoms_on_dense_case(f.law, case, f.finding, run, capabilities) for case in without or (f.case,)
        )
    )
    return is_its_own and _is_cured_as(one, other, run, capabilities)


def _is_shown_by(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether the other bug's smallest case shows this one, which needs nothing but its dtype."""
    f = other.failure
    are_roundings = is_small(one.failure.finding) and is_small(f.finding)
    if one.is_everywhere and f.finding.tensor in one.tensors and one.is_met(f.case):
        # In a small case lengths and numbers may matter by accident, and all fields may if errors are small.
        if are_roundings or any(need.is_telling for need in other.needs):
            return are_roundings
        # A large error of roundings is one of few numbers, so ordinary ones make it small.
        ordinary = run(f.law, with_no_more_than(SIMPLEST, f.case), f.ignored)
        return not is_small(one.failure.finding) or ordinary is None or is_small(ordinary)
    # In other dtypes it depends on the numbers whether the same roundings show, so that ordinary ones may hold there.
    # Where these do, what shows is imprecise if a less precise design explains it; any other bug may make small errors.
    is_imprecise = f.finding.explained_by and not other.severity.shown
    if not are_roundings or not one.needs or not (one.is_met(f.case) or is_imprecise):
        return False
    needs = tuple(replace(x, holds=tuple(y for y in x.holds if y != f.case.dtype)) for x in one.needs)
    return _is_cured_as(other, replace(one, needs=needs), run, capabilities)


def _rounds_also(one: Bug, other: Bug) -> bool:
    """Whether the other bug shows the ends of the range of a format to which this one rounds ordinary numbers.

    It is enough that most ordinary cases show these roundings, since it depends on the numbers whether one does.
    Gradients follow from out, or from the weights that it is made of.
    """
    s = one.severity
    is_usual = one.needs_no_more_than_dtype and not one.needs_own_numbers and 2 * s.shown > s.tried >= ENOUGH
    if not (is_usual and is_small(one.failure.finding)):
        return False
    is_of_range = _is_of_range(other) or (_is_of_float16(one) and _is_overflow(other))
    return is_of_range and {*other.tensors} <= one.may_spoil


def _is_of_range(bug: Bug) -> bool:
    """Whether only certain numbers show errors of the ends of a format's range: large, of a tiny number, or a lost one.

    Such a format rounds ordinary numbers as well. A weight is tiny by any scale above the default one, and with
    any lengths but one key, whose weight is 1.
    """
    mine, default = bug.failure.finding, replace(bug.failure.case, sm_scale=None).scale
    of_tiny = is_tiny(mine, "float16")
    scales = [x for x in bug.needs if _is_large_scale(x) or (of_tiny and _is_scale_above(default, x))]
    names = {SCORES if need in scales else need.name for need in bug.needs}
    names -= {*LENGTHS, UNEQUAL} if of_tiny else {*LENGTHS}
    at_the_ends = not is_small(mine) or mine.actual == 0 != mine.expected or of_tiny
    of_few = mine.kind == "error" and at_the_ends and not bug.severity.shown
    return of_few and bool(names) and names <= {*VALUES_OF, SCORES}


def _is_of_float16(bug: Bug) -> bool:
    """Whether roundings are no larger than those to float16, the only format of a kernel with a narrow range."""
    return float(bug.failure.finding.relative or 0.0) <= OF_FLOAT16


def _is_overflow(bug: Bug) -> bool:
    """Whether only large numbers of v and dout make gradients NaN or infinite, as their products do in float16.

    Large scores make NaN by other mistakes too.
    """
    names = {need.name for need in bug.needs} - {*LENGTHS}
    of_products = bool(names) and names <= {"v_values", "dout_values"}
    return (
        bug.failure.finding.kind == "nonfinite"
        and {*bug.tensors} <= {*GRADIENTS}
        and of_products
        and not bug.severity.shown
    )


def _is_cured_as(
    one: Bug, other: Bug, run: Try, capabilities: Capabilities, others: Collection[Bug] = ()
) -> bool:
    """Whether changes that cure the other bug cure the smallest case of this one.

    All needs of the other bug that tell bugs apart must cure it; if none does, one need of any kind is enough. If no
    need of this bug is known, only those needs of the other one must cure it that are certain.
    """
    f = one.failure

    def brings_in_another(need: Condition) -> bool:
        changed = list(counterfactuals(need, f.case, capabilities))
        absent = (x for x in others if x.could_break(f.finding) and not x.is_met(f.case))
        return bool(changed) and any(all(map(x.is_met, changed)) for x in absent)

    if not other.needs:  # as far as is known; tensors that it is not known to spoil may be another bug's
        return other.could_break(f.finding) and f.finding.tensor in (*other.tensors, "")
    telling = [need for need in other.needs if need.is_telling and not brings_in_another(need)]
    if not one.needs:
        telling = [need for need in telling if need.is_certain] or telling
    fails = partial(_shows, one, run)
    outcomes = (
        may_be_present(need, f.case) and is_needed(need, f.case, fails, capabilities)
        for need in map(partial(_as_in, one), telling or other.needs)
    )
    return all(outcomes) if telling else any(outcomes)


def _as_in(bug: Bug, need: Condition) -> Condition:
    """Return the need; if it is of a large sm_scale and this bug needs large scores instead, return that need."""
    if not _is_large_scale(need):
        return need
    return next((mine for mine in bug.needs if mine.name == SCORES), need)


def _is_large_scale(need: Condition) -> bool:
    """Whether sm_scale matters by making large scores, which one no larger than a scale that holds does not do."""
    held = need.holds if need.name == "sm_scale" else ()
    return _is_scale_above(max((abs(x or 0.0) for x in held), default=0.0), need)


def _is_scale_above(least: float, need: Condition) -> bool:
    """Whether sm_scale matters, and is larger than ``least`` or, if it is negative, smaller than ``-least``."""
    return need.name == "sm_scale" and abs(need.fails[0] or 0.0) > least


def _shows(bug: Bug, run: Try, case: Case) -> bool:
    """Whether a case shows a bug again: under its law, in its tensors, and with NaN or infinity if it made these."""
    finding, mine = run(bug.failure.law, case, frozenset()), bug.failure.finding
    if finding is None or not bug.could_break(finding) or leaves_roundings(mine, finding):
        return False
    if finding.explained_by and not (mine.explained_by or is_small(mine)):
        return False  # what is left is less precise, as another bug may make it
    return mine.kind != "nonfinite" or finding.kind == mine.kind
