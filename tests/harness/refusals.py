"""Complaints about kernels that refuse or cannot run too much of what they claim, with claims that would be true."""

from collections import Counter
from collections.abc import Iterable, Mapping
from textwrap import shorten

from kernels.contract import Capabilities
from strategies.case import Case
from tests.harness.narrow import MOST_LOST, narrower, narrowing
from tests.harness.tally import Tally

MOST_REFUSED = 0.9
"""A kernel that may refuse cases still fails if it refuses more than this share of those of one law and dtype."""

MOST_ASKED = 300
"""About so many cases are asked which claims would exclude them."""

MOST_QUOTED = 3
"""The number of different reasons that are quoted."""

LONGEST_QUOTE = 200
"""The number of characters that are quoted of a reason: PyTorch says of full memory what each process has taken."""

CLAIM_LESS = "claim less with --claims, or mend the kernel"

Item = tuple[str, str]
"""A law and a dtype."""


def is_mostly_refused(tally: Tally) -> bool:
    """Whether more than ``MOST_REFUSED`` of the cases that the kernel could be asked were refused.

    Of a kernel that answers some cases, only those count that were drawn from all that it claims.
    """
    if not tally.examples:
        return tally.refusals > 0
    refused, asked = _of_all_claimed(tally)
    return refused > MOST_REFUSED * asked


def _of_all_claimed(tally: Tally) -> tuple[int, int]:
    """Return how many of the cases that were drawn from all that is claimed were refused, and how many these are."""
    return tally.refusals - tally.refused_within, tally.examples + tally.refusals - tally.within


def was_not_run(tally: Tally) -> bool:
    """Whether there were cases but none of them could be run on this machine."""
    return tally.skipped > 0 and tally.examples + tally.refusals == 0


def complaint(kernel: str, tallies: Mapping[Item, Tally], capabilities: Capabilities) -> str | None:
    """Say in one line why a run fails although no law is broken; None if it does not fail.

    The kernel refuses everything, or is too slow for a run as short as this, or none of its cases could be run here, or
    it refuses nearly all cases of some law and dtype.
    """
    total = merged(tallies.values())
    if was_not_run(total):
        return (
            f"{kernel}: none of its {total.skipped} cases could be run here ({_quoted(total.skip_reasons)})"
        )
    if total.cut_off and not total.examples + total.refusals:
        return f"{kernel}: none of its cases came to its end in time: it took {total.slowest:.0f} s and was cut off"
    if total.refusals and not total.examples:
        return f"{kernel}: refused all {total.refusals} cases that it claims ({_quoted(total.reasons)}); {CLAIM_LESS}"
    refusing = {item: tally for item, tally in tallies.items() if is_mostly_refused(tally)}
    if not refusing:
        return None
    some = merged(refusing.values())
    claims = _truer_claims(tallies, refusing, capabilities)
    advice = f"claim less: {_options(claims)}" if claims else CLAIM_LESS
    refused, asked = _of_all_claimed(some)
    return (
        f"{kernel}: refused {refused} of {asked} cases that it claims under "
        f"{_names(refusing)} ({_quoted(some.reasons)}); {advice}"
    )


def drawn_within(kernel: str, tallies: Mapping[Item, Tally], capabilities: Capabilities) -> str | None:
    """Say in one line that cases were drawn from less than the kernel claims, and from what; None if none were.

    A kernel of which there is a ``complaint`` is not told of twice.
    """
    total = merged(tallies.values())
    if not total.within or complaint(kernel, tallies, capabilities):
        return None
    refused, asked = _of_all_claimed(total)
    some, others = map(_spread, (total.refused_cases, total.answered_cases))
    claims = [claim for claim, _ in narrowing(some, others, capabilities)]
    advice = f"; most of them are not claimed by {_options(claims)}" if claims else ""
    return (
        f"{kernel}: refused {refused} of {asked} cases that it claims ({_quoted(total.reasons)}), so that "
        f"{total.within} others were drawn from what it seems to answer{advice}"
    )


def _spread(cases: Iterable[Case]) -> list[Case]:
    """Return about ``MOST_ASKED`` of the cases, evenly spread over them, since those of one law stand together."""
    listed = list(cases)
    return listed[:: max(1, len(listed) // MOST_ASKED)]


def _options(claims: Iterable[str]) -> str:
    return " ".join(f"--claims {claim}" for claim in claims)


def _truer_claims(
    tallies: Mapping[Item, Tally], refusing: Mapping[Item, Tally], capabilities: Capabilities
) -> tuple[str, ...]:
    """Return claims that exclude what is refused, or most of it: no gradients if all else is answered, or a kind."""
    laws = {law for law, _ in refusing}
    if "backward" in laws and any(law == "forward" for law, _ in tallies) and "forward" not in laws:
        return ("backward=false",)
    answered = list(merged(tallies.values()).answered_cases)
    refused = list(merged(refusing.values()).refused_cases)
    found = [*narrowing(refused, answered, capabilities)]
    claims, excluded = tuple(claim for claim, _ in found), sum(number for _, number in found)
    if excluded > MOST_REFUSED * len(refused):
        return claims
    if claim := narrower(refused, answered, capabilities):
        return (claim,)
    return claims if excluded > MOST_LOST * len(refused) else ()


def merged(tallies: Iterable[Tally]) -> Tally:
    """Return one tally of them all."""
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    return total


def _quoted(reasons: Counter[str]) -> str:
    """Quote what was said most often, the most frequent reasons first, each in one line that is not long."""
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
