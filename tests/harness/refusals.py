"""Complaints about kernels that refuse or cannot run too much of what they claim, with claims that would be true."""

from collections.abc import Iterable, Mapping

from kernels.contract import Capabilities
from tests.harness.narrow import narrower, narrowing
from tests.harness.tally import Tally

MOST_REFUSED = 0.9
"""A kernel that may refuse cases still fails if it refuses more than this share of those of one law and dtype."""

MOST_QUOTED = 3
"""The number of different reasons that are quoted."""

CLAIM_LESS = "claim less with --claims, or mend the kernel"

Item = tuple[str, str]
"""A law and a dtype."""


def is_mostly_refused(tally: Tally) -> bool:
    """Whether more than ``MOST_REFUSED`` of the cases that the kernel could be asked were refused."""
    return tally.refusals > MOST_REFUSED * (tally.examples + tally.refusals)


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
        return f"{kernel}: none of its {total.skipped} cases could be run here ({_reasons(total)})"
    if total.cut_off and not total.examples + total.refusals:
        return f"{kernel}: none of its cases came to its end in time: it took {total.slowest:.0f} s and was cut off"
    if total.refusals and not total.examples:
        return (
            f"{kernel}: refused all {total.refusals} cases that it claims ({_reasons(total)}); {CLAIM_LESS}"
        )
    refusing = {item: tally for item, tally in tallies.items() if is_mostly_refused(tally)}
    if not refusing:
        return None
    some = merged(refusing.values())
    claims = _truer_claims(tallies, refusing, capabilities)
    advice = f"claim less: {' '.join(f'--claims {claim}' for claim in claims)}" if claims else CLAIM_LESS
    return (
        f"{kernel}: refused {some.refusals} of {some.refusals + some.examples} cases that it claims under "
        f"{_names(refusing)} ({_reasons(some)}); {advice}"
    )


def _truer_claims(
    tallies: Mapping[Item, Tally], refusing: Mapping[Item, Tally], capabilities: Capabilities
) -> tuple[str, ...]:
    """Return claims that exclude what is refused: no gradients if all else is answered, or a kind of case."""
    laws = {law for law, _ in refusing}
    if "backward" in laws and any(law == "forward" for law, _ in tallies) and "forward" not in laws:
        return ("backward=false",)
    answered = list(merged(tallies.values()).answered_cases)
    refused = list(merged(refusing.values()).refused_cases)
    claim = narrower(refused, answered, capabilities)
    return (claim,) if claim else narrowing(refused, answered, capabilities)


def merged(tallies: Iterable[Tally]) -> Tally:
    """Return one tally of them all."""
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    return total


def _reasons(tally: Tally) -> str:
    """Quote what the kernel said, the most frequent reasons first, each in one line."""
    ordered = sorted(tally.reasons, key=lambda reason: -tally.reasons[reason])[:MOST_QUOTED]
    return "; ".join(" ".join(reason.split()) for reason in ordered) or "no reason given"


def _names(items: Iterable[Item]) -> str:
    """Name each law with its dtypes, such as ``forward (float16, float32)``."""
    dtypes: dict[str, list[str]] = {}
    for law, dtype in sorted(items):
        dtypes.setdefault(law, []).append(dtype)
    return ", ".join(f"{law} ({', '.join(names)})" for law, names in dtypes.items())
