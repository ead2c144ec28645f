"""Where around its inputs a kernel reads memory, as what lies there changes what it returns.

A read outside of a tensor is a bug by itself, of which wrong numbers tell little: they depend on what lies there. Here
each place around each input in turn is filled with NaN, and all others with a number.
"""

import math

from kernels.contract import GRADIENTS
from tests.harness.trial.trial import Trial


def read_outside(trial: Trial, tensor: str) -> list[str]:
    """Return the places around the inputs from which NaN reaches a tensor of a call's results, such as "behind k".

    The trial is of a case without NaN in its inputs, and its margin is a number. Nothing is returned if the tensor has
    NaN all the same, as that comes of something else. Raises LawBroken, Refused, or CannotRun as a call does.
    """
    call = trial.prepared(trial.problem)

    def has_nan() -> bool:
        result = trial.call(call, backward=tensor in GRADIENTS).named().get(tensor)
        return result is None or bool(result.isnan().any())

    found: list[str] = []
    if has_nan():
        return found
    for name, window in call.windows.items():
        for place, there in window.around().items():
            window.region[there] = math.nan
            if has_nan():
                found.append(f"{place} {name}")
            window.region[there] = trial.margin
    return found
