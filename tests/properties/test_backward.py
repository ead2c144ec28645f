"""Backward: dq, dk and dv are within the rounding bound of float64, element by element.

The upstream gradient is random and of full scale. A kernel with a backward of its own is judged at its own
stored out and lse, so that an error is blamed where it was made. Catches a wrong delta, a scale forgotten or
applied twice, masks of one pass that differ from the other's, gradients summed over the wrong heads.
"""

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.judge import judge_backward
from tests.harness.subject import Subject
from tests.harness.trial import Trial


def law(trial: Trial) -> None:
    """Judge the gradients of one call."""
    judge_backward(trial, trial.problem, trial.gradients())


@given(data=st.data())
def test_backward(subject: Subject, data: st.DataObject) -> None:
    """Backward."""
    subject.requires("backward")
    subject.uphold(law, data.draw(subject.cases(key_padding=True, dropout=True)))
