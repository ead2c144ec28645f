"""Find claims ``key=value`` that exclude some cases, such as those that a kernel refuses, and keep others."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kernels.claims import CAPABILITIES, ClaimError, lesser, parse_claims
from kernels.contract import CLAIMS, LAYOUTS, Capabilities, takes_scale
from strategies.case import Case

MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
"""Numbers of which kernels may need lengths and head dimensions to be multiples."""

FEW_HEAD_DIMS = 8
"""Where no more head dims are claimed, each is drawn often enough to tell whether the kernel answers it."""

MOST_QUERIES = 256
"""A kernel that takes more queries than these is hardly meant for few of them."""

FEW_SCALES = 4
"""The most numbers that are claimed of sm_scale: what a kernel answers at more of them may be any number."""

DENSE = ("contiguous", "bnhd", "packed")
"""Layouts without expanded, misaligned or huge strides."""

MOST_LOST = 0.5
"""A claim that excludes this share of the cases inside, or more, does not tell one kind of case from the other.

Claims that exclude no more than this share of the cases outside do not either.
"""

Cases = Sequence[Case]


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
    usual = {name: claim for name, claim in lesser(capabilities).items() if name not in NARROWER}
    yield from filter(partial(_may_be_claimed, capabilities), usual.values())
    for name, values in NARROWER.items():
        for value in values(capabilities, outside, inside):
            claim = f"{name}={CAPABILITIES[name].write(value)}"
            if value != getattr(capabilities, name) and _may_be_claimed(capabilities, claim):
                yield claim


def _may_be_claimed(capabilities: Capabilities, claim: str) -> bool:
    """Whether a claim does not contradict the others."""
    try:
        parse_claims([claim], capabilities)
    except ClaimError:
        return False
    return True


def _min_seqlens(c: Capabilities, outside: Cases, inside: Cases) -> Iterator[int]:
    """Yield least lengths of both sequences, as ``_least`` does."""
    refused, answered = ([min(x.seqlen_q, x.seqlen_k) for x in cases] for cases in (outside, inside))
    return _least(c.min_seqlen, refused, answered)


def _min_seqlens_k(c: Capabilities, outside: Cases, inside: Cases) -> Iterator[int]:
    """Yield least numbers of keys, as ``_least`` does."""
    refused, answered = ([x.seqlen_k for x in cases] for cases in (outside, inside))
    return _least(max(c.min_seqlen, c.min_seqlen_k), refused, answered)


def _least(claimed: int, refused: Sequence[int], answered: Sequence[int]) -> Iterator[int]:
    """Yield lengths above those refused, but not above those answered: powers of two, then the extremes."""
    least = 1 + max(refused, default=claimed)
    most = min((length for length in answered if length >= least), default=least)
    powers = (2**i for i in range(most.bit_length()))
    return (length for length in (*powers, most, least) if max(least, claimed + 1) <= length <= most)


def _max_seqlens_q(c: Capabilities, outside: Cases, inside: Cases) -> Iterator[int]:
    """Yield numbers of queries below those outside, but not below those inside: a power of two, then the extremes."""
    claimed = math.inf if c.max_seqlen_q is None else c.max_seqlen_q
    most = min((case.seqlen_q for case in outside), default=claimed) - 1
    least = max((case.seqlen_q for case in inside if case.seqlen_q <= most), default=1)
    power = 2 ** max(0, least - 1).bit_length()
    return (int(number) for number in (power, least, most) if max(1, least) <= number <= min(most, MOST_QUERIES))


def _scales(c: Capabilities, outside: Cases, inside: Cases) -> Iterator[Any]:
    """Yield positive scales; then the default one or, where others occur inside, the few that do."""
    if c.sm_scale == "any":
        yield "positive"
    if c.sm_scale in ("any", "positive"):
        yield "default"
        occurring = {case.scale for case in inside}
        if len(occurring) <= FEW_SCALES and not all(takes_scale("default", x.scale, x.head_dim) for x in inside):
            yield tuple(sorted(occurring))


def _layouts(c: Capabilities, outside: Cases, inside: Cases) -> Iterator[tuple[str, ...]]:
    """Yield all layouts but one; those that occur inside; those with dense rows; the first alone."""
    occurring = {layout for case in inside for layout in case.layouts}
    kept = [{*c.layouts} - {layout} for layout in c.layouts]
    for layouts in (*kept, occurring, {*DENSE}, {*LAYOUTS[:1]}):
        yield from _some(c.layouts, layouts)


def _dtypes(c: Capabilities, outside: Cases, inside: Cases) -> Iterator[tuple[str, ...]]:
    """Yield the dtypes that don't occur outside, then those that occur inside."""
    without, within = ({case.dtype for case in cases} for cases in (outside, inside))
    for choice in ({*c.dtypes} - without, within):
        yield from _some(c.dtypes, choice)


def _kinds(c: Capabilities, outside: Cases, inside: Cases) -> Iterator[tuple[str, ...]]:
    """Yield the kinds of sequences of different lengths that occur inside."""
    return _some(c.ragged, {case.ragged for case in inside})


def _some(claimed: tuple[str, ...], chosen: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield those of the claimed values that are chosen, unless these are none or all."""
    left = tuple(value for value in claimed if value in chosen)
    if 0 < len(left) < len(claimed):
        yield left


def _head_dims(c: Capabilities, outside: Cases, inside: Cases) -> Iterator[tuple[int, ...]]:
    """Yield usual sets of head_dims (powers of two, multiples, up to a power of two), then those the cases allow."""
    claimed, without = c.head_dims, {case.head_dim for case in outside}
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
            yield choice


def _multiples(c: Capabilities, outside: Cases, inside: Cases) -> Iterator[int]:
    """Yield numbers of which lengths may be multiples."""
    return (m for m in MULTIPLES if m > c.seqlen_multiple)


NARROWER: Mapping[str, Callable[[Capabilities, Cases, Cases], Iterable[Any]]] = {
    "sm_scale": _scales,
    "dense": lambda c, outside, inside: (False,) if c.ragged else (),
    "ragged": _kinds,
    "min_seqlen": _min_seqlens,
    "min_seqlen_k": _min_seqlens_k,
    "max_seqlen_q": _max_seqlens_q,
    "layouts": _layouts,
    "dtypes": _dtypes,
    "head_dims": _head_dims,
    "unequal_lengths": lambda c, outside, inside: (False,),
    "seqlen_multiple": _multiples,
    "causal": lambda c, outside, inside: ((False,), (True,)) if len(c.causal) > 1 else (),
}
"""Claims that have several narrower values, with a function of all claims and the cases outside and inside that yields
them, those that exclude least first. Any other claim has the one value that it declares as ``less``.
"""
