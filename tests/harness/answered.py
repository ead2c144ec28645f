"""What a kernel seems to answer of all that it claims, learned from the cases that it has refused and answered."""

from collections.abc import Callable
from dataclasses import dataclass

from kernels.claims import parse_claims
from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import is_claimed
from tests.harness.narrow import narrowing

MUCH = 1 / 4
"""From this share of refused cases on, cases are drawn from what the kernel seems to answer."""

FEWEST = 8
"""A claim is learned from at least so many refused cases that it excludes, and so many answered ones that it keeps."""

MOST = 200
"""The most refused cases, and the most answered ones, that are remembered. An answer that is a surprise always is."""

ALL_CLAIMED = 4
"""One of so many turns of a law draws from all that is claimed, since what was learned of a few cases may be wrong."""


@dataclass(frozen=True, kw_only=True)
class Asked(Capabilities):
    """Claims of a kernel that is asked about each case whether it ``refuses`` that, which no claim may say."""

    refuses: Callable[[Case], bool]

    def admits(self, case: Case) -> bool:
        """Whether the kernel claims a case and does not refuse it."""
        return super().admits(case) and not self.refuses(case)


class Answered:
    """What one kernel seems to answer, at any dtype, in ``claims``: at first all that it has ``claimed``.

    That it refuses a dtype is not learned, as each dtype has turns of its own.
    """

    def __init__(self, claimed: Capabilities) -> None:
        """Begin with no case."""
        self.claimed, self.claims = claimed, claimed
        self.refused: list[Case] = []
        self.answered: list[Case] = []
        self.surprises = 0

    def note(self, case: Case, *, is_refused: bool) -> None:
        """Remember a case. After some that ``claims`` are wrong about, these are learned anew."""
        is_expected = is_claimed(case, self.claims) != is_refused
        kept = self.refused if is_refused else self.answered
        if len(kept) < MOST or not (is_refused or is_expected):
            kept.append(case)
        self.surprises += not is_expected
        # A claim that excludes an answer is wrong; refusals say little before there are several.
        if not is_expected and (not is_refused or self.surprises >= FEWEST):
            self._learn()

    def of_turn(self, number: int) -> Capabilities:
        """Return the claims that a turn draws from: one in ``ALL_CLAIMED`` draws from all."""
        return self.claims if number % ALL_CLAIMED else self.claimed

    def _learn(self) -> None:
        self.claims, self.surprises = self.claimed, 0
        refused, answered = len(self.refused), len(self.answered)
        if answered < FEWEST or refused < max(FEWEST, MUCH * (refused + answered)):
            return
        for claim, excluded in narrowing(self.refused, self.answered, self.claimed):
            if excluded < FEWEST:
                return
            if not claim.startswith("dtypes="):
                self.claims = parse_claims([claim], self.claims)
