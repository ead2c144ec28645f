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
"""Claims are learned from at least 8 answered cases, all of which they keep, and each excludes at least 4 refused
cases.
"""

MOST = 200
"""The most refused cases, and the most answered ones, that are remembered; an answer against the claims always is."""

USUAL_HEAD_DIMS, USUAL_LENGTHS = (64, 128), (128, 256)
"""Head dims and lengths of the cases that are tried first: nearly every kernel answers some of them."""

UNUSUAL: tuple[Mapping[str, Any], ...] = (
    {"seqlen_q": 1},
    {"seqlen_q": 512, "seqlen_k": 512},
    {"sm_scale": 1.0},
)
"""Fields of cases that are tried if all usual ones are refused, as by a decode kernel or one with a built-in scale."""

FEW_QUERIES = (1, 2, 3, 4, 8, 16, 32)
"""Numbers of queries that are tried with the number of keys that the kernel answers."""

LENGTHS_ASKED = (*range(16, 129, 16), 8, 24, 40, 4, 12, 2, 6, 1, 3, 33)
"""Lengths that reveal a rule for them: for each power of two, multiples of it that are none of the next power."""

NOT_LEARNED = ("dtypes=", "layouts=")
"""Claims that are not learned: each dtype has turns of its own, and refused cases are retried with contiguous inputs.
"""

ALL_CLAIMED = 4
"""Every fourth turn of a law draws from all that is claimed, since claims learned from a few cases may be wrong."""

MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
"""Lengths and head dims of some kernels have to be multiples of one of these."""

FEW_HEAD_DIMS = 8
"""If at most this many head dims are claimed, each is drawn often enough to show whether the kernel answers it."""

FEW_SCALES = 4
"""A claim lists at most this many values of sm_scale: a kernel that answers more of them may answer any."""

DENSE = ("contiguous", "bnhd", "packed")
"""Layouts without expanded, misaligned or huge strides."""

LENGTHS = tuple(2**i for i in range(11))
"""Values tried for the shortest sequence and the most queries that a kernel takes, beside those that occur."""

MOST_QUERIES = 256
"""A kernel that takes more queries than this is hardly meant for few of them."""

Cases = Sequence[Case]


@dataclass(frozen=True, kw_only=True)
class Asked(Capabilities):
    """Claims of a kernel, less the cases that it ``refuses`` when asked, since claims may not cover all refusals."""

    refuses: Callable[[Case], bool]

    def admits(self, case: Case) -> bool:
        """Whether the kernel claims a case and does not refuse it."""
        return super().admits(case) and not self.refuses(case)


class Answered:
    """What one kernel seems to answer, at any dtype, as ``claims``: at first all that it has ``claimed``.

    ``law`` is the law under which the kernel is asked whether it refuses a case.
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
        """Remember a case. Learn ``claims`` anew if they exclude an answered case, or admit several refused ones."""
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
        """Once a dtype, if the kernel refuses much, run variants of a case that it answers: which does it refuse?"""
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
        """Return the claims that a turn draws from: every fourth turn draws from all that is claimed."""
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
    """Yield claimed cases of which nearly every kernel answers some: one head, the first layout, the default scale.

    The first have equal lengths. Others follow for kernels that take a single query, long sequences or another scale.
    If dense calls are not claimed, each case is of a ragged kind that is.
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
    """Yield claims that together exclude cases of ``outside`` and none of ``inside``. ``capabilities`` claim them all.

    The claim that excludes most of the cases left comes first, with the number of these; of equal claims, the first
    one. Example: outside are head_dims 96 and 160, inside 64 and 128: ``head_dims=64,128`` comes first and excludes
    all. ``may_lose`` is the share of the cases inside that each claim may exclude. Each case lost counts against one
    excluded.
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
    """Return a function that says whether a case admitted by ``capabilities`` is still so with a narrower claim."""
    key = claim.partition("=")[0]
    return partial(CLAIMS[key].admits, getattr(parse_claims([claim], capabilities), key))


def candidates(inside: Cases, capabilities: Capabilities) -> Iterator[str]:
    """Yield claims narrower than ``capabilities``, each a value for one key; for each key, wider values come first."""
    usual = (claim for name, claim in lesser(capabilities).items() if name not in NARROWER)
    others = (
        f"{name}={CAPABILITIES[name].write(value)}"
        for name, values in NARROWER.items()
        for value in values(capabilities, inside)
        if value != getattr(capabilities, name)
    )
    return filter(partial(_may_be_claimed, capabilities), chain(usual, others))


def _may_be_claimed(capabilities: Capabilities, claim: str) -> bool:
    """Whether a claim is compatible with the others."""
    try:
        parse_claims([claim], capabilities)
    except ClaimError:
        return False
    return True


def _scales(c: Capabilities, inside: Cases) -> Iterator[Any]:
    """Yield "positive", then "default" and, if several scales but few occur inside, these."""
    if c.sm_scale == "any":
        yield "positive"
    if c.sm_scale in ("any", "positive"):
        yield "default"
        occurring = {case.scale for case in inside}
        if 1 < len(occurring) <= FEW_SCALES:
            yield tuple(sorted(occurring))


def _min_seqlens(c: Capabilities, inside: Cases) -> Iterator[int]:
    """Yield larger minimum lengths for both sequences, among them the shortest length inside."""
    return _above(c.min_seqlen, min(min(case.seqlen_q, case.seqlen_k) for case in inside))


def _min_seqlens_k(c: Capabilities, inside: Cases) -> Iterator[int]:
    """Yield larger minimum numbers of keys, among them the smallest inside."""
    return _above(max(c.min_seqlen, c.min_seqlen_k), min(case.seqlen_k for case in inside))


def _above(claimed: int, occurring: int) -> Iterator[int]:
    """Yield those of the usual lengths, and of the one that occurs inside, that exceed the claimed minimum."""
    return (length for length in (*LENGTHS, occurring) if length > claimed)


def _max_seqlens_q(c: Capabilities, inside: Cases) -> Iterator[int]:
    """Yield smaller maximum numbers of queries, among them the largest inside if that is small."""
    largest = max(case.seqlen_q for case in inside)
    most = MOST_QUERIES if c.max_seqlen_q is None else min(MOST_QUERIES, c.max_seqlen_q - 1)
    return (number for number in (*reversed(LENGTHS), largest) if 0 < number <= most)


def _layouts(c: Capabilities, inside: Cases) -> Iterator[tuple[str, ...]]:
    """Yield all layouts but one, for each; those that occur inside; those with dense rows; the first alone."""
    occurring = {layout for case in inside for layout in case.layouts}
    kept = [{*c.layouts} - {layout} for layout in c.layouts]
    choices = (*kept, occurring, {*DENSE}, {*LAYOUTS[:1]})
    return chain.from_iterable(_some(c.layouts, layouts) for layouts in choices)


def _some(claimed: tuple[str, ...], chosen: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield the claimed values that are among the chosen ones, in their order; nothing if none is."""
    left = tuple(value for value in claimed if value in chosen)
    if left:
        yield left


def _head_dims(c: Capabilities, inside: Cases) -> Iterator[tuple[int, ...]]:
    """Yield usual sets of head_dims (powers of two, multiples, up to a power of two), then those that occur inside.

    If many are claimed, those that occur inside may be few by chance, and are left out.
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
