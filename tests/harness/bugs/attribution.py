"""Attribute failures to known bugs: a bug explains a failure if changing any field in its conditions fixes it."""

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
"""How many changed cases may start the list of known bugs afresh. After them, each bug left is tried once."""
OF_FLOAT16 = 2.0**-11
"""The largest relative error of a rounding to float16. The other formats of few bits have a wide exponent range."""
OTHER_NUMBERS = 8
"""How many further seeds are tried to see whether a tensor is wrong that may be right by chance with one seed."""


@dataclass(frozen=True)
class FailingExample:
    """A law that fails on a case. The tensors in ``ignored`` were not judged.

    ``sizes`` are the sizes, options and layouts of calls that differ from those of the case: see ``Trial.sizes``.
    """

    law: str
    case: Case
    finding: Finding
    ignored: frozenset[str] = frozenset()
    sizes: tuple[Mapping[str, Any], ...] = ()


@dataclass
class Outcome:
    """What known bugs explain of a failure: ``blamed`` are these bugs, and ``rest`` is what fails besides, or None."""

    rest: FailingExample | None
    blamed: list[Bug] = field(default_factory=list)


def explain_by_known_bugs(
    broken: FailingExample, bugs: Sequence[Bug], run: Try, capabilities: Capabilities
) -> Outcome:
    """Return which known bugs explain a failure, and what failure is left.

    For each bug that may be to blame (``_is_suspect``), bugs with most conditions first:

    1. The failure must go away when any field in the bug's conditions gets another value. Example: a bug with the
       conditions causal and group=2 explains a failure that both causal=False and group=1 fix.
    2. Lengths and numbers are changed only if the bug has no other condition, since in a small case they matter by
       chance.
    3. If a change fixes the bug's tensors but others fail, a second bug is in the case. The search goes on in that
       case.
    4. Wrong tensors that the bug is not known to make wrong are judged by themselves. The bug explains them too if the
       same changes fix them (``_spoils_also``); the bug in ``blamed`` then has them among its tensors. Else they are
       left.
    """
    outcome, remembered = Outcome(broken), cache(run)
    # A bug with more conditions is more specific, so it is tried first.
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
            # A bug that does not explain the old case may explain the changed one, where it is all that is left.
            left, passed = [*passed, *left], []
            visited.add(outcome.rest.case)
    return outcome


def _is_suspect(bug: Bug, broken: FailingExample, run: Try, capabilities: Capabilities) -> bool:
    """Whether a bug may be to blame for a failure, before any of its conditions is changed.

    It may not if

    1. the law's calls can't have what the bug needs, as where only a law with tables of angles shows it;
    2. kind or tensors differ: a bug of dk does not explain a wrong dv;
    3. NaN in an input makes the failure, and the bug shows with finite numbers;
    4. rows that see no key make NaN, and the bug makes wrong numbers;
    5. scores are too small for the bug, unless the law itself makes them large;
    6. the bug makes out wrong, and out is right.
    """
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
    """Return the bug without its condition on scores, if the law makes scores large in every case."""
    are_set = "scores" in law_named(law).sets
    return replace(bug, needs=tuple(x for x in bug.needs if not (are_set and x.name == SCORES)))


def _is_of_nan(broken: FailingExample, bug: Bug, run: Try) -> bool:
    """Whether NaN or infinity in an input makes a failure, and not a bug that is known to show with finite numbers.

    1. A lost NaN is not due to a bug that needs special numbers, such as zeros in v: changing them removes the NaN as
       well, so that the change would seem to prove the bug guilty.
    2. Any other bug may be to blame if its own law still reports it after the NaN is removed, after all numbers are
       made normal, or after sm_scale is made the default too. With dout of zeros, say, all gradients are 0 and hide it.
    """
    if not bug.lacks_nan_of(broken.case):
        return False
    if "lost" in broken.finding.of_nan and bug.needs_numbers:
        return True
    normal = with_normal_numbers(broken.case)
    finite = (with_value(broken.case, NAN, False), normal, replace(normal, sm_scale=None))
    return not _is_shown_in(finite, bug, bug.failure.law, run)


def _is_shown_in(cases: Iterable[Case], bug: Bug, law: str, run: Try) -> bool:
    """Whether a law finds, in any of the cases, what a bug may have caused, if only the bug's tensors are judged.

    For a bug that writes to an input all tensors are judged, because a write is reported only where numbers are wrong.
    """
    others = frozenset(OUTPUTS).difference({*bug.tensors}.intersection(OUTPUTS) or OUTPUTS)
    found = (run(law, case, others) for case in cases)
    return any(finding is not None and bug.could_break(finding) for finding in found)


def _is_of_blind_rows(broken: FailingExample, bug: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether rows that see no key make NaN or infinity in a failure, and not a bug that makes wrong finite numbers.

    Example: causal, 9 queries, 5 keys: rows 0 to 3 see no key, and 0 / 0 makes them NaN. Lengths that fix the bug may
    also leave no such row, so that a fix by them proves nothing. So lengths are tried that have the bug's conditions
    and let each row see a key: if numbers are wrong there but finite, the bug did not make the NaN.

    If all that is not finite is -inf in lse, this may be the right lse of such a row in the wrong place, which a bug
    that mixes up rows explains.
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
    """Whether a case has scores that can't show a bug, although normal scores would fix the case.

    Example: a bug that needs large scores does not explain a failure at sm_scale=0. If just one of the two cases has a
    scale of 0, zeros in q or k are tried with the default scale instead. If the bug shows there too, the scale is not
    what matters.
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
    """Whether changing a bug's conditions fixes a failure; ``rest`` is what fails in a changed case."""

    is_explained: bool
    rest: FailingExample | None = None


def _without(bug: Bug, broken: FailingExample, run: Try, capabilities: Capabilities) -> _Cured:
    """Change each field in the bug's conditions, and see whether the failure goes away.

    Only conditions that distinguish bugs are changed (``Condition.is_telling``), or all if the bug has no such
    condition.
    """
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
                continue  # without numbers, it is not known whether the bug still shows
            if shows:
                still = still or left
            else:
                cured += 1
                other = other or left
            if need.cures_by_all == shows:
                break
        if not cured or (still and need.cures_by_all):
            # A case of another length is where the search goes on only if this length may matter at all.
            return _Cured(False, still if is_present(need, broken.case) else None)
    return _Cured(True, other)


def _is_gone(bug: Bug, broken: FailingExample, left: Finding) -> bool:
    """Whether what the bug does is gone after a change, although the case still fails in another way.

    1. The bug made NaN, and finite wrong numbers are left.
    2. The bug made a large error, and one of rounding size is left.
    """
    kinds = bug.failure.finding.kind, broken.finding.kind, left.kind
    of_nan = kinds == ("nonfinite", "nonfinite", "error")
    by_much = {*kinds} == {"error"} and all(
        leaves_roundings(x, left) for x in (bug.failure.finding, broken.finding)
    )
    return of_nan or by_much


def _beside(bug: Bug, broken: FailingExample, run: Try) -> FailingExample | None:
    """Return the failure in tensors that the bug is not known to make wrong, with the bug's own tensors not judged.

    Example: a bug of dk explains a case in which dk and dv are wrong; this is the failure of dv. None is returned for
    gradients that are not finite because out is not.
    """
    others = wrong_tensors(broken.finding) - set(bug.tensors)
    if bug.is_huge or broken.finding.kind not in NUMBERS or not others:
        return None
    ignored = broken.ignored | set(bug.tensors)
    finding = run(broken.law, broken.case, ignored)
    # The case gave numbers before. A failure without numbers, such as a crash that is only predicted, says nothing.
    if finding is None or finding.hides_numbers:
        return None
    of_out = broken.finding.tensor == "out" and "out" in bug.tensors
    if of_out and broken.finding.kind == finding.kind == "nonfinite":
        return None
    return FailingExample(broken.law, broken.case, finding, ignored)


def _spoils_also(
    bug: Bug, beside: FailingExample, run: Try, capabilities: Capabilities, known: Collection[Bug]
) -> bool:
    """Whether a bug makes further tensors wrong, those of ``beside``.

    It does if

    1. it has a condition other than lengths, and one mistake may make all of these tensors wrong (``are_kindred``);
    2. its own smallest case has them wrong too with normal numbers in more rows, where any tensor is wrong there at
       all. Tensors are left out that a bug of ``known`` makes wrong only in more rows;
    3. the case still fails in them with nothing but the bug's conditions left. A bias stays if dbias is wrong, since
       there is no dbias without it;
    4. changing any field in the bug's conditions fixes them;
    5. the bug does not make out wrong, or no gradient of them is wrong at other lengths where out is right.

    A tensor may be right by chance, so that cases are run with several seeds.
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
    """Whether two bugs that were found separately are duplicates; ``others`` are the known bugs of the kernel.

    The first rule that applies decides. Examples are of two bugs A and B.

    1. Duplicates: both need huge strides, or one makes repeated calls differ and the other comes and goes.
    2. Distinct: only one needs the arguments of its law, such as tables of angles.
    3. Duplicates: A rounds most ordinary cases to float16, and B is an overflow of float16.
    4. Duplicates: both are rounding errors that no ordinary case shows.
    5. Duplicates: for both the same length matters by no tile size, as in a failure at 5, 9 and 12 keys but not at 6.
    6. Distinct: kinds or tensors differ, or different tensors are wrong with normal numbers in more rows.
    7. Distinct: A hides the NaN of an input, and B needs certain finite numbers and hides none.
    8. Duplicates: A was found in tensors that were judged without those of B, and B makes them wrong too.
    9. Distinct: the tensors differ, and both need lengths or numbers alone.
    10. Duplicates: their records are alike (``Bug.is_like``), or both show at the same lengths.
    11. Distinct: each has scores that can't show the other.
    12. Duplicates: A needs no more than the large scores that its law sets, and B needs large scores.
    13. Duplicates: A needs nothing but its dtype, and the smallest case of B shows it.
    14. Distinct: the process ends, since each further run would end it again.
    15. Duplicates: what fixes the smallest case of A fixes that of B, and the other way round. One way is enough if B
        needs lengths alone and A shows from the same lengths on. A change that brings in a third bug counts for
        nothing.
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
    if bug.failure.finding.ends_process:  # each further run would end a process
        return False
    cured = partial(_is_cured_as, run=run, capabilities=capabilities, others=third)
    return any(_begins_like(one, other) and cured(one, other) for one, other in both) or all(
        cured(one, other) for one, other in both
    )


def _are_roundings_by_chance(one: Bug, other: Bug) -> bool:
    """Whether two bugs are rounding errors that no ordinary case shows, without a confirmed condition in either.

    Numbers decide whether such an error exceeds its bound, so that any field may seem to matter.
    """
    return all(
        is_small(bug.failure.finding)
        and not bug.severity.shown
        and not any(need.is_telling and need.is_certain for need in bug.needs)
        for bug in (one, other)
    )


def _needs_of_no_rule(bug: Bug) -> set[str]:
    """Return the lengths that decide whether a bug shows, but by no tile size. Two bugs hardly share such a length."""
    return {need.name for need in bug.needs if need.is_irregular}


def _hides_nan_by_itself(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether ``one`` hides the NaN of an input, and ``other``, which needs certain finite numbers, does not do that.

    A kernel that clamps scores does both: it turns NaN into a number, and makes a large score too small. So one row
    with two large scores is run, 2^16 and 2^17 before sm_scale. If ``other`` shows there, it may be such a clamp.
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
    """Whether two bugs that need lengths or numbers alone are not found by a tensor which both make wrong.

    Other lengths or numbers may fix any small case, so that a common fix does not make them duplicates.
    """
    found_by = {one.failure.finding.tensor, other.failure.finding.tensor}
    telling = any(need.is_telling for bug in (one, other) for need in bug.needs)
    return not telling and "" not in found_by and found_by.isdisjoint({*one.tensors} & {*other.tensors})


def _begins_like(one: Bug, other: Bug) -> bool:
    """Whether ``one`` may be a second trigger of ``other``, which needs lengths alone.

    ``one`` has further conditions, its tensors are among those of ``other``, and both show from the same length on.
    Example: ``other`` holds with 64 keys and fails with 65; ``one`` needs causal too, holds with 60 and fails with 70.
    """
    begins = ({need.name: need.begins for need in bug.needs} for bug in (one, other))
    mine, others = begins
    if not others or not others.keys() < mine.keys() or not {*one.tensors} <= {*other.tensors}:
        return False
    pairs = ((mine[name], begin) for name, begin in others.items())
    return all(own and begin and own[0] <= begin[0] < begin[1] <= own[1] for own, begin in pairs)


def _is_found_beside(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether ``one`` is really ``other``, first noticed in tensors that ``other`` was not known to make wrong.

    All of these must be true:

    1. ``one`` was found while tensors of ``other`` were not judged.
    2. ``one`` has all conditions of ``other``, and changing these fixes it.
    3. Without the further conditions of ``one``, ``other`` still shows.
    4. The tensors of ``one`` may be wrong there too: ``other`` makes one of them wrong elsewhere, or they are wrong
       with normal numbers in more rows, or all of out is NaN, so that no gradient can be judged.
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
    """Whether ``one`` (no condition but dtype) already explains the smallest case of ``other``.

    1. ``one`` shows in every ordinary case, and makes the tensor wrong by which ``other`` was found. If both are
       rounding errors, it does. If ``other`` has a condition besides lengths, numbers and dtype, it does not. Else, if
       ``one`` is a rounding error, normal numbers must leave no more than a rounding error of ``other``.
    2. Both are rounding errors, and ``one`` needs a dtype. It does if changing that fixes the case.
    """
    f = other.failure
    are_roundings = is_small(one.failure.finding) and is_small(f.finding)
    if one.is_everywhere and f.finding.tensor in one.tensors and one.is_met(f.case):
        # In a small case lengths and numbers may matter by chance; where errors are small, any field may.
        if are_roundings or any(need.is_telling for need in other.needs):
            return are_roundings
        # A rounding error is large if few numbers are not 0. Normal numbers make it small.
        ordinary = run(f.law, with_no_more_than(SIMPLEST, f.case), f.ignored)
        return not is_small(one.failure.finding) or ordinary is None or is_small(ordinary)
    # In other dtypes the same rounding may stay below its bound with normal numbers. If no ordinary case shows
    # ``other`` and a less precise design explains it, it is such a rounding. Else it may be any bug of small errors.
    is_imprecise = f.finding.explained_by and not other.severity.shown
    if not are_roundings or not one.needs or not (one.is_met(f.case) or is_imprecise):
        return False
    needs = tuple(replace(x, holds=tuple(y for y in x.holds if y != f.case.dtype)) for x in one.needs)
    return _is_cured_as(other, replace(one, needs=needs), run, capabilities)


def _rounds_also(one: Bug, other: Bug) -> bool:
    """Whether ``other`` shows the ends of the range of a format to which ``one`` rounds normal numbers.

    Example: ``one`` rounds the weights to float16 in most ordinary cases; ``other`` turns a weight of 2^-30 into 0.
    Most cases suffice, since it depends on the numbers whether a rounding error exceeds its bound.
    """
    s = one.severity
    is_usual = one.needs_no_more_than_dtype and not one.needs_own_numbers and 2 * s.shown > s.tried >= ENOUGH
    if not (is_usual and is_small(one.failure.finding)):
        return False
    is_of_range = _is_of_range(other) or (_is_of_float16(one) and _is_overflow(other))
    return is_of_range and {*other.tensors} <= one.may_spoil


def _is_of_range(bug: Bug) -> bool:
    """Whether a bug shows only for numbers at the ends of a format's range: large, tiny, or lost by being set to 0.

    Such a format rounds normal numbers as well. Weights are tiny with any sm_scale above the default, whatever the
    lengths are, unless there is one key, whose weight is 1.
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
    """Whether an error is no larger than a rounding to float16, the only format in kernels with a narrow range."""
    return float(bug.failure.finding.relative or 0.0) <= OF_FLOAT16


def _is_overflow(bug: Bug) -> bool:
    """Whether only large numbers of v and dout make gradients NaN or infinite, as their products do in float16.

    A bug that needs large scores is no overflow of this kind: other mistakes make NaN of large scores too.
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
    """Whether changes that fix ``other`` fix the smallest case of ``one``.

    1. All conditions of ``other`` that distinguish bugs must fix it, such as causal and group; a condition is left out
       if its change brings in a bug of ``others``.
    2. If there is no such condition, any of its lengths, numbers or dtypes is enough.
    3. If no condition of ``one`` is known, the confirmed ones of ``other`` must fix it, or all of rule 1 if none is.
    4. If no condition of ``other`` is known, kind and tensor of the failure decide.
    """
    f = one.failure

    def brings_in_another(need: Condition) -> bool:
        changed = list(counterfactuals(need, f.case, capabilities))
        absent = (x for x in others if x.could_break(f.finding) and not x.is_met(f.case))
        return bool(changed) and any(all(map(x.is_met, changed)) for x in absent)

    if not other.needs:  # no known condition; tensors that it is not known to make wrong may be another bug's
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
    """Return a condition of another bug in the terms of this one: a large sm_scale becomes this bug's large scores."""
    if not _is_large_scale(need):
        return need
    return next((mine for mine in bug.needs if mine.name == SCORES), need)


def _is_large_scale(need: Condition) -> bool:
    """Whether a condition is an sm_scale larger than every scale that holds: it matters by making large scores."""
    held = need.holds if need.name == "sm_scale" else ()
    return _is_scale_above(max((abs(x or 0.0) for x in held), default=0.0), need)


def _is_scale_above(least: float, need: Condition) -> bool:
    """Whether a condition is an sm_scale of a size above ``least``, such as -3.0 above 1.0."""
    return need.name == "sm_scale" and abs(need.fails[0] or 0.0) > least


def _shows(bug: Bug, run: Try, case: Case) -> bool:
    """Whether a case shows a bug again: by its law, in its tensors, and not finite if the bug made NaN or infinity."""
    finding, mine = run(bug.failure.law, case, frozenset()), bug.failure.finding
    if finding is None or not bug.could_break(finding) or leaves_roundings(mine, finding):
        return False
    if finding.explained_by and not (mine.explained_by or is_small(mine)):
        return False  # the error left is that of a less precise design, which may be another bug
    return mine.kind != "nonfinite" or finding.kind == mine.kind
