"""What to say of a kernel that refuses much of what it claims: what refused cases have in common, and true claims."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import shorten

from kernels.contract import Capabilities, default_scale
from strategies.case import DECLARED, OPTIONS, SIMPLEST, Case
from tests.harness.running.tally import Tally

MOST_REFUSED = 0.9
"""A kernel that may refuse cases still fails if it refuses more than this share of those of one law and dtype."""

LEAST_REFUSED = 5
"""Fewer cases that are refused say nothing of a law: a kernel that answers half of what it claims refuses as many."""

MOST_ASKED = 300
"""About this many cases are tried to find the claims that would exclude them."""

MOST_QUOTED = 3
"""The number of different reasons that are quoted."""

LONGEST_QUOTE = 200
"""The number of characters that are quoted of a reason: PyTorch says of full memory what each process has taken."""

CLAIM_LESS = "claim less with --claims, or mend the kernel"

Item = tuple[str, str]
"""A law and a dtype."""


Claims = tuple[str, ...]

FEW = 0.05
"""Traits distinguish refused cases from answered ones if at most this share of the answered ones have them all."""

MOST = 3
"""The most traits that are reported together."""

OF_OPTIONS = ("batch", "heads_kv", "group", *(name for name in OPTIONS if name != "sm_scale"))
"""Fields that give a trait if they are not at their simplest value, such as grouped heads."""

NUMBERS = ("seqlen_q", "seqlen_k", "head_dim")
"""Fields that give a trait by their size, such as "seqlen_k above 512", or by what they are multiples of."""

MULTIPLES = (4, 8, 16, 32, 64, 128)
"""Even numbers, beside 2, of which lengths and head dims may have to be multiples."""


@dataclass(frozen=True)
class Seen:
    """Cases of a law that a kernel has refused, and cases that it has answered."""

    refused: tuple[Case, ...] = ()
    answered: tuple[Case, ...] = ()

    def __add__(self, other: "Seen") -> "Seen":
        """Return the cases of both, each once."""
        return Seen(
            tuple(dict.fromkeys((*self.refused, *other.refused))),
            tuple(dict.fromkeys((*self.answered, *other.answered))),
        )

    def within(self, claimed: Capabilities) -> "Seen":
        """Return the cases that are claimed."""
        return Seen(tuple(filter(claimed.admits, self.refused)), tuple(filter(claimed.admits, self.answered)))

    @property
    def asked(self) -> int:
        """Return the number of cases."""
        return len(self.refused) + len(self.answered)


@dataclass(frozen=True)
class Advice:
    """Claims that a kernel should have, if any were found: with them it ``answered`` this many of ``asked`` cases.

    ``seen`` are the cases from which claims were sought in vain.
    """

    claims: Claims = ()
    answered: int = 0
    asked: int = 0
    seen: Seen = Seen()


NO_ADVICE = Advice()


def is_mostly_refused(tally: Tally) -> bool:
    """Whether the kernel refused more than ``MOST_REFUSED`` of the cases that it was asked to run, and some of them.

    If it answers some cases, only those count that were drawn from all its claims, not from what it seems to answer.
    """
    if not tally.examples:
        return tally.refusals >= LEAST_REFUSED
    refused, asked = _of_all_claimed(tally)
    return refused > MOST_REFUSED * asked


def _of_all_claimed(tally: Tally) -> tuple[int, int]:
    """Return how many cases drawn from all of the kernel's claims were refused, and how many were drawn."""
    return tally.refusals - tally.refused_within, tally.examples + tally.refusals - tally.within


def was_not_run(tally: Tally) -> bool:
    """Whether there were cases but none of them could be run on this machine."""
    return tally.skipped > 0 and tally.examples + tally.refusals == 0


def complaint(kernel: str, tallies: Mapping[Item, Tally], advice: Advice = NO_ADVICE) -> str | None:
    """Say in one line why a run fails although no law is broken; None if it does not fail.

    1. None of the kernel's cases could be run here.
    2. None of its cases came to its end in time.
    3. It refuses all cases, however few, or nearly all cases of some law and dtype.

    ``advice`` are claims that were tried; without them the line says what refused cases have in common.
    """
    total = merged(tallies.values())
    if was_not_run(total):
        return (
            f"{kernel}: none of its {total.skipped} cases could be run here ({_quoted(total.skip_reasons)})"
        )
    if total.cut_off and not total.examples + total.refusals:
        return f"{kernel}: none of its cases came to its end in time: it took {total.slowest:.0f} s and was cut off"
    refusing = {item: tally for item, tally in tallies.items() if is_mostly_refused(tally)}
    if not refusing and (total.examples or not total.refusals):
        return None
    some = merged(refusing.values())
    told = _advised(advice) or "; ".join(filter(None, (_in_common(tallies, advice), CLAIM_LESS)))
    if not total.examples:
        return (
            f"{kernel}: refused all {total.refusals} cases that it claims ({_quoted(total.reasons)}); {told}"
        )
    refused, asked = _of_all_claimed(some)
    return (
        f"{kernel}: refused {refused} of {asked} cases that it claims under "
        f"{_names(refusing)} ({_quoted(some.reasons)}); {told}"
    )


def drawn_within(kernel: str, tallies: Mapping[Item, Tally], advice: Advice = NO_ADVICE) -> str | None:
    """Say in one line that cases were drawn from less than the kernel claims, and why; None if none were.

    It is None too if there is a ``complaint`` of the kernel, which says as much. ``advice`` is as in ``complaint``.
    """
    total = merged(tallies.values())
    if not total.within or complaint(kernel, tallies):
        return None
    refused, asked = _of_all_claimed(total)
    told = _advised(advice) or _in_common(tallies, advice)
    return (
        f"{kernel}: refused {refused} of {asked} cases that it claims ({_quoted(total.reasons)}), so that "
        f"{total.within} others were drawn from what it seems to answer{told and f'; {told}'}"
    )


def asked_about(tallies: Mapping[Item, Tally]) -> dict[str, Seen]:
    """Return the laws under which a kernel refuses so much that a line says so, each with some of its cases.

    These are the laws under which nearly all is refused or, if there are none, those with cases that were drawn from
    less than is claimed.
    """
    told = [item for item, tally in tallies.items() if is_mostly_refused(tally)]
    told = told or [item for item, tally in tallies.items() if tally.within]
    of_laws = {law: merged(x for item, x in tallies.items() if item[0] == law) for law, _ in told}
    return {
        law: Seen(_spread(tally.refused_cases), _spread(tally.answered_cases))
        for law, tally in of_laws.items()
    }


def _spread(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return about ``MOST_ASKED`` of the cases, evenly spread, since cases of one law stand together."""
    listed = tuple(cases)
    return listed[:: max(1, len(listed) // MOST_ASKED)]


def _advised(advice: Advice) -> str:
    """Say which claims to make and how many cases of them are answered; "" if there are none."""
    options = " ".join(f"--claims {claim}" for claim in advice.claims)
    tried = f"(tried: {advice.answered} of {advice.asked} cases are answered)"
    return f"claim less: {options} {tried}" if options else ""


def _in_common(tallies: Mapping[Item, Tally], advice: Advice) -> str:
    """Say what refused cases have in common that hardly any answered case has; "" if nothing is found.

    If claims were sought in vain, the cases are those of that search. Else they are those of ``forward``, if it is
    refused, since other laws make calls that differ from their case.
    """
    of_laws = asked_about(tallies)
    seen = (
        advice.seen if advice.seen.answered else of_laws.get("forward", next(iter(of_laws.values()), Seen()))
    )
    traits = alike(seen.refused, seen.answered)
    return f"all that were refused have in common: {', '.join(traits)}" if traits else ""


def merged(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of the tallies."""
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    return total


def _quoted(reasons: Counter[str]) -> str:
    """Quote the most frequent reasons, each shortened to one line."""
    quoted = (
        shorten(reason, LONGEST_QUOTE, placeholder=" ...") for reason, _ in reasons.most_common(MOST_QUOTED)
    )
    return "; ".join(quoted) or "no reason given"


def _names(items: Iterable[Item]) -> str:
    """Name each law with its dtypes, such as ``forward (float16, float32)``."""
    dtypes: dict[str, list[str]] = {}
    for law, dtype in sorted(items):
        dtypes.setdefault(law, []).append(dtype)
    return ", ".join(f"{law} ({', '.join(names)})" for law, names in dtypes.items())


@dataclass(frozen=True)
class Trait:
    """A property that a case has or lacks, in words."""

    text: str
    has: Callable[[Case], bool]


def alike(refused: Sequence[Case], answered: Sequence[Case]) -> list[str]:
    """Return the fewest traits that all refused cases have, and that hardly any answered case has together, in words.

    Example: "dtype float16" and "head_dim above 128". Empty if there are no such traits, or no answered cases.
    """
    if not refused or not answered:
        return []
    common = [trait for trait in traits(refused) if all(map(trait.has, refused))]
    told: list[str] = []
    left = list(answered)
    while len(left) > FEW * len(answered):
        having = {trait: list(filter(trait.has, left)) for trait in common}
        best = min(common, key=lambda trait: len(having[trait]), default=None)
        if best is None or len(having[best]) == len(left) or len(told) == MOST:
            return []
        told.append(best.text)
        left = having[best]
    return told


def traits(refused: Sequence[Case]) -> Iterator[Trait]:
    """Yield traits that all the refused cases may have, the simplest first."""
    yield Trait("dense calls", lambda case: case.ragged == "none")
    yield Trait("no causal mask", lambda case: not case.causal)
    for name in OF_OPTIONS:
        yield Trait(DECLARED[name]["called"], partial(_is_other, name))
    dtypes = {case.dtype for case in refused}
    yield Trait(f"dtype {' or '.join(sorted(dtypes))}", lambda case: case.dtype in dtypes)
    yield Trait("an sm_scale that is not positive", lambda case: case.scale <= 0)
    yield Trait("an sm_scale other than the default", lambda case: case.scale != default_scale(case.head_dim))
    yield Trait("tensors that are not contiguous", lambda case: {*case.layouts} != {"contiguous"})
    yield Trait("more queries than keys", lambda case: case.longer == "q")
    yield Trait("more keys than queries", lambda case: case.longer == "k")
    yield Trait("unequal lengths", lambda case: bool(case.longer))
    for name in NUMBERS:
        numbers = [getattr(case, name) for case in refused]
        yield Trait(f"{name} above {min(numbers) - 1}", partial(_is_within, name, min(numbers), math.inf))
        yield Trait(f"{name} below {max(numbers) + 1}", partial(_is_within, name, -math.inf, max(numbers)))
        yield Trait(f"odd {name}", partial(_is_no_multiple, name, 2))
        for number in MULTIPLES:
            yield Trait(f"{name} that is no multiple of {number}", partial(_is_no_multiple, name, number))


def _is_other(name: str, case: Case) -> bool:
    """Whether an option of the call, or a count, is not at its simplest value."""
    value: object = getattr(case, name)
    return value != SIMPLEST[name]


def _is_within(name: str, least: float, most: float, case: Case) -> bool:
    """Whether a field is at least ``least`` and at most ``most``."""
    return bool(least <= getattr(case, name) <= most)


def _is_no_multiple(name: str, number: int, case: Case) -> bool:
    """Whether a length or a head_dim is no multiple of a number."""
    return bool(getattr(case, name) % number)
