"""The running maximum and sum over tiles of keys: a rescaling that is left out."""

import math

import torch
from torch import Tensor

from reference.alternatives.declaration import OUT_AND_LSE, Change, Given, Moved, Scores, alternative
from reference.alternatives.masks import TILES
from reference.bounds import Exact

ORDER = {2: "second", 3: "third", 4: "fourth"}


def growth(scores: Tensor, tile: int, first: int, *, on: bool) -> Tensor:
    """Return the logarithms of the factors by which weights are too large, (B, H, R, N).

    What was summed before the tile with the number ``first``, from 1, is not multiplied by exp(m - m'), and, if ``on``,
    nor is it at later tiles.
    """
    factor, top = torch.zeros_like(scores), torch.full_like(scores[..., :1], -math.inf)
    for number, start in enumerate(range(0, scores.shape[-1], tile), 1):
        new = torch.maximum(top, scores[..., start : start + tile].amax(-1, keepdim=True))
        if number >= first if on else number == first:
            factor[..., :start] += (new - top).masked_fill((top == -math.inf) | (new == -math.inf), 0.0)
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
    "{what} is not rescaled from the second tile of {tile} keys on",
    when=lambda g: g["k"].shape[2] > TILES[0],
    tile=TILES,
    what=("the output", "the sum"),
)
def one_not_rescaled(tile: int, what: str) -> Change:
    """The output alone, or the sum alone, keeps the maximum of earlier tiles."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        large = e.weights * growth(e.scores, tile, 2, on=True).exp()
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
    scopes=(OUT_AND_LSE,),
    limit=(20.0, 30.0, 50.0, 64.0, 80.0, 88.0),
)
def clamped(limit: float) -> Change:
    """Large scores are cut off before the softmax."""
    return Change(scores=lambda g: lambda x, seen: (x.clamp(-limit, limit).where(x > -math.inf, x), seen))


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
    unit = math.log(2.0) if which.startswith("2") else math.log2(math.e)

    def scores(g: Given) -> Scores:
        def rescored(x: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
            top = x.amax(-1, keepdim=True).nan_to_num(neginf=0.0) if x.shape[-1] else x.new_zeros(())
            return top + (x - top) * unit, seen

        return rescored

    return Change(scores=scores)
