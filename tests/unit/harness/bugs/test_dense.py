"""Two bugs of one tensor are one if ordinary numbers show both at the same lengths, by one rule."""

from collections.abc import Callable

import pytest

from strategies.case import Case, Spike
from strategies.features import SCORES
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.dense import show_at_same_lengths
from tests.harness.bugs.duplicates import why_same
from tests.unit.support.bugs import CAUSAL, CLAIMS, bug, runner

OF_SCORES = Condition(SCORES, ("other",), ("ordinary",))
ENTRY = (Spike("v", (0, 0, 0, 0), 1.0),)


def found_at(seqlen_k: int, holds: tuple[int, ...], *needs: Condition, tensor: str = "out") -> Bug:
    """Return a bug whose smallest case has few numbers other than 0, and so many keys."""
    case = Case(seqlen_k=seqlen_k, v_values="zeros", spikes=ENTRY)
    return bug(case, (tensor,), Condition("seqlen_k", (seqlen_k,), holds), *needs, relative=1.0)


ABOVE_71, ABOVE_37 = found_at(72, (71, 32, 64)), found_at(38, (37, 32), OF_SCORES)
IN_TAIL, ABOVE_32 = found_at(33, (32, 64, 128)), found_at(64, (16, 32))
IN_SHORT_TAIL, ABOVE_256 = found_at(1, (64, 128)), found_at(257, (256, 64, 128))

Shows = Callable[[int], bool]


@pytest.mark.parametrize(
    ("one", "other", "shows", "expected"),
    [
        (ABOVE_71, ABOVE_37, lambda keys: keys > 32, True),
        (ABOVE_37, ABOVE_71, lambda keys: keys > 37, True),
        (IN_TAIL, ABOVE_32, lambda keys: keys > 32, True),
        (IN_TAIL, found_at(70, (64, 69)), lambda keys: keys % 32 > 0, True),
        # The second needs large scores indeed, or the rest of its smallest case.
        (ABOVE_71, ABOVE_37, lambda keys: keys > 71, False),
        # A tail and a limit are two bugs, and no rule has both.
        (IN_SHORT_TAIL, ABOVE_256, lambda keys: keys % 64 > 0 or keys > 256, False),
        # What shows everywhere is a third bug, and tells nothing of these.
        (ABOVE_71, ABOVE_37, lambda keys: True, False),
        (ABOVE_71, found_at(38, (37,), CAUSAL), lambda keys: keys > 32, False),
        (ABOVE_71, found_at(38, (37,), tensor="dv"), lambda keys: keys > 32, False),
    ],
)
def test_lengths_are_compared_with_ordinary_numbers(
    one: Bug, other: Bug, shows: Shows, expected: bool
) -> None:
    def wrong(case: Case) -> set[str]:
        return {"out"} if shows(case.seqlen_k) and case.v_values == "normal" and not case.spikes else set()

    assert show_at_same_lengths(one, other, runner(wrong), CLAIMS) == expected


def test_such_bugs_are_one() -> None:
    """The kernel is wrong beyond 32 keys, which the few numbers of one of the two smallest cases hide up to 71 keys."""

    def wrong(case: Case) -> set[str]:
        few = case.spikes == ENTRY and case.seqlen_k != ABOVE_37.failure.case.seqlen_k
        return {"out"} if case.seqlen_k > (71 if few else 32) else set()

    assert why_same(ABOVE_71, ABOVE_37, runner(wrong), CLAIMS)
    assert why_same(ABOVE_37, ABOVE_71, runner(wrong), CLAIMS)
