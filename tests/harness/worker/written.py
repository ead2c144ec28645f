"""What a kernel writes over an input, found by a comparison of the input before a call with the input after it."""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from strategies.case import Case
from strategies.layouts import bits
from strategies.tensors import tensors
from tests.harness.trial.trial import Trial

ROUNDINGS = 2.0
"""By how many units in the last place a product may miss an exact one, if two factors are multiplied one by one."""


def written(cases: Iterable[Case], trial_of: Callable[[Case], Trial], tensor: str) -> list[str]:
    """Return what is written over an input in all of these cases that show it, at least two, in words.

    A case that can't be run tells nothing.
    """
    shown = list[set[str]]()
    for case in cases:
        with suppress(Exception):
            trial = trial_of(case)
            _ = trial.gradients() if trial.kernel.capabilities.backward else trial.forward()
            told = _written_by(trial, tensor)
            shown += [told] if told is not None else []
    return sorted(set.intersection(*shown)) if len(shown) > 1 else []


def _written_by(trial: Trial, tensor: str) -> set[str] | None:
    """Return what the call of a trial may have written over an input, in words; None if the input is as it was."""
    was = getattr(tensors(trial.case, "cpu"), tensor).tensor
    now = getattr(trial.windows, tensor).tensor.cpu()
    changed = bits(was) != bits(now)
    if not bool(changed.any()):
        return None
    x, y, found = was.double(), now.double(), set[str]()
    format_ = torch.finfo(was.dtype)
    default, given = 1.0 / math.sqrt(trial.case.head_dim), trial.case.scale
    factors = {
        "sm_scale": given,
        "sm_scale * log2(e)": given * math.log2(math.e),
        "1 / sqrt(head_dim)": default,
        "the root of sm_scale": math.sqrt(abs(given)),
    }
    for words, factor in factors.items():
        allowed = ROUNDINGS * format_.eps * (factor * x).abs().clamp_min(format_.tiny)
        if bool(((y - factor * x).abs() <= allowed).all()):
            found.add(f"{tensor} is multiplied by {words} in place")
    if not bool(y[changed].any()):
        found.add(f"some of {tensor} is set to 0 in place")
    return found
