"""Forward: out and lse are within the rounding bound of float64, element by element.

The non-finite pattern is part of it: NaN never where a number belongs, lse = -inf exactly on rows that see no
key. Catches wrong masks, tails, scales and heads, a lost rescaling, accumulation or weights in too few bits,
lse in another base.
"""

from tests.harness.law import law
from tests.harness.trial.judge import judge
from tests.harness.trial.trial import Trial


@law(key_padding=True, dropout=True, variants=True, place=1, is_basic=True, takes_gradients=False)
def forward(trial: Trial) -> None:
    """Judge out and lse of one call."""
    judge(trial, trial.problem, trial.forward())
