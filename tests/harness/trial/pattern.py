"""What the wrong elements of a tensor have in common, in words. A sentence is said only if it follows from the numbers.

An element tells something about its place only if an error as large as itself would have been seen there: if a
gradient is 0 in a row, that does not show that the row is treated rightly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LISTED = 4
"""Up to this many indices are named one by one."""
WITNESSES = 4
"""At least this many elements must agree on a factor."""
SHARP = 2.0**-6
"""A factor is named only if its relative error is at most this."""

AXES = {"out": "query", "lse": "query", "dq": "query", "dk": "key", "dv": "key", "dbias": "query"}
"""What a row of each tensor belongs to."""


@dataclass(frozen=True)
class ComparedTensor:
    """A tensor as it was judged: all float64 (batch, heads, rows, columns), or without columns if it is lse."""

    tensor: str
    actual: Tensor
    expected: Tensor
    bound: Tensor
    ratio: Tensor

    @property
    def wrong(self) -> Tensor:
        """Which elements have an error above their bound."""
        return self.ratio > 1

    @property
    def telling(self) -> Tensor:
        """Which elements are wrong, or would be if they were 0."""
        return self.wrong | (self.expected.abs() > self.bound)


def sentences(
    compared: Sequence[ComparedTensor], blocks: Mapping[str, int], numbers: Mapping[str, float]
) -> list[str]:
    """Say which of the tensors judged together are wrong, where, and how.

    ``blocks`` are the launch settings that are rows of a tile; ``numbers`` are the names that a factor may have.
    """
    wrong = [c for c in compared if bool(c.wrong.any())]
    told = []
    right = [c.tensor for c in compared if c not in wrong and bool(c.telling.any())]
    if wrong and right:
        names = " and ".join(c.tensor for c in wrong)
        told.append(f"{names} {'is' if len(wrong) == 1 else 'are'} wrong; {', '.join(right)} as expected")
    for c in wrong:
        told += [f"{c.tensor}: {text}" for text in (*_places(c, blocks), *_values(c, numbers))]
    return told


def _places(c: ComparedTensor, blocks: Mapping[str, int]) -> list[str]:
    """Say, for each axis, where all wrong elements are, if there are right ones elsewhere."""
    side = AXES[c.tensor]
    names = ["batch element", f"{side} head", side, "key" if c.tensor == "dbias" else "column"]
    told = []
    for axis, name in zip(range(c.wrong.dim()), names, strict=False):
        others = [other for other in range(c.wrong.dim()) if other != axis]
        wrong = c.wrong.any(others) if others else c.wrong
        telling = c.telling.any(others) if others else c.telling
        text = _where(wrong.tolist(), telling.tolist(), name, blocks if name == side else {})
        if text:
            told.append(text)
    return told


def _where(wrong: list[bool], telling: list[bool], name: str, blocks: Mapping[str, int]) -> str:
    """Say which indices are wrong, if others would have shown an error."""
    at = [index for index, bad in enumerate(wrong) if bad]
    fine = [index for index, tells in enumerate(telling) if tells and not wrong[index]]
    if not at or not fine:
        return ""
    plural = "queries" if name == "query" else f"{name}s"
    first, last, size = at[0], at[-1], len(wrong)
    if len(at) == 1:
        return f"only the last {name}, {first}" if first == size - 1 else f"only {name} {first}"
    listed = f"only {plural} {', '.join(map(str, at[:-1]))} and {at[-1]}" if len(at) <= LISTED else ""
    if listed and name.endswith(("head", "element")):  # of which there are few, and no tiles
        return listed
    if all(index < first for index in fine):
        whole = [f"{block}, {rows}" for block, rows in blocks.items() if first % rows == 0]
        return f"only {plural} from {first} on" + (
            f" (a multiple of {' and of '.join(whole)})" if whole else ""
        )
    if all(index > last for index in fine):
        return f"only {plural} up to {last}"
    return listed


def _values(c: ComparedTensor, numbers: Mapping[str, float]) -> list[str]:
    """Say what the wrong elements are: NaN, 0, or the exact ones times a factor."""
    actual, expected, bound = (x[c.wrong] for x in (c.actual, c.expected, c.bound))
    if bool(actual.isnan().all()):
        return ["every wrong element is NaN"]
    if bool(actual.isinf().all()):
        return ["every wrong element is infinite"]
    if bool((actual == 0).all()):
        return ["every wrong element is 0"]
    if not bool(actual.isfinite().all()) or len(actual) < WITNESSES or len(expected.unique()) < WITNESSES:
        return []
    # The largest element tells the factor best; the others must agree within their bounds.
    at = int(expected.abs().argmax())
    if float(expected[at]) == 0:
        return []
    factor = float(actual[at] / expected[at])
    slack = (1 + abs(factor)) * bound + bound[at] / expected[at].abs() * expected.abs()
    if not bool(((actual - factor * expected).abs() <= slack).all()):
        return []
    # If errors are about as large as a bound, they agree with any factor near 1.
    if float((slack < abs(factor - 1) * expected.abs()).double().mean()) < 0.5:
        return []
    off = float(bound[at] / expected[at].abs())
    called = [text for text, number in numbers.items() if abs(factor - number) <= off + 1e-6 * abs(number)]
    name = f" ({called[0]})" if len(called) == 1 and off <= SHARP * abs(factor) else ""
    return [f"every wrong element is {factor:.4g} times what it should be{name}"]


def known_numbers(sm_scale: float, group: int, dropout_p: float) -> dict[str, float]:
    """Return the numbers that kernels forget, square or invert, by name, without those that are 1."""
    numbers = {
        "2": 2.0,
        "1/2": 0.5,
        "-1": -1.0,
        "ln 2": math.log(2.0),
        "log2 e": math.log2(math.e),
        "sm_scale": sm_scale,
        "1 / sm_scale": 1.0 / sm_scale if sm_scale else math.inf,
        "the group": float(group),
        "1 / the group": 1.0 / group,
        "1 - dropout_p": 1.0 - dropout_p,
        "1 / (1 - dropout_p)": 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else math.inf,
    }
    return {name: number for name, number in numbers.items() if number != 1.0}


def picture(c: ComparedTensor) -> dict[str, Any]:
    """Return error over bound by row and column, the largest over heads and batch elements, for JSON."""
    flat = c.ratio if c.ratio.dim() == 4 else c.ratio[..., None]
    largest = flat.flatten(0, 1).amax(0) if flat.numel() else flat.new_zeros(flat.shape[2:])
    values = torch.nan_to_num(largest.float(), posinf=3e38)
    return {"tensor": c.tensor, "side": AXES[c.tensor], "ratio": values.tolist()}
