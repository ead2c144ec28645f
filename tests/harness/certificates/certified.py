"""Bugs that have a certificate: how one is asked for, and which failures the certificates of known bugs explain."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from reference.alternatives import named
from reference.alternatives.declaration import BACKWARD, OUT_AND_LSE
from strategies.case import LAYOUT_FIELDS, TENSORS, Case
from strategies.features import LENGTHS, NAN, SCORES, value_of
from tests.harness.bugs.attribution import FailingExample
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.failure import Failure
from tests.harness.certificates.probes import ADDED, further, probes
from tests.harness.law import law_named
from tests.harness.running.child import ChildDied, DeviceLost
from tests.harness.running.runs import Runs
from tests.harness.symptoms import wrong_tensors
from tests.harness.verdict import NUMBERS, Finding

CERTIFICATE_SECONDS = 12.0
"""Seconds of the processor to find out what a kernel computes instead, and as many to call it."""
MOST_WRITTEN = 12
"""Of how many further calls it is asked what a kernel writes over an input."""
NEARBY = ("causal", "group", "heads_kv", "batch", "sm_scale", *LENGTHS, *LAYOUT_FIELDS, *ADDED)
"""Fields that calls near the failing case have as it has them, or nearly so."""


def certified(
    failure: Failure, runs: Runs, needs: Collection[str], seconds: float, known: Sequence[Bug] = ()
) -> Failure:
    """Return a failure with its certificate, if calls show what the kernel computes or reads instead.

    Where it is NaN that comes from memory around an input, or an input that is written to, the certificate says so.
    Otherwise calls near the failing one are asked first, which have what it ``needs``, by names of fields, and the rest
    as it is there; then calls that have what it needs, and calls of all kinds, with large scores if it needs some. All
    are judged against the exact certificates of ``known`` bugs, so that the failure gets what is not in these.
    Calls with sequences of different lengths are not asked: a certificate of such a failure is told if it explains it.
    """
    case = failure.case
    if outside := runs.read_outside(failure.law, case, failure.finding):
        what = f"memory is read that lies {' and '.join(outside)}"
        return replace(failure, finding=replace(failure.finding, certificate=what, outside=outside))
    if failure.finding.kind == "memory" and failure.finding.tensor in TENSORS:
        cases = [case, *islice(probes(case, runs.claims_of(failure.law), needs), MOST_WRITTEN)]
        words = runs.written(failure, failure.finding.tensor, cases)
        return replace(failure, finding=replace(failure.finding, certificate=words))
    is_of_lengths = case.ragged != "none"
    is_asked = law_named(failure.law).shares_cases or is_of_lengths
    share = runs.clock.most_of_it(seconds)
    if failure.finding.kind not in NUMBERS or not is_asked or share <= 0:
        return failure
    taken = tuple(dict.fromkeys((*failure.alternatives, *exact_alternatives(known, case))))
    run, kinds = replace(failure, alternatives=taken), _kinds(failure, runs, needs)
    for asked in (kinds, kinds[:1]):  # calls near the failing one are asked alone if others end the process
        with suppress(ChildDied, DeviceLost):
            words, alternatives, of_some = runs.certificate(run, failure.finding.tensor, asked, share)
            break
    else:
        return failure
    explained = (*taken, *alternatives)
    if not words or (is_of_lengths and not runs.holds_as(failure.law, case, failure.ignored, explained)):
        return failure
    told: dict[str, Any] = {"certificate": words, "explained_by": (), "likely": (), "of_some": of_some}
    return replace(failure, finding=replace(failure.finding, **told, alternatives=alternatives))


def _kinds(failure: Failure, runs: Runs, needs: Collection[str]) -> list[tuple[list[Case], list[Case]]]:
    """Return the calls that a certificate is asked of, the narrowest kind first, each with its further ones."""
    case, capabilities = failure.case, runs.claims_of(failure.law)
    kinds: list[tuple[list[Case], list[Case]]] = []
    for fixed, nearby in (({*needs}, NEARBY), ({*needs}, ()), ({*needs} & {SCORES}, ())):
        cases = [*probes(case, capabilities, fixed, nearby)]
        if not any(cases == others for others, _ in kinds):
            kinds.append((cases, [*further(case, capabilities, fixed, nearby)]))
    (near, more), *others = kinds
    return [([case, *near], more), *others]


def exact_alternatives(known: Sequence[Bug], case: Case) -> tuple[str, ...]:
    """Return what a kernel computes in a case by the certificates of known bugs that are exact, and true of all calls.

    A certificate with sizes of tiles is left out in a case of another head_dim or dtype.
    """
    exact = (bug for bug in known if bug.is_certified_exactly and not _may_have_other_sizes(bug, case))
    return tuple(x for bug in exact for x in bug.failure.finding.alternatives)


def without_designs(broken: FailingExample, failure: Failure, runs: Runs) -> FailingExample:
    """Return a failing example without the designs that explain it, if what the kernel computes instead does.

    That lies within the bounds of full precision around its own values, while a less precise design allows for any
    error of some size. ``failure`` is that of the example.
    """
    if not broken.finding.explained_by:
        return broken
    return replace(broken, finding=certified(failure, runs, (), CERTIFICATE_SECONDS).finding)


def beside_certified(broken: FailingExample, known: Sequence[Bug], runs: Runs) -> FailingExample:
    """Return what is left of a failure once it is judged against what certified bugs have the kernel compute.

    That is another bug, and says so (``alternatives``). The failure is returned as it is if the certificates may be of
    other cases: if they make more wrong, or no tensor right and are of none that is left (``are_apart``).
    Raises OutOfTime.
    """
    alternatives, whole = certain_in(known, broken), broken.finding
    rest = left_by(broken, alternatives, runs) if alternatives else None
    if rest is None or rest.kind not in NUMBERS:
        return broken
    wrong, left = wrong_tensors(whole), wrong_tensors(rest)
    is_no_worse = left <= wrong and (rest.tensor != whole.tensor or rest.wrong <= whole.wrong)
    if left < wrong or (is_no_worse and are_apart(alternatives, left)):
        return replace(broken, finding=rest, alternatives=alternatives)
    return broken


def certain_in(known: Sequence[Bug], broken: FailingExample) -> tuple[str, ...]:
    """Return what a kernel is certain to compute in a failing case by certificates of known bugs; nothing if unknown.

    They tell nothing of laws that compare calls, nor of NaN or infinity in an input, as they are of finite numbers.
    """
    is_told = broken.finding.kind in NUMBERS and law_named(broken.law).is_basic
    return exact_alternatives(known, broken.case) if is_told and not value_of(broken.case, NAN) else ()


def left_by(broken: FailingExample, alternatives: tuple[str, ...], runs: Runs) -> Finding | None:
    """Return what is wrong in a failing case that is judged against alternatives, or None. Raises OutOfTime."""
    with runs.assuming(alternatives):
        return runs.judged(broken.law, broken.case, broken.ignored, explained=True)


def are_apart(alternatives: Collection[str], left: set[str]) -> bool:
    """Whether tensors that alternatives leave wrong are so because of another bug.

    They are if one of them is what the alternatives are about, or if these are about gradients and one is out or lse,
    which no gradient changes. Any other tensor may be wrong by the same bug, in a way that is not certified.
    """
    about = _concerned(alternatives)
    return not left.isdisjoint(about) or (about <= {*BACKWARD} and not left.isdisjoint(OUT_AND_LSE))


def explained_by(broken: FailingExample, known: Sequence[Bug], runs: Runs) -> list[Bug]:
    """Return the bugs whose certificates explain a failure, alone or all together; none if they do not.

    They do if the case holds, judged against what they say that the kernel computes, or if NaN comes from memory that
    they say it reads. Sizes of tiles are those of one head_dim and dtype: of another, other sizes are asked for.
    Raises OutOfTime.
    """
    if any(bug.failure.finding.outside for bug in known):
        outside = {*runs.read_outside(broken.law, broken.case, broken.finding)}
        if of_outside := [bug for bug in known if not outside.isdisjoint(bug.failure.finding.outside)]:
            return of_outside
    with_one = [bug for bug in known if bug.failure.finding.alternatives]
    if broken.finding.kind not in NUMBERS:
        return []
    for bugs in (*([bug] for bug in with_one), with_one):
        alternatives = tuple(x for bug in bugs for x in bug.failure.finding.alternatives)
        if bugs and runs.holds_as(broken.law, broken.case, broken.ignored, alternatives):
            return bugs
    wrong = wrong_tensors(broken.finding)
    for bug in with_one:
        about = _concerned(bug.failure.finding.alternatives)
        is_asked = wrong <= about and _may_have_other_sizes(bug, broken.case)
        for sized in _of_other_sizes(bug) if is_asked else ():
            if runs.holds_as(broken.law, broken.case, broken.ignored, sized):
                return [bug]
    return []


def _concerned(alternatives: Collection[str]) -> set[str]:
    """Return the tensors that a certificate is about: it explains no other tensor, whatever its sizes are."""
    return {name for _, tensors, _ in map(json.loads, alternatives) for name in tensors}


def _may_have_other_sizes(bug: Bug, case: Case) -> bool:
    """Whether a certificate names sizes, such as that of a tile, and the kernel may have other ones in this case.

    It may if head_dim or dtype is another than in the case that the certificate was found for.
    """
    own = bug.failure.case
    return (own.head_dim, own.dtype) != (case.head_dim, case.dtype) and any(_of_other_sizes(bug))


def _of_other_sizes(bug: Bug) -> Iterator[tuple[str, ...]]:
    """Yield the alternatives of a bug's certificate with other sizes of one of them."""
    records = bug.failure.finding.alternatives
    for at, told in enumerate(map(json.loads, records)):
        for other in named(told).of_other_sizes:
            yield *records[:at], json.dumps(other.record), *records[at + 1 :]
