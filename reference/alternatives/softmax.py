"""The running maximum and sum over tiles of keys: a rescaling that is left out."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from reference.alternatives.declaration import EVERY, OUT_AND_LSE, Change, Given, Moved, Scores, alternative
from reference.alternatives.masks import TILES, first_of_tile, is_plain, keys_of, rows_of
from reference.bounds import Exact
from reference.heads import fold, unfold

UNITS = {"ln 2": math.log(2.0), "log2(e)": math.log2(math.e)}
"""Factors by which exponents are off where the unit of the scale is not that of the exponential."""
UNLESS = {"": math.inf, ", unless the maximum grows by more than 8 in base 2": 8.0 * math.log(2.0)}
"""The growth of the maximum, from one tile to the next, up to which a kernel does not rescale, by its words."""
ORDER = {2: "second", 3: "third", 4: "fourth"}


def growth(scores: Tensor, tile: int, first: int, *, on: bool, most: float = math.inf) -> Tensor:
    """Return the logarithms of the factors by which weights are too large, (B, H, R, N).

    What was summed before the tile with the number ``first``, from 1, is not multiplied by exp(m - m'), and, if ``on``,
    nor is it at later tiles. It is where the maximum grows by more than ``most``.
    """
    factor, top = torch.zeros_like(scores), torch.full_like(scores[..., :1], -math.inf)
    for number, start in enumerate(range(0, scores.shape[-1], tile), 1):
        new = torch.maximum(top, scores[..., start : start + tile].amax(-1, keepdim=True))
        if number >= first if on else number == first:
            grown = (new - top).masked_fill((top == -math.inf) | (new == -math.inf), 0.0)
            factor[..., :start] += grown.masked_fill(grown > most, 0.0)
        top = new
    return factor


@alternative(
    "what was summed is not rescaled at the {which} tile of {tile} keys{on}",
    when=lambda g: g["k"].shape[2] > TILES[0],
    tile=TILES,
    which=tuple(ORDER.values()),
    on=("", " and those after it"),
)
def not_rescaled(tile: int, which: str, on: str) -> Change:
    """Both the sum and the output keep the maximum of earlier tiles."""
    first = next(number for number, word in ORDER.items() if word == which)

    def scores(g: Given) -> Scores:
        return lambda x, seen: (x + growth(x, tile, first, on=bool(on)), seen)

    return Change(scores=scores)


@alternative(
    "what was summed is multiplied by the inverse of its factor at each tile of {tile} keys",
    when=lambda g: g["k"].shape[2] > TILES[0],
    tile=TILES,
)
def rescaled_inversely(tile: int) -> Change:
    """The sum and the output are multiplied by exp(m' - m), not exp(m - m')."""

    def scores(g: Given) -> Scores:
        return lambda x, seen: (x + 2.0 * growth(x, tile, 2, on=True), seen)

    return Change(scores=scores)


@alternative(
    "{what} is not rescaled from the second tile of {tile} keys on{unless}",
    when=lambda g: g["k"].shape[2] > TILES[0],
    tile=TILES,
    what=("the output", "the sum"),
    unless=tuple(UNLESS),
)
def one_not_rescaled(tile: int, what: str, unless: str) -> Change:
    """The output alone, or the sum alone, keeps the maximum of earlier tiles."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        large = e.weights * growth(e.scores, tile, 2, on=True, most=UNLESS[unless]).exp()
        total = large.sum(-1)
        heads = e.q.shape[1] * e.group

        def unfolded(x: Tensor) -> Tensor:
            return x.reshape(len(x), heads, -1, *x.shape[3:])

        def out(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            if what == "the output":
                large_out, factor = (
                    unfolded(large @ e.v),
                    unfolded(large.sum(-1, keepdim=True)).clamp_min(1.0),
                )
                return large_out, bound * factor + torch.finfo(g["q"].dtype).eps * large_out.abs()
            return value / unfolded(total)[..., None].clamp_min(1e-300), bound

        def lse(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            return (value, bound) if what == "the output" else (value + unfolded(total).log(), bound)

        return {"out": out, "lse": lse}

    return Change(results=results)


@alternative(
    "scores are limited to {limit} on both sides",
    scopes=(OUT_AND_LSE, EVERY),
    when=lambda g: not g["rule"],
    limit=(20.0, 30.0, 50.0, 64.0, 80.0, 88.0),
)
def clamped(limit: float) -> Change:
    """Large scores are cut off before the softmax, and have no gradient."""
    return Change(
        scores=lambda g: lambda x, seen: (x.clamp(-limit, limit).where(x > -math.inf, x), seen),
        exact=lambda e, g: replace(e, cap_slope=(e.scores.abs() < limit).double()),
    )


OVERFLOWS, IS_0 = (84.0, 94.0), (-106.0, -68.0)
"""Exponents between which float32's exponential leaves its range: it is infinite above 88.7 and 0 below -104. What is
exponentiated may be larger than the score by the logarithm of a number of keys. Below -87.3 it is coarse, and so is a
sum in which weights that are smaller by the roundings of float32 are lost.
"""
OVERFLOWS_FLOAT16 = 8.0
"""Weights are 0 or infinite in float16 beyond this exponent, less the logarithm of a number of keys."""


def _out_of_range(exponents: Callable[[Exact, Given], Tensor]) -> Change:
    """Return the change that the largest weight of a row is the exponential of these (B, heads_kv, R), not of 0.

    The softmax is the same but where these leave the range of float32: lse is infinite there, and neither out is known
    nor any gradient to which the row adds.
    """

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        x = unfold(exponents(e, g), g["q"].shape[1])
        of_weights = OVERFLOWS_FLOAT16 if g["q"].dtype == torch.float16 else OVERFLOWS[0]
        is_unknown = (x > of_weights) | (x < max(IS_0[1], -of_weights))
        of_keys = is_unknown.any(-1).unflatten(1, (g["k"].shape[1], -1)).any(2)
        at_border = ((x > OVERFLOWS[0]) & (x < OVERFLOWS[1])) | ((x > IS_0[0]) & (x < IS_0[1]))

        def lse(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            value = value.masked_fill(x >= OVERFLOWS[1], math.inf).masked_fill(x <= IS_0[0], -math.inf)
            return value, bound.masked_fill(at_border, math.inf)

        def unknown(at: Tensor) -> Moved:
            return lambda value, bound: (value.masked_fill(at, 0.0), bound.masked_fill(at, math.inf))

        of_rows, of_heads = unknown(is_unknown[..., None]), unknown(of_keys[..., None, None])
        return {"out": of_rows, "lse": lse, "dq": of_rows, "dk": of_heads, "dv": of_heads}

    return Change(results=results)


@alternative("no maximum is subtracted from scores before their exponential", scopes=(OUT_AND_LSE,))
def no_maximum() -> Change:
    """The exponential of large scores overflows, and that of scores far below 0 is 0."""
    return _out_of_range(lambda e, g: e.row_max)


@alternative(
    "the maximum that is subtracted from scores is that of all {rows} rows of a tile",
    scopes=(OUT_AND_LSE,),
    when=lambda g: g["q"].shape[2] > 1,
    rows=TILES,
)
def maximum_of_tile(rows: int) -> Change:
    """Rows with scores far below those of other rows lose all weights."""

    def exponents(e: Exact, g: Given) -> Tensor:
        top = e.row_max.masked_fill(e.empty, -math.inf)
        count = top.shape[-1]
        tiles = torch.nn.functional.pad(top, (0, -count % rows), value=-math.inf).unflatten(-1, (-1, rows))
        below = top - tiles.amax(-1).repeat_interleave(rows, -1)[..., :count]
        return below.masked_fill(e.empty, 0.0)

    return _out_of_range(exponents)


@alternative(
    "the maximum that is subtracted from scores is that of all {of}",
    scopes=(OUT_AND_LSE,),
    of=(
        "heads at the same row",
        "heads of a group at the same row",
        "sequences at the same row",
        "rows of a head",
        "rows of a group",
    ),
)
def maximum_of_others(of: str) -> Change:
    """Rows with scores far below those of other heads, sequences or rows lose all weights."""

    def exponents(e: Exact, g: Given) -> Tensor:
        top = unfold(e.row_max.masked_fill(e.empty, -math.inf), g["q"].shape[1])
        by_group = top.unflatten(1, (g["k"].shape[1], -1))
        most = {
            "heads at the same row": top.amax(1, keepdim=True),
            "heads of a group at the same row": by_group.amax(2, keepdim=True)
            .expand_as(by_group)
            .flatten(1, 2),
            "sequences at the same row": top.amax(0, keepdim=True),
            "rows of a head": top.amax(2, keepdim=True),
            "rows of a group": by_group.amax((2, 3), keepdim=True).expand_as(by_group).flatten(1, 2),
        }[of]
        return fold(top - most, g["k"].shape[1]).masked_fill(e.empty, 0.0)

    return _out_of_range(exponents)


@alternative(
    "the maximum that is subtracted from scores is that of all keys, also of hidden ones",
    scopes=(OUT_AND_LSE,),
    when=lambda g: bool(g["causal"]) and not g["rule"],
)
def maximum_of_hidden() -> Change:
    """Scores are masked after their maximum was taken; a row with a hidden score far above the others loses all."""

    def exponents(e: Exact, g: Given) -> Tensor:
        return (e.row_max - (e.q @ e.k.mT * e.sm_scale).amax(-1)).masked_fill(e.empty, 0.0)

    return _out_of_range(exponents)


@alternative(
    "the maximum that is subtracted from scores is taken before a negative sm_scale, so that it is their minimum",
    scopes=(OUT_AND_LSE,),
    when=lambda g: g["sm_scale"] < 0 and not g["rule"],
)
def minimum_subtracted() -> Change:
    """The exponential overflows where the scores of a row differ much."""

    def exponents(e: Exact, g: Given) -> Tensor:
        least = e.scores.masked_fill(e.scores == -math.inf, math.inf).amin(-1)
        return (e.row_max - least).masked_fill(e.empty, 0.0)

    return _out_of_range(exponents)


@alternative(
    "the scale of scores is {which} times as large in tiles of {tile} keys that need a mask, in tiles of {rows} rows",
    when=is_plain,
    which=tuple(UNITS),
    tile=TILES,
    rows=TILES,
)
def scale_of_masked_tiles(which: str, tile: int, rows: int) -> Change:
    """The code for tiles of keys that are not full, or that the diagonal cuts, has another unit."""

    def scores(g: Given) -> Scores:
        tiles, count = keys_of(g) // tile, g["k"].shape[2]
        is_masked = (tiles * tile + tile > count).expand(len(rows_of(g)), -1)
        if g["causal"]:
            is_masked = is_masked | (tiles * tile + tile - 1 > first_of_tile(rows, g))
        factor = torch.ones_like(is_masked, dtype=torch.float64).masked_fill(is_masked, UNITS[which])
        of_group = factor.repeat(g["q"].shape[1] // g["k"].shape[1], 1)
        return lambda x, seen: (x * of_group, seen)

    return Change(scores=scores)


@alternative("scores that are NaN count as {score}", scopes=(OUT_AND_LSE,), score=("0", "hidden"))
def nan_score(score: str) -> Change:
    """A comparison with NaN is false."""
    value = 0.0 if score == "0" else -math.inf
    return Change(scores=lambda g: lambda x, seen: (x.masked_fill(x.isnan(), value), seen))


@alternative(
    "weights are {which} of the score less its maximum",
    which=("2 to the power", "e to the power of log2(e) times the"),
)
def other_power(which: str) -> Change:
    """The unit of the exponents is not that of the exponential."""
    unit = UNITS["ln 2" if which.startswith("2") else "log2(e)"]

    def scores(g: Given) -> Scores:
        def rescored(x: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
            top = x.amax(-1, keepdim=True).nan_to_num(neginf=0.0) if x.shape[-1] else x.new_zeros(())
            return top + (x - top) * unit, seen

        return rescored

    return Change(scores=scores)
