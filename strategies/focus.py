"""Narrowed claims: cases that are drawn from few of them share compiled code."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from kernels.contract import Capabilities

WHOLE_TILES = 16
"""Triton compiles anew for an integer argument that is a multiple of it."""
WIDE = 3
"""From this round on lengths and groups of heads are free."""

T = TypeVar("T")


def without_huge_strides(capabilities: Capabilities) -> Capabilities:
    """The claims without the layout ``huge``, unless no other is claimed."""
    others = tuple(layout for layout in capabilities.layouts if layout != "huge")
    return replace(capabilities, layouts=others or capabilities.layouts)


def focused(capabilities: Capabilities, width: int, chance: Random) -> Capabilities:
    """Claims with few head dims, layouts and values of each launch setting: one at width 0, then 2, 4, 8 and so on.

    Narrower than ``WIDE``, half of them also have lengths that are all multiples of 16, or one query head for each
    key head. ``chance`` decides which, so that other processes, and later rounds, draw others.
    """
    c, count = capabilities, 2**width
    narrow = replace(
        c,
        head_dims=_some(c.head_dims, count, chance),
        layouts=_some(c.layouts, count, chance),
        launch={name: _some(values, count, chance) for name, values in c.launch.items()},
    )
    if width < WIDE and chance.random() < 0.5:
        narrow = replace(narrow, seqlen_multiple=math.lcm(c.seqlen_multiple, WHOLE_TILES))
    if width < WIDE and chance.random() < 0.5:
        narrow = replace(narrow, grouped_heads=False)
    return narrow


def _some(values: Sequence[T], count: int, chance: Random) -> tuple[T, ...]:
    """``count`` of the values, or all of them, in their order."""
    chosen = chance.sample(range(len(values)), min(count, len(values)))
    return tuple(values[i] for i in sorted(chosen))
