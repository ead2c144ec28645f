"""How two findings resemble each other: which tensors are wrong, and whether an error has the size of a rounding."""

from kernels.contract import GRADIENTS, SMALLEST_NORMAL
from tests.harness.verdict import Finding

OF_ROUNDINGS = 2.0**-7
"""A relative error below this may be a rounding to a format of few bits."""

FEW_WRONG = 4
"""Where rounding errors are far beyond their bounds, at least one in this many elements is wrong."""

FAR_ABOVE = 8.0
"""If the worst rounding error is this many times its bound, most other errors exceed their bounds too."""

FEWEST_KEYS = 16
"""With at least this many rows and keys, only a few rows of a tensor are 0 or small differences of large numbers."""


def are_kindred(some: set[str], others: set[str]) -> bool:
    """Whether one mistake may have made all of these tensors wrong.

    The first rule that applies decides:

    1. Yes if the two sets have a tensor in common.
    2. Yes if out is in one of them: a wrong out may make anything wrong.
    3. No if lse is in one of them: dk and lse, say, are two mistakes, because gradients are judged at the kernel's own
       lse.
    4. Yes otherwise, as for dk and dv.
    """
    return bool(some & others) or "out" in some | others or "lse" not in some | others


def is_small(finding: Finding) -> bool:
    """Whether an error is as small as a rounding error in a format of few bits."""
    return finding.relative is not None and float(finding.relative) < OF_ROUNDINGS


def is_of_format(finding: Finding) -> bool:
    """Whether an error is one that a cast to a format of few bits makes: a small one, or 0 for a tiny number."""
    return is_small(finding) or is_flushed(finding, "float16")


def is_flushed(finding: Finding, dtype: str) -> bool:
    """Whether a number smaller than the smallest normal one of a dtype has become 0."""
    return finding.actual == 0 and is_tiny(finding, dtype)


def is_tiny(finding: Finding, dtype: str) -> bool:
    """Whether a number is wrong that should be smaller than the smallest normal one of a dtype."""
    if finding.kind != "error" or finding.expected is None:
        return False
    return 0 < abs(float(finding.expected)) < SMALLEST_NORMAL[dtype]


def wrong_tensors(finding: Finding) -> set[str]:
    """Return all tensors that a failure found wrong; none if it names none."""
    return {*finding.tensors, finding.tensor} - {""}


def is_in_common(mine: Finding, other: Finding) -> bool:
    """Whether two findings have the same symptom: one kind and, where numbers are wrong, one tensor.

    A rounding error that is left of a large error is another symptom.
    """
    if mine.signature != other.signature:
        return False
    if leaves_roundings(mine, other):
        return False
    return mine.tensor == "" or mine.tensor in wrong_tensors(other)


def leaves_roundings(mine: Finding, left: Finding) -> bool:
    """Whether a large error shrank to rounding size.

    It is never so for lse: being a logarithm, it changes little where one of many keys is left out. Nor is it so for a
    small error that is far above its bound in few elements: a cast rounds all of them.
    """
    if mine.tensor != left.tensor or left.tensor == "lse" or is_small(mine) or not is_small(left):
        return False
    return left.wrong * FEW_WRONG >= left.total or float(left.ratio or 0.0) < FAR_ABOVE


def is_not_cured(mine: Finding, found: Finding | None) -> bool:
    """Whether a changed case may still fail as before.

    It may if it fails without numbers, as by a crash. So may gradients if out or lse is not finite, as they are judged
    at these.
    """
    if found is None:
        return False
    is_hidden = mine.tensor in GRADIENTS and found.kind == "nonfinite" and found.tensor in ("out", "lse")
    return found.hides_numbers or is_hidden or is_in_common(mine, found)
