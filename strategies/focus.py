"""Narrowed claims: cases that are drawn from few of them share compiled code."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import TypeVar

from kernels.contract import Capabilities
from strategies.cases import BATCHES, GROUPS, HEADS_KV, Heads

WHOLE_TILES = 16
"""Triton compiles anew for an integer argument that is a multiple of it."""
WIDE = 3
"""From this width on lengths and numbers of heads are free."""

HEADS: tuple[Heads, ...] = tuple(product(BATCHES, HEADS_KV, GROUPS))
UNGROUPED: tuple[Heads, ...] = tuple(product(BATCHES, HEADS_KV, (1,)))

T = TypeVar("T")


@dataclass(frozen=True)
class Focus:
    """What cases are drawn from: claims and, unless that is None, some (batch, heads_kv, group)."""

    capabilities: Capabilities
    heads: tuple[Heads, ...] | None = None


def without_huge_strides(capabilities: Capabilities) -> Capabilities:
    """The claims without the layout ``huge``, unless no other is claimed."""
    others = tuple(layout for layout in capabilities.layouts if layout != "huge")
    return replace(capabilities, layouts=others or capabilities.layouts)


def focused(capabilities: Capabilities, width: int, chance: Random) -> Focus:
    """Few head dims, layouts and values of each launch setting: one of each at width 0, then 2, 4, 8 and so on.

    Narrower than ``WIDE`` it also has as few numbers of heads, and every other time lengths that are all multiples
    of 16. ``chance`` decides which, so that other processes, and later rounds, draw others.
    """
    c, count = capabilities, 2**width
    narrow = replace(
        c,
        head_dims=_some(c.head_dims, count, chance),
        layouts=_some(c.layouts, count, chance),
        launch={name: _some(values, count, chance) for name, values in c.launch.items()},
    )
    if width >= WIDE:
        return Focus(narrow)
    if chance.random() < 0.5:
        narrow = replace(narrow, seqlen_multiple=math.lcm(c.seqlen_multiple, WHOLE_TILES))
    return Focus(narrow, _some(HEADS if c.grouped_heads else UNGROUPED, count, chance))


def _some(values: Sequence[T], count: int, chance: Random) -> tuple[T, ...]:
    """``count`` of the values, or all of them, in their order."""
    chosen = chance.sample(range(len(values)), min(count, len(values)))
    return tuple(values[i] for i in sorted(chosen))
