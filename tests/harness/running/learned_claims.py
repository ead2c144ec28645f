"""What a kernel seems to answer of all that it claims, and claims that exclude what it refuses and keep the rest."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, product
from typing import Any

from kernels.contract import CLAIMS, LAYOUTS, Capabilities
from kernels.contract.parsing import CAPABILITIES, ClaimError, lesser, parse_claims
from strategies.case import LAYOUT_FIELDS, Case
from strategies.features import in_plain_layouts

MUCH = 1 / 4
"""From this share of refused cases on, cases are drawn from what the kernel seems to answer."""

FEWEST, FEWEST_EXCLUDED = 8, 4
"""A claim is learned from at least so many answered cases, all of which it keeps, and refused ones that it excludes."""

MOST = 200
"""The most refused cases, and the most answered ones, that are remembered. An answer that is a surprise always is."""

USUAL_HEAD_DIMS, USUAL_LENGTHS = (64, 128), (128, 256)
"""Head dims and lengths of the cases that are asked first: nearly every kernel answers one of them."""

UNUSUAL: tuple[Mapping[str, Any], ...] = (
    {"seqlen_q": 1},
    {"seqlen_q": 512, "seqlen_k": 512},
    {"sm_scale": 1.0},
)
"""What cases have that are asked if all usual ones are refused, as by a decode kernel or one with a built-in scale."""

FEW_QUERIES = (1, 2, 3, 4, 8, 16, 32)
"""Numbers of queries that are asked of a kernel with the number of keys that it answers."""

LENGTHS_ASKED = (*range(16, 129, 16), 8, 24, 40, 4, 12, 2, 6, 1, 3, 33)
"""Lengths by which a rule for them shows: multiples of each power of two that are none of the next one."""

NOT_LEARNED = ("dtypes=", "layouts=")
"""Claims that are not learned: each dtype has turns of its own, and what is refused is run with contiguous inputs."""

ALL_CLAIMED = 4
"""One of so many turns of a law draws from all that is claimed, since what was learned of a few cases may be wrong."""

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


@dataclass(frozen=True, kw_only=True)
class Asked(Capabilities):
    """Claims of a kernel that is also asked whether it ``refuses`` a case, as no claim may say that it does."""

    refuses: Callable[[Case], bool]

    def admits(self, case: Case) -> bool:
        """Whether the kernel claims a case and does not refuse it."""
        return super().admits(case) and not self.refuses(case)


class Answered:
    """What one kernel seems to answer, at any dtype, in ``claims``: at first all that it has ``claimed``.

    ``law`` is the law under which it is asked whether it refuses a case.
    """

    def __init__(self, claimed: Capabilities, law: str = "forward") -> None:
        """Begin with no case."""
        self.law = law
        self.claimed, self.claims = claimed, claimed
        self.refused: list[Case] = []
        self.answered: list[Case] = []
        self.surprises = 0
        self.asked = set[str]()

    def note(self, case: Case, *, is_refused: bool) -> None:
        """Remember a case, and learn ``claims`` anew if they exclude an answer, or let in several refused cases."""
        case = in_plain_layouts(case)
        is_expected = self.claims.admits(case) != is_refused
        kept = self.refused if is_refused else self.answered
        if len(kept) < MOST or not (is_refused or is_expected):
            kept.append(case)
        self.surprises += not is_expected
        # A claim that excludes an answer is wrong; refusals say little before there are several.
        if not is_expected and (not is_refused or self.surprises >= FEWEST):
            self._learn()

    def ask(self, dtype: str, refuses: Callable[[Case], bool]) -> None:
        """Ask the kernel once for each dtype, if it refuses much, about cases that differ from an answered one."""
        if dtype in self.asked or not self._is_much_refused:
            return
        self.asked.add(dtype)
        answered = (case for case in usual(dtype, self.claimed) if not refuses(case))
        for case in chain.from_iterable(varied(first, self.claimed) for first in islice(answered, 1)):
            self.note(case, is_refused=refuses(case))
        self._learn()

    @property
    def _is_much_refused(self) -> bool:
        refused = len(self.refused)
        return refused >= max(FEWEST, MUCH * (refused + len(self.answered)))

    def of_turn(self, number: int) -> Capabilities:
        """Return the claims that a turn draws from: one in ``ALL_CLAIMED`` draws from all."""
        return self.claims if number % ALL_CLAIMED else self.claimed

    def _learn(self) -> None:
        self.claims, self.surprises = self.claimed, 0
        if len(self.answered) < FEWEST or not self._is_much_refused:
            return
        for claim, excluded in narrowing(self.refused, self.answered, self.claimed):
            if excluded < FEWEST_EXCLUDED:
                return
            if not claim.startswith(NOT_LEARNED):
                self.claims = parse_claims([claim], self.claims)


class AnsweredLaws:
    """What one kernel seems to answer without gradients, and what with them, of which it may refuse more."""

    def __init__(self, claimed: Capabilities) -> None:
        """Begin with no case."""
        self.forward = Answered(claimed)
        self.backward = Answered(claimed, "backward") if claimed.backward else self.forward

    def under(self, law: str) -> Answered:
        """Return what is learned from cases of a law. All laws but ``forward`` ask for gradients, if there are any."""
        return self.forward if law == "forward" else self.backward


def usual(dtype: str, claimed: Capabilities) -> Iterator[Case]:
    """Yield claimed cases such as nearly every kernel answers one of: one head, the first layout, the default scale.

    The first have equal lengths. Others follow for kernels that take one query alone, long sequences or another scale.
    If dense calls are not claimed, each is of a kind that is.
    """
    head_dims = sorted(claimed.head_dims, key=lambda head_dim: head_dim not in USUAL_HEAD_DIMS)
    of_all: Iterator[tuple[int, int, bool, Mapping[str, Any]]] = product(
        head_dims, USUAL_LENGTHS, claimed.causal, ({},)
    )
    of_few = product(head_dims[: len(USUAL_HEAD_DIMS)], USUAL_LENGTHS, claimed.causal, UNUSUAL)
    kinds = ("none",) if claimed.dense else claimed.ragged
    for head_dim, length, causal, unusual in chain(of_all, of_few):
        case = Case(
            seqlen_q=length,
            seqlen_k=length,
            head_dim=head_dim,
            v_head_dim=min(claimed.v_head_dim),
            v_in_k=min(claimed.v_in_k),
            causal=causal,
            dtype=dtype,
        )
        layouts = dict.fromkeys(LAYOUT_FIELDS, claimed.layouts[0])
        of_kinds = (replace(case, ragged=kind, **{**layouts, **unusual}) for kind in kinds)
        yield from filter(claimed.admits, of_kinds)


def varied(case: Case, claimed: Capabilities) -> Iterator[Case]:
    """Yield a case, and claimed cases that differ from it in one thing that a claim may be about, such as head_dim.

    Some have one query, few queries, or more queries than keys.
    """
    lengths = (case.seqlen_q, case.seqlen_q // 2)
    changes: list[dict[str, Any]] = [
        {},
        *({"head_dim": head_dim} for head_dim in claimed.head_dims),
        *({"seqlen_q": n, "seqlen_k": n} for n in (*LENGTHS_ASKED, 0)),
        *({"seqlen_q": n} for n in FEW_QUERIES),
        *({"seqlen_q": 1, "seqlen_k": n} for n in LENGTHS_ASKED),
        *({"seqlen_k": n} for n in (case.seqlen_k + 1, case.seqlen_k + 64, 0)),
        *({"seqlen_q": n, "seqlen_k": 2 * n} for n in lengths),
        *({"seqlen_q": 2 * n, "seqlen_k": n} for n in lengths),
        *({"causal": causal} for causal in claimed.causal),
        *({"batch": 2, "heads_kv": heads_kv} for heads_kv in (1, 2)),
        *({"heads_kv": heads_kv, "group": group} for heads_kv in (1, 2) for group in (2, 4)),
        *({"sm_scale": sm_scale} for sm_scale in (1.0, 0.125, 0.3, 0.0, -0.5, -1.0)),
    ]
    different = dict.fromkeys(replace(case, **fields) for fields in changes)
    yield from filter(claimed.admits, different)


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
