"""Find claims ``key=value`` that exclude some cases, such as those that a kernel refuses, and keep others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from kernels.contract import CLAIMS, LAYOUTS, Capabilities
from kernels.contract.parsing import CAPABILITIES, ClaimError, lesser, parse_claims
from strategies.case import Case

MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
"""Numbers of which kernels may need lengths and head dimensions to be multiples."""

FEW_HEAD_DIMS = 8
"""Where no more head dims are claimed, each is drawn often enough to tell whether the kernel answers it."""

FEW_SCALES = 4
"""The most numbers that are claimed of sm_scale: what a kernel answers at more of them may be any number."""

DENSE = ("contiguous", "bnhd", "packed")
"""Layouts without expanded, misaligned or huge strides."""

LENGTHS = tuple(2**i for i in range(11))
"""The shortest sequences that kernels may need, and the most queries that they may take, beside those that occur."""

MOST_QUERIES = 256
"""A kernel that takes more queries than these is hardly meant for few of them."""

Cases = Sequence[Case]


def narrowing(
    outside: Cases, inside: Cases, capabilities: Capabilities, may_lose: float = 0.0
) -> Iterator[tuple[str, int]]:
    """Yield claims that together exclude cases of ``outside``, and none of ``inside``. ``capabilities`` claim them all.

    Each claim comes with the number of cases that it excludes of those that the claims before it leave. It is the one
    that excludes most of these, the first of equal ones. Where each claim ``may_lose`` a share of the cases inside, one
    that does counts for as many fewer.
    """
    left, kept = list(outside), list(inside)
    while left and kept:
        best, most = None, 0
        for claim in candidates(kept, capabilities):
            admits = _admits(claim, capabilities)
            lost = len(kept) - sum(map(admits, kept))
            excluded = 0 if lost > may_lose * len(kept) else len(left) - sum(map(admits, left))
            if excluded - lost > most:
                best, most = claim, excluded - lost
        if best is None:
            return
        admits, before = _admits(best, capabilities), len(left)
        left, kept = list(filter(admits, left)), list(filter(admits, kept))
        capabilities = parse_claims([best], capabilities)
        yield best, before - len(left)


def _admits(claim: str, capabilities: Capabilities) -> Callable[[Case], bool]:
    """Return whether a case is still claimed with a narrower claim, of one that ``capabilities`` claim."""
    key = claim.partition("=")[0]
    return partial(CLAIMS[key].admits, getattr(parse_claims([claim], capabilities), key))


def candidates(inside: Cases, capabilities: Capabilities) -> Iterator[str]:
    """Yield claims narrower than ``capabilities``, each a value for one key; those that exclude least come first."""
    usual = (claim for name, claim in lesser(capabilities).items() if name not in NARROWER)
    others = (
        f"{name}={CAPABILITIES[name].write(value)}"
        for name, values in NARROWER.items()
        for value in values(capabilities, inside)
        if value != getattr(capabilities, name)
    )
    return filter(partial(_may_be_claimed, capabilities), chain(usual, others))


def _may_be_claimed(capabilities: Capabilities, claim: str) -> bool:
    """Whether a claim does not contradict the others."""
    try:
        parse_claims([claim], capabilities)
    except ClaimError:
        return False
    return True


def _scales(c: Capabilities, inside: Cases) -> Iterator[Any]:
    """Yield positive scales; then the default one or, where others occur inside, the few that do."""
    if c.sm_scale == "any":
        yield "positive"
    if c.sm_scale in ("any", "positive"):
        yield "default"
        occurring = {case.scale for case in inside}
        if 1 < len(occurring) <= FEW_SCALES:
            yield tuple(sorted(occurring))


def _min_seqlens(c: Capabilities, inside: Cases) -> Iterator[int]:
    """Yield lengths of both sequences above the one that is claimed, the shortest inside among them."""
    return _above(c.min_seqlen, min(min(case.seqlen_q, case.seqlen_k) for case in inside))


def _min_seqlens_k(c: Capabilities, inside: Cases) -> Iterator[int]:
    """Yield numbers of keys above the one that is claimed, the smallest inside among them."""
    return _above(max(c.min_seqlen, c.min_seqlen_k), min(case.seqlen_k for case in inside))


def _above(claimed: int, occurring: int) -> Iterator[int]:
    """Yield usual lengths and one that occurs, as far as they are above the one that is claimed."""
    return (length for length in (*LENGTHS, occurring) if length > claimed)


def _max_seqlens_q(c: Capabilities, inside: Cases) -> Iterator[int]:
    """Yield numbers of queries below the one that is claimed, the largest inside among them, if they are few."""
    largest = max(case.seqlen_q for case in inside)
    most = MOST_QUERIES if c.max_seqlen_q is None else min(MOST_QUERIES, c.max_seqlen_q - 1)
    return (number for number in (*reversed(LENGTHS), largest) if 0 < number <= most)


def _layouts(c: Capabilities, inside: Cases) -> Iterator[tuple[str, ...]]:
    """Yield all layouts but one; those that occur inside; those with dense rows; the first alone."""
    occurring = {layout for case in inside for layout in case.layouts}
    kept = [{*c.layouts} - {layout} for layout in c.layouts]
    choices = (*kept, occurring, {*DENSE}, {*LAYOUTS[:1]})
    return chain.from_iterable(_some(c.layouts, layouts) for layouts in choices)


def _some(claimed: tuple[str, ...], chosen: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield those of the claimed values that are chosen, unless none is."""
    left = tuple(value for value in claimed if value in chosen)
    if left:
        yield left


def _head_dims(c: Capabilities, inside: Cases) -> Iterator[tuple[int, ...]]:
    """Yield usual sets of head_dims (powers of two, multiples, up to a power of two), then those that occur inside.

    Where many are claimed, those that occur inside may be few by chance.
    """
    usual = {
        tuple(d for d in c.head_dims if d.bit_count() == 1),
        *(tuple(d for d in c.head_dims if d % m == 0) for m in MULTIPLES),
        *(tuple(d for d in c.head_dims if d <= m) for m in MULTIPLES),
    }
    yield from sorted(filter(None, usual), key=lambda choice: (-len(choice), choice))
    if len(c.head_dims) <= FEW_HEAD_DIMS:
        yield tuple(sorted({case.head_dim for case in inside}))


NARROWER: Mapping[str, Callable[[Capabilities, Cases], Iterable[Any]]] = {
    "sm_scale": _scales,
    "dense": lambda c, inside: (False,) if c.ragged else (),
    "ragged": lambda c, inside: _some(c.ragged, {case.ragged for case in inside}),
    "min_seqlen": _min_seqlens,
    "min_seqlen_k": _min_seqlens_k,
    "max_seqlen_q": _max_seqlens_q,
    "layouts": _layouts,
    "dtypes": lambda c, inside: _some(c.dtypes, {case.dtype for case in inside}),
    "head_dims": _head_dims,
    "unequal_lengths": lambda c, inside: (False,),
    "seqlen_multiple": lambda c, inside: (m for m in MULTIPLES if m > c.seqlen_multiple),
    "causal": lambda c, inside: ((False,), (True,)) if len(c.causal) > 1 else (),
}
"""Claims that have several narrower values, with a function of all claims and the cases inside that yields these, those
that exclude least first. Any other claim has the one value that it declares as ``less``.
"""
