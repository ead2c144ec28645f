"""Find claims ``key=value`` that exclude some cases, such as those that a kernel refuses, and keep others."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kernels.claims import lesser, parse_claims
from kernels.contract import CLAIMS, LAYOUTS, Capabilities
from kernels.spelling import write_integers
from strategies.case import Case

MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
"""Numbers of which kernels may need lengths and head dimensions to be multiples."""

FEW_HEAD_DIMS = 8
"""Where no more head dims are claimed, each is drawn often enough to tell whether the kernel answers it."""

DENSE = ("contiguous", "bnhd", "packed")
"""Layouts without expanded, misaligned or huge strides."""

MOST_LOST = 0.5
"""A claim that excludes this share of the cases inside, or more, does not tell one kind of case from the other.

Claims that exclude no more than this share of the cases outside do not either.
"""


def narrower(outside: Sequence[Case], inside: Sequence[Case], capabilities: Capabilities) -> str | None:
    """Return the claim that excludes all cases of ``outside`` and as few as possible of those ``inside``.

    Returns None if no claim excludes all of ``outside`` and less than ``MOST_LOST`` of ``inside``. Cases that
    ``capabilities`` do not claim count as excluded already. Of claims that exclude equally many, the first counts.
    """
    claimed = [case for case in inside if capabilities.admits(case)]
    best, fewest = None, len(claimed) * MOST_LOST
    for claim in candidates(outside, claimed, capabilities):
        narrowed = parse_claims([claim], capabilities)
        if any(narrowed.admits(case) for case in outside):
            continue
        lost = sum(not narrowed.admits(case) for case in claimed)
        if lost < fewest:
            best, fewest = claim, lost
    return best


def narrowing(
    outside: Sequence[Case], inside: Sequence[Case], capabilities: Capabilities
) -> Iterator[tuple[str, int]]:
    """Yield claims that together exclude cases of ``outside``, and none of ``inside``. ``capabilities`` claim them all.

    Each claim comes with the number of cases that it excludes of those that the claims before it leave. It is the one
    that excludes most of these, the first of equal ones.
    """
    left = list(outside)
    while left and inside:
        admitted = {claim: _admits(claim, capabilities) for claim in candidates((), inside, capabilities)}
        remaining = {
            claim: list(filter(admits, left))
            for claim, admits in admitted.items()
            if all(map(admits, inside))
        }
        best = min(remaining, key=lambda claim: len(remaining[claim]), default=None)
        if best is None or len(remaining[best]) == len(left):
            return
        yield best, len(left) - len(remaining[best])
        left, capabilities = remaining[best], parse_claims([best], capabilities)


def _admits(claim: str, capabilities: Capabilities) -> Callable[[Case], bool]:
    """Return whether a case is still claimed with a narrower claim, of one that ``capabilities`` claim."""
    key = claim.partition("=")[0]
    return partial(CLAIMS[key].admits, getattr(parse_claims([claim], capabilities), key))


def candidates(outside: Sequence[Case], inside: Sequence[Case], capabilities: Capabilities) -> Iterator[str]:
    """Yield claims narrower than ``capabilities``, each a value for one key; those that exclude least come first."""
    c = capabilities
    less = {name: claim for name, claim in lesser(c).items() if name != "min_seqlen"}
    broad = less.pop("unequal_lengths", None)
    yield from less.values()
    yield from _min_seqlens(outside, inside, c.min_seqlen)
    yield from _layouts(inside, c.layouts)
    yield from _dtypes(outside, inside, c.dtypes)
    yield from _head_dims(outside, inside, c.head_dims)
    if broad is not None:
        yield broad
    yield from (f"seqlen_multiple={m}" for m in MULTIPLES if m > c.seqlen_multiple)
    if len(c.causal) > 1:
        yield "causal=false"
        yield "causal=true"


def _min_seqlens(outside: Sequence[Case], inside: Sequence[Case], claimed: int) -> Iterator[str]:
    """Yield lengths above the shortest lengths outside, but not above those inside: usual ones, then any."""
    least = 1 + max((min(case.seqlen_q, case.seqlen_k) for case in outside), default=claimed)
    shortest = (min(case.seqlen_q, case.seqlen_k) for case in inside)
    most = min((length for length in shortest if length >= least), default=least)
    for seqlen in (*(m for m in (1, *MULTIPLES) if least <= m <= most), least):
        if seqlen > claimed:
            yield f"min_seqlen={seqlen}"


def _layouts(inside: Sequence[Case], claimed: tuple[str, ...]) -> Iterator[str]:
    """Yield all layouts but one; those that occur inside; those with dense rows; the first alone."""
    occurring = {layout for case in inside for layout in case.layouts}
    kept = [{*claimed} - {layout} for layout in claimed]
    for layouts in (*kept, occurring, {*DENSE}, {*LAYOUTS[:1]}):
        remaining = [layout for layout in claimed if layout in layouts]
        if 0 < len(remaining) < len(claimed):
            yield f"layouts={','.join(remaining)}"


def _dtypes(outside: Sequence[Case], inside: Sequence[Case], claimed: tuple[str, ...]) -> Iterator[str]:
    """Yield the dtypes that don't occur outside, then those that occur inside."""
    without, within = ({case.dtype for case in cases} for cases in (outside, inside))
    for choice in ({*claimed} - without, {*claimed} & within):
        if choice and len(choice) < len(claimed):
            yield f"dtypes={','.join(dtype for dtype in claimed if dtype in choice)}"


def _head_dims(outside: Sequence[Case], inside: Sequence[Case], claimed: tuple[int, ...]) -> Iterator[str]:
    """Yield usual sets of head_dims (powers of two, multiples, up to a power of two), then those the cases allow."""
    without = {case.head_dim for case in outside}
    within = {case.head_dim for case in inside} - without
    usual = {
        tuple(d for d in claimed if d.bit_count() == 1),
        *(tuple(d for d in claimed if d % m == 0) for m in MULTIPLES),
        *(tuple(d for d in claimed if d <= m) for m in MULTIPLES),
    }
    left = [
        tuple(d for d in claimed if d < min(without, default=0)),
        tuple(d for d in claimed if d > max(without, default=0)),
    ]
    # Where nothing is outside and many are claimed, those that occur inside may be few by chance.
    if without or len(claimed) <= FEW_HEAD_DIMS:
        left.append(tuple(d for d in claimed if d in within))
    for choice in (*sorted(usual, key=lambda choice: (-len(choice), choice)), *left):
        if choice and not without.intersection(choice):
            yield f"head_dims={write_integers(choice)}"
