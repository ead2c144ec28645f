"""Backward: gradients, and the out and lse of the same call, are within the rounding bound of float64.

Element by element. The upstream gradient is random and of full scale. Gradients are judged at the kernel's own out
and lse where they follow from them, so that an error is blamed where it was made. Catches a wrong delta, a scale
forgotten or applied twice, masks of one pass that differ from the other's, gradients summed over the wrong heads.
"""

from tests.harness.law import law
from tests.harness.trial.judge import judge
from tests.harness.trial.trial import Trial


@law(needs="backward", gradients=True, key_padding=True, dropout=True, variants=True, place=2, is_basic=True)
def backward(trial: Trial) -> None:
    """Judge everything that one call with gradients returns."""
    judge(trial, trial.problem, trial.gradients())
