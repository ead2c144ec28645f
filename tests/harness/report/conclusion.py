"""The bugs of a whole run, collected from all processes: each once, the worst first, with claims that would be true."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from shlex import quote

from kernels.contract.parsing import parse_claims
from strategies.case import Case
from tests.harness.bugs.bug import Bug, Occurrences, with_tensors
from tests.harness.bugs.duplicates import OF_RECORDS
from tests.harness.bugs.failure import OF_MEMORY, symptom
from tests.harness.bugs.suggested_claims import OF_ANSWERS, excluding, failing_under, spoils
from tests.harness.clock import BudgetSpent
from tests.harness.report.folder import shown_in
from tests.harness.report.wording import severity, told
from tests.harness.running.runs import Runs
from tests.harness.verdict import Finding

FEWEST_DRAWN = 3
"""A claim is offered if this many drawn failing cases support it. Cases of one shrinking are too much alike."""

CASE = "smallest"
"""The label of the smallest case."""
OFFER = "or claim"
"""The label of claims under which the kernel would be right."""


@dataclass(frozen=True)
class DistinctBug:
    """A bug of a run, reported once.

    Attributes:
        bug: the bug, with the tensors of all its duplicates.
        seen: the failing examples of the bug and of its duplicates.
        offers: lines that offer claims which would be true of the kernel.
        twins: the report folders of duplicates.
        reasons: lines that say of each duplicate why it is one.
    """

    bug: Bug
    seen: Occurrences
    offers: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the last lines of the bug's report: how bad it is, where it showed, which claims would be true."""
        return [*(text for _, text in told(self.bug, self.seen)), *self.reasons, *self.offers]

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield a label and a text for each known fact of the bug, except the path of its report."""
        failure = self.bug.failure
        if failure.finding.certificate:
            yield "instead", failure.finding.certificate
        yield "claim", " ".join(failure.finding.claim.split())
        if failure.finding.rate:
            yield "rate", "; ".join((shown_in(failure.finding), *failure.explanation.sentences))
        yield from _numbers(failure.finding)
        yield from told(self.bug, self.seen)
        if OF_MEMORY in failure.explanation.sentences:
            yield "memory", OF_MEMORY
        if failure.explanation.causes:
            yield "points to", failure.explanation.points_to
        yield CASE, repr(failure.case)
        if self.offers:
            yield OFFER, "; ".join(self.offers)


def merged(
    bugs: Mapping[str, Bug],
    seen: Mapping[str, Occurrences],
    why_one: Callable[[Bug, Bug], str] | None = None,
) -> list[DistinctBug]:
    """Return each bug once, the worst first. Duplicates exist because two processes may find a bug at the same time.

    ``why_one`` says why two bugs of one kernel are duplicates, or "" if they are distinct; without it, their records
    decide. It may run out of time, so the pairs come first that make a common tensor wrong. Among these, pairs come
    first with a bug of few failing examples, of which little is known.
    """
    in_order = sorted(bugs, key=lambda name: severity(bugs[name]))
    groups = {name: [name] for name in in_order}
    reasons: dict[str, list[str]] = {name: [] for name in in_order}

    def order(pair: tuple[str, str]) -> tuple[bool, int]:
        wrong = ({*bugs[name].tensors} for name in pair)
        shown = min(seen.get(bugs[name].key, Occurrences()).total for name in pair)
        return set.isdisjoint(*wrong), shown

    for one, other in sorted(combinations(in_order, 2), key=order):
        mine, theirs = groups[one], groups[other]
        if mine is not theirs and (why := _why_one(bugs[one], bugs[other], why_one)):
            twin = bugs[other].failure
            reasons[one].append(f"found again: {symptom(twin)} ({twin.law}, {twin.case.dtype}), as {why}")
            mine += theirs
            groups.update(dict.fromkeys(theirs, mine))
    distinct = {id(groups[name]): groups[name] for name in in_order}.values()
    return [
        replace(
            together([bugs[name] for name in in_order if name in group], seen),
            reasons=tuple(line for name in in_order if name in group for line in reasons[name]),
        )
        for group in distinct
    ]


def _why_one(one: Bug, other: Bug, why_one: Callable[[Bug, Bug], str] | None) -> str:
    """Return why two bugs are duplicates, by ``why_one``, or by their records if there is none; "" if they are not."""
    if one.failure.kernel != other.failure.kernel:
        return ""
    return why_one(one, other) if why_one else OF_RECORDS if one.is_like(other) else ""


def together(group: Sequence[Bug], seen: Mapping[str, Occurrences]) -> DistinctBug:
    """Merge duplicates: one bug gets the tensors and failing examples of all, and the others are its twins.

    It is the first of those of which it is known what the kernel computes instead, or else the first of all.
    """
    everything = Occurrences()
    for bug in group:
        everything.merge(seen.get(bug.key, Occurrences()))
    told = next((bug for bug in group if bug.failure.finding.certificate), group[0])
    whole = with_tensors(told, (tensor for bug in group for tensor in bug.tensors))
    return DistinctBug(whole, everything, twins=tuple(bug.key for bug in group if bug is not told))


def with_offers(
    concluded: DistinctBug, runs: Runs, answered: Sequence[Case], spend: Callable[[], None]
) -> DistinctBug:
    """Return the bug with the offered claims that would be true of all failing cases of the run.

    If none would be, another claim is looked for that excludes all failing cases, and leaves enough of the cases that
    the kernel has ``answered``. ``spend`` may raise BudgetSpent, which ends the runs.
    """
    bug, seen = concluded.bug, concluded.seen
    failing = [case for _, case in (*seen.cases, *seen.shrunk)]
    for claims in (bug.offers, excluding(bug.needs, failing, answered, runs.info.capabilities)):
        if lines := tuple(line for claim in claims for line in _offer(claim, seen, answered, runs, spend)):
            return replace(concluded, offers=lines)
    return concluded


def _offer(
    claim: str, seen: Occurrences, answered: Sequence[Case], runs: Runs, spend: Callable[[], None]
) -> Iterator[str]:
    failing, drawn = [*seen.cases, *seen.shrunk], len(seen.cases)
    if drawn < FEWEST_DRAWN:
        return
    if claim not in OF_ANSWERS:
        narrow = parse_claims([claim], runs.info.capabilities)
        if not any(narrow.admits(case) for _, case in failing):
            yield f"--claims {quote(claim)}: all {drawn} failing cases are excluded"
        return
    held = 0
    with suppress(BudgetSpent):
        for ran in failing:
            if failing_under(claim, [ran], runs, spend):
                return
            held += 1
        if spoils(claim, answered, runs, spend):
            return
    held = min(held, drawn)
    tried = "" if held == drawn else f" of {drawn} that were tried"
    if held >= FEWEST_DRAWN:
        yield f"--claims {claim}: all {held} failing cases{tried} hold"


def _numbers(f: Finding) -> Iterator[tuple[str, str]]:
    """Yield facts about the worst element or, if no number is wrong, the place or last line of the failure's detail."""
    if f.actual is not None:
        place = f"{f.expression or f.tensor}[{', '.join(map(str, f.index))}]"
        yield "where", f"{place}: expected {f.expected}, actual {f.actual}"
        counts = {"NaN": f.nan, "+inf": f.posinf, "-inf": f.neginf}
        special = [f"{count} {what}" for what, count in counts.items() if count]
        wrong = f"{f.wrong} of {f.total} elements are wrong"
        yield "error", "; ".join([f"{_rounded(f.ratio)} times the bound", wrong, *special])
    elif f.detail.strip():
        yield "where", f.place or f.detail.strip().splitlines()[-1].strip()


def _rounded(ratio: float | str | None) -> str:
    return f"{ratio:.4g}" if isinstance(ratio, float) else str(ratio)


def replaced(text: str, concluded: Iterable[DistinctBug]) -> str:
    """Return the text with the report folder of each duplicate replaced by that of the reported bug."""
    for one in concluded:
        for twin in one.twins:
            text = text.replace(twin, one.bug.key)
    return text
