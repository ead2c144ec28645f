"""Error bounds of sums: dot products in any order of addition, and how many roundings share their sign."""

import math

import torch
from torch import Tensor

from reference.masks import hide

SAFETY = 4.0
"""Rule 2 allows errors of this many standard deviations. By Hoeffding's inequality, uniform errors exceed that
with probability 2 exp(-1.5 * 4^2) = 8e-11 per element."""

SHRINKING_SAFETY = 8.0
"""Standard deviations that rule 2 allows while a failure is being shrunk. A search over cases can raise err/bound by
3 (measured), but never by enough to exceed this."""

PARTIAL_SUM_DEVIATIONS = 3.0
"""Rule 2 takes the largest partial sum of n terms in random order to be |sum x| plus this many standard
deviations, sqrt(sum x^2) each."""

CLUSTER_WINDOW = 0.25
"""Weights within a quarter roundoff of each other are taken to round alike. Over a window of c roundoffs the mean
error is at most u/(2c) times the fraction of values in it, which SAFETY = 1/c covers with a factor of two to spare."""


def probable_steps(terms: int) -> float:
    """Return rule 2's error of ``terms`` additions, in units of one roundoff of the largest partial sum.

    4 sqrt(n) for round to nearest (Hoeffding) plus n/2 for the drift of tensor cores, which truncate: the
    worst drift of the published models is 0.33 n (Hopper) and 0.41 n (Ampere; Fasi et al. 2021).
    """
    return min(float(terms), SAFETY * math.sqrt(terms) + 0.5 * terms)


def probable_partial_sum(value: Tensor, root: Tensor) -> Tensor:
    """Return rule 2's largest partial sum of x_i, given value = |sum x_i| and root = sqrt(sum x_i^2)."""
    return torch.add(value, root, alpha=PARTIAL_SUM_DEVIATIONS)


def multiplicity(x: Tensor, seen: Tensor | None, roundoff: float) -> Tensor:
    """Count, for each element of ``x`` (..., rows, keys), how many elements of its row round the way it does.

    ``x`` is on a logarithmic scale: elements within CLUSTER_WINDOW roundoffs have the same relative rounding
    error, so they add up linearly; by Cauchy-Schwarz the squared sum over a cluster is at most the sum of
    squares times its size. The count is 0 where an element is not ``seen``.
    """
    x = hide(x, seen, torch.inf).contiguous()
    window = CLUSTER_WINDOW * roundoff + 1e-12 * x.abs().clamp_max(1e6)  # float64 noise of equal scores
    ordered = x.sort(dim=-1).values
    count = torch.searchsorted(ordered, x + window, right=True) - torch.searchsorted(ordered, x - window)
    return hide(count.double(), seen)
