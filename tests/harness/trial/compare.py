"""Errors in units of their bounds, element by element, and a finding for the worst: ``Trial.settle`` judges it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

import numpy as np
import torch
from torch import Tensor

from tests.harness.verdict import Finding, as_number


@dataclass(frozen=True)
class Check:
    """One comparison, which is not made at once, so that one device synchronisation settles many."""

    claim: str
    tensor: str
    actual: Tensor
    expected: Tensor
    bound: Tensor
    maximum: float = math.inf
    call: int = 0
    other: int | None = None
    expression: str = ""
    """How ``actual`` is computed from a call's tensors, unless it is one of them as it is."""
    other_expression: str = ""
    """How ``expected`` is computed from the tensors of the call ``other``."""
    origin: tuple[int, int] = (0, 0)
    """Batch and head of the first element, if a problem is judged in pieces."""
    rows: tuple[int, ...] = ()
    """The numbers of the rows, if some of a tensor are judged; none if all are."""


def error_over_bound(actual: Tensor, expected: Tensor, bound: Tensor, maximum: float = math.inf) -> Tensor:
    """Return |actual - expected| / bound in float64; inf if one of the two is a number and the other is not.

    An infinite bound allows anything (float32 arithmetic may overflow there). An infinity of the right sign is
    allowed where the exact value may round to more than ``maximum``, the largest finite value of the format.
    """
    actual = actual.double()
    overflow = actual.isinf() & (actual.sign() * expected + bound >= maximum)
    allowed = (actual == expected) | bound.isposinf() | overflow
    ratio = _quotient(actual, expected, bound)
    return ratio.masked_fill_(allowed, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)


def errors_over_bounds(checks: Sequence[Check]) -> tuple[list[Tensor], list[float]]:
    """Return the error over bound of each check, and the largest of each, 0 where there are no elements.

    A quotient that is finite throughout is the error over bound as it is: what else is allowed has one that is not.
    """
    ratios = [_quotient(c.actual.double(), c.expected, c.bound) for c in checks]
    largest = _maxima(ratios)
    if all(map(math.isfinite, largest)):
        return ratios, largest
    ratios = [
        ratio if math.isfinite(top) else error_over_bound(c.actual, c.expected, c.bound, c.maximum)
        for c, ratio, top in zip(checks, ratios, largest, strict=True)
    ]
    return ratios, _maxima(ratios)


def _quotient(actual: Tensor, expected: Tensor, bound: Tensor) -> Tensor:
    return (actual - expected).abs_().div_(bound)


def _maxima(ratios: Sequence[Tensor]) -> list[float]:
    """Return the largest entry of each tensor, after waiting for their device once."""
    tops = [r.max() if r.numel() else r.new_zeros(()) for r in ratios]
    return torch.stack(tops).tolist() if tops else []


def describe(check: Check, ratio: Tensor) -> Finding:
    """Return the finding for the worst element of ``ratio``, with counts over the whole tensor."""
    actual, expected = check.actual, check.expected
    # NumPy finds the index, because torch.unravel_index imports sympy, which takes longer than most cases.
    index = tuple(int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
    compared = (expected.double(), actual.double(), check.bound, ratio)
    values = [float(x.expand(ratio.shape)[index]) for x in compared]
    row = (check.rows[index[2]] if check.rows else index[2],) if len(index) > 2 else ()
    finite = math.isfinite(values[1]) or values[0] == values[1]
    of_nan = _of_nan(actual, expected, ratio)
    # An lse that was returned in base 2 is float64 here, but what the kernel stored of it is float32.
    dtype = torch.float32 if check.tensor == "lse" else actual.dtype
    spacing = unit_in_the_last_place(values[0], dtype)
    return Finding(
        claim=check.claim,
        kind="error" if finite else "nonfinite",
        tensor=check.tensor,
        index=(*map(add, index, check.origin), *row, *index[3:]),
        expected=as_number(values[0]),
        actual=as_number(values[1]),
        allowed=as_number(values[2]),
        ratio=as_number(values[3]),
        ulps=as_number(_error(values[1] - values[0]) / spacing),
        relative=as_number(relative_error(actual, expected)),
        wrong=int((ratio > 1).sum()),
        total=ratio.numel(),
        nan=int(actual.isnan().sum()),
        posinf=int(actual.isposinf().sum()),
        neginf=int(actual.isneginf().sum()),
        of_nan=of_nan if check.other is None else of_two_calls(of_nan),
        call=check.call,
        expression=check.expression,
        other=check.other,
        other_expression=check.other_expression,
    )


def _of_nan(actual: Tensor, expected: Tensor, ratio: Tensor) -> tuple[str, ...]:
    """Return what was done to NaN: see ``Finding.of_nan``."""
    made = ~actual.isfinite() & expected.isfinite() & (ratio > 1)
    lost = ~actual.isnan() & expected.isnan() & (ratio > 1)
    return tuple(name for name, x in (("lost", lost), ("made", made)) if bool(x.any()))


def of_two_calls(of_nan: tuple[str, ...]) -> tuple[str, ...]:
    """Return what was done to NaN if the expected tensor is that of another call, which may be the wrong one.

    A number in place of the other call's NaN was either lost by this call or made by the other.
    """
    return ("lost", "made") if "lost" in of_nan else of_nan


def unit_in_the_last_place(value: float, dtype: torch.dtype) -> float:
    """Return the distance between neighbouring numbers of a dtype at ``value``, at least that of subnormals."""
    info = torch.finfo(dtype)
    magnitude = min(abs(value), info.max) if not math.isnan(value) else 0.0
    return info.eps * 2.0 ** math.floor(math.log2(max(magnitude, info.smallest_normal)))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of ``actual - expected`` over that of ``expected``; inf if only one of two elements is finite."""
    actual, expected = actual.double(), expected.double()
    # The difference of equal infinities is NaN.
    error = torch.where((actual == expected) | (actual.isnan() & expected.isnan()), 0.0, actual - expected)
    norm = float(expected[expected.isfinite()].norm())
    size = _error(float(error.norm()))
    return size / norm if norm else (math.inf if size else 0.0)


def _error(difference: float) -> float:
    """Return how large a difference is; infinite if it is not a number."""
    return math.inf if math.isnan(difference) else abs(difference)
