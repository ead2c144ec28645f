"""Explain a new failure by known bugs: one explains it if changing any field in the bug's conditions fixes it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from kernels.contract import OUTPUTS, Capabilities
from strategies.case import Case
from strategies.features import (
    BLIND,
    LENGTHS,
    NAN,
    SCORES,
    SEEN,
    VALUES_OF,
    value_of,
    with_no_more_than,
    with_normal_numbers,
    with_value,
    with_zeros,
)
from tests.harness.bugs.bug import Bug, Condition, with_tensors
from tests.harness.bugs.counterfactuals import counterfactuals, is_needed, is_present
from tests.harness.bugs.dense import (
    brought_in,
    leaves_out_right,
    symptoms_apart_from_forward,
    symptoms_on_dense_case,
)
from tests.harness.law import law_named
from tests.harness.running.runs import Try
from tests.harness.symptoms import are_kindred, leaves_roundings, wrong_tensors
from tests.harness.verdict import NUMBERS, Finding

MOST_CHANGES = 4
"""How many changed cases may start the list of known bugs afresh. After them, each bug left is tried once."""
OTHER_NUMBERS = 8
"""How many further seeds are tried to see whether a tensor is wrong that may be right by chance with one seed."""


@dataclass(frozen=True)
class FailingExample:
    """A law that fails on a case. The tensors in ``ignored`` were not judged.

    ``sizes`` are the sizes, options and layouts of calls that differ from those of the case: see ``Trial.sizes``.
    ``is_alone`` says that the case was run in a process of its own, so that it owes nothing to calls of other cases.
    ``alternatives`` are what known bugs have the kernel compute, against which it was judged, as in ``Run``.
    """

    law: str
    case: Case
    finding: Finding
    ignored: frozenset[str] = frozenset()
    sizes: tuple[Mapping[str, Any], ...] = ()
    is_alone: bool = False
    alternatives: tuple[str, ...] = ()


def of_each_kind(waiting: Sequence[FailingExample]) -> list[FailingExample]:
    """Return one failure, the last, of each tensor and kind of error; failures that agree in these may be one bug."""
    return list({broken.finding.symptom: broken for broken in waiting}.values())


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
    5. No change is made where NaN of an input is lost in a tensor that depends on unwritten memory by the bug: what is
       lost there follows from what lies in that memory, also in cases whose finite numbers come out right.
    """
    outcome, remembered = Outcome(broken), cache(run)
    # A bug with more conditions is more specific, so it is tried first.
    left, passed = sorted(bugs, key=lambda bug: -len(bug.needs)), list[Bug]()
    visited = {broken.case}
    while left and outcome.rest is not None:
        bug, rest = left.pop(0), outcome.rest
        cured = _Cured(bug.leaves_unwritten(rest.finding, rest.case))
        spoiling = _spoiling(bug, rest, remembered)
        if not cured.is_explained and _is_suspect(spoiling, rest, remembered, capabilities):
            cured = _without(_in_law(rest.law, spoiling), rest, run, capabilities)
        if cured.is_explained:
            beside = _beside(spoiling, rest, run)
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


def _spoiling(bug: Bug, broken: FailingExample, run: Try) -> Bug:
    """Return the bug with the gradients that differ between two calls because it makes out wrong in one of them.

    A law that compares calls compares gradients that follow from the out of each. Example: the weights of the first
    sequence are used in all, so that dq of the second one differs from that of a call for it alone. The bug has to show
    in the case by its own law.
    """
    wrong = wrong_tensors(broken.finding)
    may_be = bool(law_named(broken.law).compares) and "out" in bug.tensors and wrong.isdisjoint(bug.tensors)
    if not (may_be and wrong <= bug.may_spoil and _is_shown_in([broken.case], bug, bug.failure.law, run)):
        return bug
    return with_tensors(bug, wrong)


def _is_suspect(bug: Bug, broken: FailingExample, run: Try, capabilities: Capabilities) -> bool:
    """Whether a bug may be to blame for a failure, before any of its conditions is changed.

    It may not if

    1. the law's calls can't have what the bug needs, as where only a law with tables of angles shows it;
    2. kind or tensors differ: a bug of dk does not explain a wrong dv (but see ``_spoiling``);
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
    if "scores" not in law_named(broken.law).sets and is_of_other_scores(bug, broken.law, broken.case, run):
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


def is_of_other_scores(bug: Bug, law: str, case: Case, run: Try) -> bool:
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
