"""Forward: out and lse are within the rounding bound of float64, element by element.

The non-finite pattern is part of it: NaN never where a number belongs, lse = -inf exactly on rows that see no
key. Catches wrong masks, tails, scales and heads, a lost rescaling, accumulation or weights in too few bits,
lse in another base.
"""

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.judge import judge
from tests.harness.subject import Subject
from tests.harness.trial import Trial


def law(trial: Trial) -> None:
    """Judge out and lse of one call."""
    judge(trial, trial.problem, trial.forward())


@given(data=st.data())
def test_forward(subject: Subject, data: st.DataObject) -> None:
    """Forward."""
    subject.uphold(law, data.draw(subject.cases(key_padding=True, dropout=True)))
