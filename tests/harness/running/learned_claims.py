"""What a kernel seems to answer of all that it claims, learned from the cases that it has refused and answered."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from typing import Any

from kernels.contract import Capabilities
from kernels.contract.parsing import parse_claims
from strategies.case import LAYOUT_FIELDS, Case
from strategies.features import in_plain_layouts
from tests.harness.running.narrow import narrowing

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
