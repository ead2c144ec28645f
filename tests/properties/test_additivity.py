"""Additivity: gradients are linear in dout, so the gradients for a sum of two are the sums of their gradients.

dout is cut in two at the middle of its columns, rows or heads, with zeros in the place of the other half, so that
the two parts add up to it without rounding. Catches gradients that depend on dout as a whole: tiles that are skipped
or clipped by what some entries of dout hold, a delta of part of the columns, rows whose dout is 0 and whose dq is not.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.contract import GRADIENTS
from reference.bounds.relations import sum_bound
from tests.harness.law import law
from tests.harness.trial.problem import Problem
from tests.harness.trial.relate import Derived, agree, allowances_of_each, asked
from tests.harness.trial.trial import Trial

COLUMNS, ROWS, HEADS = 3, 2, 1
"""The dimensions along which dout may be cut."""


@law(
    needs="backward",
    gradients=True,
    key_padding=True,
    dropout=True,
    variants=True,
    place=16,
    compares=("calls",),
)
def additivity(trial: Trial) -> None:
    """Cut dout along a dimension that the seed decides, and compare the gradients of whole and parts."""
    whole = trial.problem
    first, second = (asked(trial, p) for p in halves(whole, (COLUMNS, ROWS, HEADS)[trial.case.seed % 3]))
    if first is None or second is None:
        return  # the rows of dout can only be alike in the claimed layouts
    of_whole, of_first, of_second = (trial.gradients(p) for p in (whole, first, second))
    others = of_second.named()
    pairs = {
        name: (x.double(), others[name].double()) for name, x in of_first.named().items() if name in others
    }
    allowed = allowances_of_each(trial, (whole, first, second), gradients=of_whole.dq is not None)

    def bound() -> dict[str, Tensor]:
        bounds = [of_call() for of_call in allowed]
        return {
            name: sum_bound([x[name] for x in bounds], pair)
            for name, pair in pairs.items()
            if name in bounds[0]
        }

    formula = f"results[{of_first.call}]['{{0}}'].double() + results[{of_second.call}]['{{0}}'].double()"
    sums = Derived(
        of_second.call,
        {name: a + b for name, (a, b) in pairs.items()},
        {name: formula.format(name) for name in pairs},
    )
    claim = "{0} for a sum of two dout is the sum of {0} for each"
    agree(trial, claim, of_whole, sums, bound, only=GRADIENTS)


def halves(p: Problem, dim: int) -> tuple[Problem, Problem]:
    """Return two problems: one keeps the first half of dout along a dimension, one the second; the rest is zeros."""
    size = p.dout.shape[dim]
    shape = [size if at == dim else 1 for at in range(4)]
    is_first = (torch.arange(size, device=p.dout.device) < size // 2).view(shape)
    parts = (p.dout.masked_fill(hidden, 0.0).contiguous() for hidden in (~is_first, is_first))
    first, second = (replace(p, dout=dout) for dout in parts)
    return first, second
