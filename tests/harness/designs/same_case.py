"""What is wrong with a failing case once its numbers are ordinary, of which bounds excuse little.

The bounds of scores that are huge, or of weights that lie near the end of a dtype's range, let a less precise design
return nearly anything, inf and NaN included. A kernel has its design in all calls, though: the case as it is, with
normal numbers alone, is within the bounds of that design as well.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from strategies.case import Case
from strategies.features import LENGTHS, has_small_scores, with_normal_numbers
from tests.harness.designs.ordinary import left_by
from tests.harness.symptoms import FEWEST_KEYS
from tests.harness.trial.judge import is_large
from tests.harness.trial.trial import Trial
from tests.harness.verdict import NUMBERS, Finding


def with_ordinary_numbers(case: Case) -> Iterator[Case]:
    """Yield the case with normal numbers and scores of size 1 at most, first with so many keys that they tell much.

    Of one key, or two, a kernel whose weights are wrong may get the right answer all the same. The seed is odd, of
    which a bias gets normal numbers and hides no key.
    """
    normal = replace(with_normal_numbers(case), seed=case.seed | 1)
    if not has_small_scores(normal):
        normal = replace(normal, sm_scale=None)
    yield replace(normal, **{name: max(getattr(case, name), FEWEST_KEYS) for name in LENGTHS})
    yield normal


def left_with_ordinary_numbers(trial: Trial, law: Callable[[Trial], None]) -> tuple[Trial, Finding] | None:
    """Return what a law finds in the trial's case with ordinary numbers; None if nothing.

    The trial in which it was found is returned too. The kernel is called anew, by what it claims: a case that is not
    claimed, or is too large for all of it to be judged, says nothing.
    """
    claims = trial.kernel.capabilities
    case = next(filter(claims.admits, with_ordinary_numbers(trial.case)), trial.case)
    if case == trial.case or is_large(trial.problem):
        return None
    made = trial.replayed(trial.family).on(case)
    made.answered, made.given = [], []
    left = left_by(made, law)
    return (made, left) if left is not None and left.kind in NUMBERS else None
