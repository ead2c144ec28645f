"""How two findings resemble each other: which tensors are wrong, and whether an error is a rounding's."""

from kernels.contract import GRADIENTS, SMALLEST_NORMAL
from tests.harness.verdict import Finding

OF_ROUNDINGS = 2.0**-7
"""A relative error below this may come from a format of few bits."""

FEW_WRONG = 4
"""Where a format of few bits rounds far beyond the bounds, more than one of this many elements is wrong."""

FAR_ABOVE = 8.0
"""If the worst rounding error is this many times its bound, most other errors exceed their bounds too."""

FEWEST_KEYS = 16
"""With at least this many rows and keys, only a few rows of a tensor are 0 or small differences of large numbers."""


def are_kindred(some: set[str], others: set[str]) -> bool:
    """Whether one mistake may have made all of these tensors wrong.

    A wrong forward may make anything wrong. If lse is wrong and out is right, that is a mistake of its own, because
    gradients are judged at the kernel's lse; and gradients that are wrong are another one.
    """
    return bool(some & others) or "out" in some | others or "lse" not in some | others


def is_small(finding: Finding) -> bool:
    """Whether an error is as small as a rounding error in a format of few bits."""
    return finding.relative is not None and float(finding.relative) < OF_ROUNDINGS


def is_of_format(finding: Finding) -> bool:
    """Whether an error is one that a cast to a format of few bits makes: a small one, or 0 for a tiny number."""
    return is_small(finding) or is_flushed(finding, "float16")


def is_flushed(finding: Finding, dtype: str) -> bool:
    """Whether a number has become 0 that is smaller than the smallest one of full precision in a dtype."""
    return finding.actual == 0 and is_tiny(finding, dtype)


def is_tiny(finding: Finding, dtype: str) -> bool:
    """Whether a number is wrong that is smaller than the smallest one of full precision in a dtype."""
    if finding.kind != "error" or finding.expected is None:
        return False
    return 0 < abs(float(finding.expected)) < SMALLEST_NORMAL[dtype]


def wrong_tensors(finding: Finding) -> set[str]:
    """Return all tensors that a failure has found wrong; none if it names none."""
    return {*finding.tensors, finding.tensor} - {""}


def is_in_common(mine: Finding, other: Finding) -> bool:
    """Whether two findings are of one kind and, where numbers are wrong, of one tensor, and not just of its roundings.

    Of lse an error is small as well where one of many keys is left out, since lse is a logarithm.
    """
    if mine.signature != other.signature:
        return False
    if leaves_roundings(mine, other):
        return False
    return mine.tensor == "" or mine.tensor in wrong_tensors(other)


def leaves_roundings(mine: Finding, left: Finding) -> bool:
    """Whether what is left of a large error is one as small as roundings; of lse any error may be small.

    A small error that is far above its bound, but in few elements, is no rounding: a cast rounds all elements.
    """
    if mine.tensor != left.tensor or left.tensor == "lse" or is_small(mine) or not is_small(left):
        return False
    return left.wrong * FEW_WRONG >= left.total or float(left.ratio or 0.0) < FAR_ABOVE


def is_not_cured(mine: Finding, found: Finding | None) -> bool:
    """Whether a changed case may still fail as before.

    If it fails without giving numbers, that is not known. Neither is it of gradients if out or lse is not finite, as
    gradients are judged at these.
    """
    if found is None:
        return False
    is_hidden = mine.tensor in GRADIENTS and found.kind == "nonfinite" and found.tensor in ("out", "lse")
    return found.hides_numbers or is_hidden or is_in_common(mine, found)
