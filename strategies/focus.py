"""Narrowed claims: cases that are drawn from a few head dims, layouts and launch settings share compiled code."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from random import Random
from typing import Any, TypeVar

from kernels.contract import CLAIMS, Capabilities
from kernels.contract.tuners import is_tuner
from reference.mask_pattern import MaskPattern
from strategies.case import OF_CALLS, Case
from strategies.cases import BATCHES, GROUPS, HEADS_KV, without_huge_strides
from strategies.limits import Heads

WHOLE_TILES = 16
"""Triton compiles anew for an integer argument that is a multiple of this."""
WIDE = 3
"""From this ``width`` of ``focused`` on, lengths and numbers of heads are drawn without restriction."""

EXTRAS_LEFT = 1 / 3
"""So many extras the narrowest claims have in the mean; the next wider ones have twice as many, and so on."""
LARGEST_SHARE = 1 / 2
"""An extra is left in this share of narrowed claims at most, so that calls without it are tried as well."""
EXTRAS = (
    *("v_head_dim", "softcap", "alibi_slopes", "bias", "sinks"),
    *(part.name for part in fields(MaskPattern)),
)
"""Claims of what a call may ask for beside the usual, which a kernel compiles in only then."""

HEADS: tuple[Heads, ...] = tuple(product(BATCHES, HEADS_KV, GROUPS))
UNGROUPED: tuple[Heads, ...] = tuple(product(BATCHES, HEADS_KV, (1,)))

CONFIGURATIONS = {"cpu": 16, "cuda": 1}
"""So many configurations of a tuner the narrowest claims have. On a CPU the code for one takes a tenth of a second."""

T = TypeVar("T")


@dataclass(frozen=True)
class Focus:
    """What cases are drawn from: the claims and, unless ``heads`` is None, these values of (batch, heads_kv, group)."""

    capabilities: Capabilities
    heads: tuple[Heads, ...] | None = None


def focused(
    capabilities: Capabilities, width: int, seed: object, number: int = 0, device_type: str = "cuda"
) -> Focus:
    """Narrow the claims to one head_dim, layout, dropout_p and kind of call, and to one value of each launch setting.

    ``number`` counts the narrowed claims that a run draws from at the same time. Each takes the next value of every
    field, so that as many of them as a field has values reach all of these. Of a tuner's configurations each takes the
    next ``CONFIGURATIONS``, twice as many for each step of ``width``.

    ``EXTRAS`` are left out but for a share that grows with ``width``, each by itself. Below ``WIDE`` one value is left.

    Then one of the others, chosen at random, gets twice as many values, ``width`` times over: so there are
    2 ** ``width`` combinations, each a compilation. Below a width of ``WIDE`` there are also only 2 ** ``width``
    numbers of heads, and every other time all lengths are multiples of 16. ``seed`` makes the choices: what is drawn
    from with less ``width`` is among what is drawn from with more, so that it is compiled already.
    """
    c = capabilities
    of_calls = [name for name in OF_CALLS if getattr(c, name)]
    tuners = [name for name in c.launch if is_tuner(name)]
    axes = ("head_dims", "layouts", "dropout", *of_calls, *(x for x in c.launch if x not in tuners))
    several = CONFIGURATIONS[device_type] * 2**width
    doubled = Counter(_chance(seed, "axes").choices(axes, k=width))

    def some(name: str, values: Sequence[T]) -> tuple[T, ...]:
        return _some(values, 2 ** doubled[name], _chance(seed, name), number)

    layouts = some("layouts", without_huge_strides(c).layouts)
    if layouts == ("expanded_rows",):  # With rows that are all alike, dq and dk are 0.
        layouts = (c.layouts[0], *layouts)
    narrow_calls: dict[str, Any] = {name: some(name, getattr(c, name)) for name in of_calls}
    narrow = replace(
        c,
        head_dims=some("head_dims", c.head_dims),
        layouts=_with_huge(c, layouts),
        dropout=some("dropout", c.dropout),
        **narrow_calls,
        **_extras(c, width, seed),
        launch={
            name: _some(values, several, _chance(seed, name), number * several)
            if name in tuners
            else some(name, values)
            for name, values in c.launch.items()
        },
    )
    if width >= WIDE:
        return Focus(narrow)
    has_tiles = c.max_seqlen_q is None or c.max_seqlen_q >= WHOLE_TILES
    if has_tiles and _chance(seed, "lengths").random() < 0.5:
        narrow = replace(narrow, seqlen_multiple=math.lcm(c.seqlen_multiple, WHOLE_TILES))
    return Focus(narrow, _some(HEADS if c.grouped_heads else UNGROUPED, 2**width, _chance(seed, "heads")))


def _chance(seed: object, choice: str) -> Random:
    """Return what makes one choice, which no other choice depends on."""
    return Random(f"{seed} {choice}")


def _extras(capabilities: Capabilities, width: int, seed: object) -> dict[str, Any]:
    """Return the narrowed claims of those ``EXTRAS`` that are claimed, and that a case may be without."""
    narrowed: dict[str, Any] = {}
    usual = Capabilities()
    extras = [
        name
        for name in EXTRAS
        if getattr(capabilities, name) != getattr(usual, name)
        and CLAIMS[name].admits(getattr(capabilities, name), Case())
    ]
    for name in extras:
        claimed, nothing = getattr(capabilities, name), getattr(usual, name)
        chance = _chance(seed, name)
        is_left = chance.random() < min(LARGEST_SHARE, (1 + width) * EXTRAS_LEFT / len(extras))
        if is_left and width < WIDE and claimed is not True:
            narrowed[name] = (*nothing, chance.choice([value for value in claimed if value]))
        else:
            narrowed[name] = claimed if is_left else nothing
    return narrowed


def _with_huge(capabilities: Capabilities, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """Add the layout ``huge`` if it is claimed: it is drawn rarely, besides the other layouts."""
    return tuple(layout for layout in capabilities.layouts if layout in (*layouts, "huge"))


def _some(values: Sequence[T], count: int, chance: Random, number: int = 0) -> tuple[T, ...]:
    """Draw ``count`` of the values, or all if there are fewer, and keep their order; a larger count adds to these.

    Of as many successive numbers as there are values, each draws another one first.
    """
    shuffled = chance.sample(range(len(values)), len(values))
    chosen = [shuffled[(number + i) % len(values)] for i in range(min(count, len(values)))]
    return tuple(values[i] for i in sorted(chosen))
