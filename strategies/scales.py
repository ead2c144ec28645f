"""Sizes that models have and that no other case comes near: many keys, rows or heads, large tensors, an empty batch.

Kernels are wrong from a size on where a position has too few bits (2^16 keys, offsets of 2^31 elements), where another
kernel is taken for long rows, where a table or the axis of a grid ends (65,535 programs), or where tiles are counted in
another way than they are launched. A batch is empty where experts or segments of a model get no rows in a step.
"""

import math
from dataclasses import dataclass
from random import Random

from kernels.contract import Capabilities
from strategies.by_device import ByDevice
from strategies.case import LAYOUT_FIELDS, Case, changed
from strategies.landmarks import BEYOND
from strategies.lengths import shortest_lengths

MOST_LARGE = ByDevice(cpu=2**25, accelerator=2**33)
"""The most scores of a large case by device type."""
MOST_ELEMENTS = ByDevice(cpu=2**25, accelerator=2**32)
"""The most elements of one of its tensors."""
FEW = 8
"""The most rows beside many keys, and the most keys beside many rows or heads."""
SOME_HEADS = ((1, 1, 1), (2, 1, 8), (2, 2, 1), (4, 1, 2))
"""(batch, heads_kv, group) of a few heads."""
ONE_OR_TWO_HEADS = ((1, 1, 1), (1, 1, 2))
HEADS_OF_ONE = ((1, 1), (3, 1), (2, 8), (8, 2), (16, 1))
"""(heads_kv, group) of each of many batch elements."""
MANY_HEADS_OF_ONE = ((32, 1), (8, 4))
"""The same of a tensor with 2^31 elements, of which one head fits into memory as float64."""


@dataclass(frozen=True)
class Scale:
    """A size that is larger than a power of two, or that is 0.

    Attributes:
        of: what is large: "keys", "rows", "both", "heads" of all batch elements together, or elements of "q" or "k";
            "none" stands for an empty batch.
        exponent: that of the power of two.
        on_cpu: whether it is tried on a CPU too.
    """

    of: str
    exponent: int
    on_cpu: bool = True

    def is_reached(self, case: Case) -> bool:
        """Whether a case is as large."""
        if self.of == "none":
            return case.batch == 0
        return _size(case, self.of) > 2**self.exponent

    def is_claimed(self, c: Capabilities) -> bool:
        """Whether a kernel with these claims answers such calls."""
        match self.of:
            case "keys" | "k":
                return c.unequal_lengths
            case "rows" | "q":
                return c.unequal_lengths and c.seqlens == "any" and c.max_seqlen_q is None
            case "both":
                return c.max_seqlen_q is None
            case "none":
                return c.empty_batch
            case _:
                return True


SCALES: dict[str, Scale] = {
    "keys above 2^16": Scale("keys", 16),
    "an empty batch": Scale("none", 0),
    "rows and keys above 2^11": Scale("both", 11),
    "heads of all sequences above 2^16": Scale("heads", 16),
    "rows above 2^16": Scale("rows", 16),
    "keys above 2^17": Scale("keys", 17),
    "rows and keys above 2^12": Scale("both", 12),
    "keys above 2^20": Scale("keys", 20),
    "rows and keys above 2^15": Scale("both", 15, on_cpu=False),
    "rows and keys above 2^16": Scale("both", 16, on_cpu=False),
    "elements of q above 2^31": Scale("q", 31, on_cpu=False),
    "elements of k above 2^31": Scale("k", 31, on_cpu=False),
}
"""The sizes by name, in the order in which they are tried. Any other field goes with the first."""


def scales_claimed(c: Capabilities, device_type: str, max_seqlen: int | None) -> tuple[str, ...]:
    """Return the names of the sizes that are claimed and that a device has room for, with no longer sequences."""
    return tuple(
        name
        for name, scale in SCALES.items()
        if (scale.on_cpu or device_type != "cpu")
        and scale.is_claimed(c)
        and (max_seqlen is None or scale.of in ("heads", "none"))
        and _fits(scale, c, device_type)
    )


def _fits(scale: Scale, c: Capabilities, device_type: str) -> bool:
    """Whether a device has room for the smallest case of a size, with the fewest columns that are claimed."""
    least_rows, least_keys = (max(least, c.seqlen_multiple) for least in shortest_lengths(c))
    many = 2**scale.exponent + max(BEYOND) + c.seqlen_multiple
    smallest = {
        "keys": (1, least_rows, many),
        "rows": (1, many, least_keys),
        "both": (1, many, many),
        "heads": (many, least_rows, least_keys),
    }
    heads, rows, keys = smallest.get(scale.of, (1, 1, 1))
    elements = heads * max(rows, keys) * min(c.head_dims)
    return heads * rows * keys <= MOST_LARGE[device_type] and elements <= MOST_ELEMENTS[device_type]


def scale_of(case: Case) -> str | None:
    """Return the name of the largest size that a case has reached, the last in ``SCALES``; None if it is of no size."""
    return next((name for name in reversed(SCALES) if SCALES[name].is_reached(case)), None)


def with_scale(c: Capabilities, device_type: str, case: Case, name: str) -> Case:
    """Return a case of a size; its seed says by how much it is larger than needed, and what it has few of.

    It has fewer columns where a device has no room for its tensors, if a smaller head_dim is claimed.
    """
    if scale_of(case) == name:
        return case
    scale, chance = SCALES[name], Random(f"{case.seed} {name}")
    many = 2**scale.exponent + chance.choice(BEYOND)
    few_rows, few_keys = (
        max(least, 1) + chance.choice((0, chance.randrange(FEW))) for least in shortest_lengths(c)
    )
    some = SOME_HEADS if scale.exponent < 20 else ONE_OR_TWO_HEADS
    heads = chance.choice([x for x in some if c.grouped_heads or x[2] == 1])
    rows, keys = few_rows, few_keys
    match scale.of:
        case "keys":
            keys = many
        case "rows":
            rows = many
        case "both":
            rows, keys = many, many + c.unequal_lengths * chance.choice((0, 1, 64))
            heads = chance.choice([x for x in ONE_OR_TWO_HEADS if c.grouped_heads or x[2] == 1])
        case "heads":
            of_one = chance.choice([x for x in HEADS_OF_ONE if c.grouped_heads or x[1] == 1])
            heads = (-(-many // (of_one[0] * of_one[1])), *of_one)
            keys += 1
        case "none":
            heads = (0, *heads[1:])
        case tensor:
            of_one = chance.choice([x for x in MANY_HEADS_OF_ONE if c.grouped_heads or x[1] == 1])
            heads_of_tensor = math.prod(of_one) if tensor == "q" else of_one[0]
            length = 2**16 + chance.choice(BEYOND)
            rows, keys = (length, few_keys) if tensor == "q" else (few_rows, length)
            heads = (-(-many // (heads_of_tensor * length * case.head_dim)), *of_one)
            case = changed(case, **dict.fromkeys(LAYOUT_FIELDS, c.layouts[0]))
    step = c.seqlen_multiple
    batch, heads_kv, group = heads
    case = changed(
        case,
        batch=batch,
        heads_kv=heads_kv,
        group=group,
        seqlen_q=-(-rows // step) * step,
        seqlen_k=-(-keys // step) * step,
    )
    rows = max(_size(case, "q"), _size(case, "k")) // case.head_dim
    most = MOST_ELEMENTS[device_type] // max(1, rows)
    if case.head_dim <= most:
        return case
    return changed(
        case,
        head_dim=max((x for x in c.head_dims if x <= most), default=min(c.head_dims)),
        v_head_dim=c.v_head_dim[0],
    )


def _size(case: Case, of: str) -> int:
    match of:
        case "keys":
            return case.seqlen_k
        case "rows":
            return case.seqlen_q
        case "both":
            return min(case.seqlen_q, case.seqlen_k)
        case "heads":
            return case.batch * case.heads_q
        case tensor:
            batch, heads, length, head_dim = case.shape(tensor)
            return batch * heads * length * head_dim
