"""Bugs that have a certificate: how one is asked for, and which failures the certificates of known bugs explain."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from reference.alternatives import named
from strategies.case import Case
from strategies.features import LENGTHS, NAN, SCORES, value_of
from tests.harness.bugs.attribution import FailingExample
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.failure import Failure
from tests.harness.bugs.restatement import restate_by_basic_law
from tests.harness.certificates.probes import ADDED, further, probes
from tests.harness.law import law_named
from tests.harness.running.child import ChildDied, DeviceLost
from tests.harness.running.runs import Runs, Try
from tests.harness.symptoms import wrong_tensors
from tests.harness.verdict import NUMBERS

CERTIFICATE_SECONDS = 12.0
"""Seconds to find out what a kernel computes instead."""
FEW = 2
"""What is left of a failure has so many times fewer wrong elements at least."""
FIXED = ("causal", "group", "heads_kv", "batch", "sm_scale", *LENGTHS, *ADDED)
"""Fields that a last search for a certificate leaves as they are in the failing case, or near that."""


def certified(failure: Failure, runs: Runs, needs: Collection[str], seconds: float) -> Failure:
    """Return a failure with its certificate, if calls show what the kernel computes or reads instead.

    Where it is NaN that comes from memory around an input, the certificate says so. Otherwise a failure that is judged
    against other certificates gets what is not in these. Calls of all kinds are asked first, with large scores if the
    bug needs some. If they give no certificate, calls are asked that have what it ``needs``, by names of fields, and
    then those with the rest as it is in the failing case.
    Calls with sequences of different lengths are not asked: a certificate of such a failure is told if it explains it.
    """
    case, capabilities = failure.case, runs.claims_of(failure.law)
    if outside := runs.read_outside(failure.law, case, failure.finding):
        what = f"memory is read that lies {' and '.join(outside)}"
        return replace(failure, finding=replace(failure.finding, certificate=what, outside=outside))
    is_of_lengths = case.ragged != "none"
    is_asked = law_named(failure.law).shares_cases or is_of_lengths
    if failure.finding.kind not in NUMBERS or not is_asked:
        return failure
    asked: list[list[Case]] = []
    for fixed in ({*needs} & {SCORES}, {*needs}, {*needs, *FIXED}):
        asked.append([case, *probes(case, capabilities, fixed)])
        if asked[-1] in asked[:-1]:
            continue
        if (share := runs.clock.most_of_it(seconds / 2)) <= 0:
            break
        with suppress(ChildDied, DeviceLost):
            more = list(further(case, capabilities, fixed))
            tensor = failure.finding.tensor
            words, alternatives = runs.certificate(failure, tensor, asked[-1], more, share)
            if is_of_lengths and words:
                known = (*failure.alternatives, *alternatives)
                words *= runs.holds_as(failure.law, case, failure.ignored, known)
            if words:
                told: dict[str, Any] = {
                    "certificate": words,
                    "explained_by": (),
                    "likely": (),
                    "of_some": len(asked) > 1,
                }
                return replace(failure, finding=replace(failure.finding, **told, alternatives=alternatives))
        if share < seconds / 2:
            break  # the rest of the time is for a smaller case
    return failure


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

    That is a failure of fewer tensors, or of few of the elements that were wrong, and says so (``alternatives``). The
    failure is returned as it is if the certificates explain no part of it, and in a case with NaN or infinity in an
    input, since a certificate is of finite numbers. Raises OutOfTime.
    """
    exact = [bug for bug in known if bug.is_certified_exactly and not _may_have_other_sizes(bug, broken.case)]
    alternatives = tuple(x for bug in exact for x in bug.failure.finding.alternatives)
    whole = broken.finding
    is_asked = whole.kind in NUMBERS and law_named(broken.law).is_basic and not value_of(broken.case, NAN)
    if not alternatives or not is_asked:
        return broken
    with runs.assuming(alternatives):
        rest = runs.judged(broken.law, broken.case, broken.ignored, explained=True)
    if rest is None or rest.kind not in NUMBERS:
        return broken
    of_fewer = wrong_tensors(rest) < wrong_tensors(whole)
    if of_fewer or (rest.tensor == whole.tensor and rest.wrong * FEW <= whole.wrong):
        return replace(broken, finding=rest, alternatives=alternatives)
    return broken


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
        is_asked = wrong <= _concerned(bug) and _may_have_other_sizes(bug, broken.case)
        for sized in _of_other_sizes(bug) if is_asked else ():
            if runs.holds_as(broken.law, broken.case, broken.ignored, sized):
                return [bug]
    return []


def _concerned(bug: Bug) -> set[str]:
    """Return the tensors that a bug's certificate is about: it explains no other tensor, whatever its sizes are."""
    return {name for _, tensors, _ in map(json.loads, bug.failure.finding.alternatives) for name in tensors}


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
