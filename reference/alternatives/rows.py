"""Rows that are lost, copied from others, or that see no key and are given something else than 0 and -inf."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from reference.alternatives.declaration import (
    BACKWARD,
    DK_AND_DV,
    OUT_AND_LSE,
    Change,
    Given,
    Moved,
    alternative,
)
from reference.alternatives.heads import is_grouped
from reference.alternatives.masks import TILES, rows_of
from reference.bounds import Exact
from reference.heads import unfold

OF_ROWS = (BACKWARD, DK_AND_DV, ("dk",), ("dv",))
"""The gradients that lack what some rows add to them; dq of these rows is 0 then."""
MOST_ROWS = (16, 32, 64, 128, 256, 1024)
"""Numbers of rows past which rows are tried to be left out."""

SUMS = (1e-6, 1e-8, 1e-10, 1e-12, 1e-20, 1e-30, torch.finfo(torch.float32).tiny)
"""The least sums of weights that are tried, of which a row that sees no key has the logarithm."""


def without_rows(lost: Tensor, g: Given) -> Given:
    """Return the call in which rows, (seqlen_q,) bool, have a dout of 0, so that dk and dv lack what they add."""
    return {**g, "dout": g["dout"].masked_fill(lost[:, None], 0.0)}


@alternative(
    "the last query row is lost in {tensors} where it is alone in its tile of {tile}",
    scopes=OF_ROWS,
    tile=TILES,
)
def lone_row_lost(tile: int) -> Change:
    """A last tile with a single row is left out of the sums over rows."""
    return Change(
        call=lambda g: without_rows((rows_of(g) == g["q"].shape[2] - 1) & (g["q"].shape[2] % tile == 1), g)
    )


@alternative(
    "query rows past the last whole tile of {tile} are lost in {tensors}",
    scopes=OF_ROWS,
    tile=TILES,
)
def tail_rows_lost(tile: int) -> Change:
    """The loop over tiles of queries ends with the last whole one."""
    return Change(call=lambda g: without_rows(rows_of(g) >= g["q"].shape[2] // tile * tile, g))


@alternative(
    "query rows past the last whole tile of {tile} are lost in {tensors}, unless there is no other tile",
    scopes=OF_ROWS,
    tile=TILES,
)
def tail_rows_lost_of_several(tile: int) -> Change:
    """The loop over tiles of queries ends with the last whole one, if there is one."""

    def call(g: Given) -> Given:
        count = g["q"].shape[2]
        return without_rows(rows_of(g) >= (count // tile * tile or count), g)

    return Change(call=call)


@alternative(
    "in {tensors}, the last query row counts once more for each row that its tile of {tile} lacks",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    tile=TILES,
)
def last_row_repeated(tile: int) -> Change:
    """Rows past the end are loaded as the last row."""

    def call(g: Given) -> Given:
        times = torch.ones(g["q"].shape[2], 1, dtype=torch.float64, device=g["q"].device)
        times[-1:] += -g["q"].shape[2] % tile
        return {**g, "dout": g["dout"].double() * times}

    return Change(call=call)


@alternative(
    "the {which} row of {tensors} is 0", scopes=(("out",), ("dq",), ("dk",), ("dv",)), which=("first", "last")
)
def row_is_0(which: str) -> Change:
    """A row is not written."""

    def move(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        value = value.clone()
        value[:, :, 0 if which == "first" else -1] = 0.0
        return value, bound

    return Change(results=lambda e, g: dict.fromkeys(("out", *BACKWARD), move))


@alternative(
    "rows that see no key make NaN in {tensors}", scopes=(BACKWARD, ("dq",), DK_AND_DV, ("dk",), ("dv",))
)
def empty_gradients() -> Change:
    """exp(-inf - -inf) in the backward."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        of_heads = e.empty.any(-1)[..., None, None]

        def row(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            return value.masked_fill(empty_rows(e)[..., None], math.nan), bound

        def all_keys(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            return value.masked_fill(of_heads, math.nan), bound

        return {"dq": row, "dk": all_keys, "dv": all_keys}

    return Change(results=results)


@alternative(
    "the {which} query row is lost in {tensors}",
    scopes=OF_ROWS,
    which=("first", "last"),
)
def row_lost(which: str) -> Change:
    """A loop over rows starts one late or ends one early."""

    def call(g: Given) -> Given:
        return without_rows(rows_of(g) == (0 if which == "first" else g["q"].shape[2] - 1), g)

    return Change(call=call)


@alternative(
    "query rows past {most} are lost in {tensors}",
    scopes=OF_ROWS,
    most=MOST_ROWS,
)
def rows_past_lost(most: int) -> Change:
    """No more rows than that are summed."""
    return Change(call=lambda g: without_rows(rows_of(g) >= most, g))


@alternative(
    "only the last tile of {tile} query rows is summed in {tensors}",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    tile=TILES,
)
def last_rows_alone(tile: int) -> Change:
    """Each tile of rows overwrites what those before it have left."""
    return Change(call=lambda g: without_rows(rows_of(g) < (g["q"].shape[2] - 1) // tile * tile, g))


def _past_tiles(tile: int, g: Given) -> Tensor:
    """Return which rows, folded by row and head, lie past the tiles that seqlen_q alone fills: (heads_q, seqlen_q)."""
    heads, rows = g["q"].shape[1:3]
    group = heads // g["k"].shape[1]
    of_group = torch.arange(heads, device=g["q"].device)[:, None] % group
    return rows_of(g) * group + of_group >= -(-rows // tile) * tile


@alternative(
    "rows of a group, folded by row and head, past the tiles of {tile} that seqlen_q fills are lost in {tensors}",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    when=is_grouped,
    tile=TILES,
)
def folded_rows_lost(tile: int) -> Change:
    """The number of tiles follows from the queries of one head."""
    return Change(call=lambda g: {**g, "dout": g["dout"].masked_fill(_past_tiles(tile, g)[..., None], 0.0)})


@alternative(
    "rows of a group, folded by row and head, past the tiles of {tile} that seqlen_q fills are not computed",
    scopes=(OUT_AND_LSE,),
    when=is_grouped,
    tile=TILES,
)
def folded_rows_not_computed(tile: int) -> Change:
    """The number of tiles follows from the queries of one head; out is 0 and lse -inf there."""
    return not_computed(lambda g: _past_tiles(tile, g))


def not_computed(lost: Callable[[Given], Tensor]) -> Change:
    """Return the change that out is 0 and lse -inf in some rows, (heads_q or 1, seqlen_q) bool."""
    return Change(results=lambda e, g: _none_at(lost(g)))


def _none_at(lost: Tensor) -> dict[str, Moved]:
    return {
        "out": lambda x, bound: (x.masked_fill(lost[..., None], 0.0), bound),
        "lse": lambda x, bound: (x.masked_fill(lost, -math.inf), bound),
    }


@alternative(
    "query rows past {most} are not computed", scopes=(OUT_AND_LSE, ("out",), ("lse",)), most=(8, *MOST_ROWS)
)
def rows_past_not_computed(most: int) -> Change:
    """No more rows than that are asked for; out is 0 and lse -inf there."""
    return not_computed(lambda g: rows_of(g)[None] >= most)


@alternative(
    "rows of a group, folded by {order}, past {most} are not computed",
    scopes=(OUT_AND_LSE,),
    when=is_grouped,
    order=("row and head", "head and row"),
    most=(4, 8, *MOST_ROWS),
)
def folded_rows_past_not_computed(order: str, most: int) -> Change:
    """No more rows of all heads of a group than that are asked for; out is 0 and lse -inf there."""

    def lost(g: Given) -> Tensor:
        heads, rows = g["q"].shape[1:3]
        group = heads // g["k"].shape[1]
        of_group = torch.arange(heads, device=g["q"].device)[:, None] % group
        by_row = order.startswith("row")
        return (rows_of(g) * group + of_group if by_row else of_group * rows + rows_of(g)) >= most

    return not_computed(lost)


@alternative(
    "queries are split evenly into {parts} parts, and those left over are not computed",
    scopes=(OUT_AND_LSE,),
    parts=(2, 4, 8, 16),
)
def rest_of_parts_not_computed(parts: int) -> Change:
    """The number of rows of a part is rounded down; out is 0 and lse -inf in the rest."""
    return not_computed(lambda g: rows_of(g)[None] >= g["q"].shape[2] // parts * parts)


@alternative(
    "the last query head of each group of an odd size is not computed",
    scopes=(OUT_AND_LSE,),
    when=is_grouped,
)
def last_of_odd_group_not_computed() -> Change:
    """Heads of a group are computed in pairs. A last head without a partner keeps an out of 0 and an lse of -inf."""

    def lost(g: Given) -> Tensor:
        heads = torch.arange(g["q"].shape[1], device=g["q"].device)[:, None]
        group = len(heads) // g["k"].shape[1]
        return (heads % group == group - 1) & bool(group % 2)

    return not_computed(lost)


@alternative(
    "under the causal mask, no row past a first tile of {tile} rows that see no key is computed",
    scopes=(OUT_AND_LSE,),
    when=lambda g: bool(g["causal"]) and g["q"].shape[2] > g["k"].shape[2] > 0,
    tile=TILES,
)
def ends_with_empty_tile(tile: int) -> Change:
    """The loop over tiles of queries is left at one without keys; out is 0 and lse -inf from there on."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        return _none_at(in_empty_tiles(e, tile).int().cummax(-1).values.bool())

    return Change(results=results)


def taken(
    to: Callable[[int], int], source: Callable[[int], int]
) -> Callable[[Exact, Given], dict[str, Moved]]:
    """Return what gives a row of out and lse the values of another row; which, follows from the number of rows."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        rows = e.q.shape[2] // e.group

        def move(x: Tensor) -> Tensor:
            x = x.clone()
            if source(rows) >= 0 and 0 <= to(rows) < rows:
                x[:, :, to(rows)] = x[:, :, source(rows)]
            return x

        return {name: lambda value, bound: (move(value), move(bound)) for name in OUT_AND_LSE}

    return results


@alternative(
    "row {row} of out and lse is a copy of the {which}",
    scopes=(OUT_AND_LSE,),
    row=(16, 32, 64, 128),
    which=("row before it", "first row"),
)
def row_copied(row: int, which: str) -> Change:
    """The first row of a later tile is not computed."""
    return Change(results=taken(lambda rows: row, lambda rows: 0 if which == "first row" else row - 1))


@alternative("the last row of out and lse is a copy of the row before it", scopes=(OUT_AND_LSE,))
def last_row_copied() -> Change:
    """The number of the last row is cut to the one before it."""
    return Change(results=taken(lambda rows: rows - 1, lambda rows: rows - 2))


def empty_rows(e: Exact) -> Tensor:
    """Return which rows see no key, (batch, heads_q, seqlen_q) bool."""
    return unfold(e.empty, e.q.shape[1] * e.group)


def in_empty_tiles(e: Exact, tile: int) -> Tensor:
    """Return which rows are in a tile of rows of which none sees a key, (batch, heads_q, seqlen_q) bool."""
    empty = empty_rows(e)
    rows = empty.shape[-1]
    of_tiles = torch.nn.functional.pad(empty, (0, -rows % tile), value=True).unflatten(-1, (-1, tile)).all(-1)
    return of_tiles.repeat_interleave(tile, -1)[..., :rows]


@alternative(
    "rows that see no key have {what} in out",
    scopes=(("out",), ("out", *BACKWARD)),
    what=("NaN", "ones", "the mean of v", "the sum of v"),
)
def empty_out(what: str) -> Change:
    """A division by a sum of 0, or weights that are all equal."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        total = e.v.sum(-2, keepdim=True)
        filled = {
            "NaN": torch.full_like(e.out, math.nan),
            "ones": torch.ones_like(e.out),
            "the mean of v": (total / max(1, e.v.shape[-2])).expand_as(e.out),
            "the sum of v": total.expand_as(e.out),
        }[what]
        heads = e.q.shape[1] * e.group
        size = unfold(e.v.abs().sum(-2, keepdim=True).expand_as(e.out), heads) * 2.0**-10

        def move(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            at = empty_rows(e)[..., None]
            return torch.where(at, unfold(filled, heads), value), torch.where(at, size, bound)

        return {"out": move}

    return Change(results=results)


@alternative(
    "rows that see no key have an lse of {value}",
    scopes=(("lse",),),
    value=(0.0, math.inf, math.nan, -1e4, -1e6, -1e9, -1e30, *map(math.log, SUMS)),
)
def empty_lse(value: float) -> Change:
    """A logarithm of a sum that is not 0, or another number for none."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        def move(lse: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            at = empty_rows(e)
            return lse.masked_fill(at, value), bound.masked_fill(
                at, abs(value) * 2.0**-6 if math.isfinite(value) else 0.0
            )

        return {"lse": move}

    return Change(results=results)


@alternative(
    "rows of a tile of {tile} rows of which none sees a key have an lse of 0", scopes=(("lse",),), tile=TILES
)
def empty_tile_lse(tile: int) -> Change:
    """Tiles of rows without keys are skipped, in memory that is full of zeros."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        skipped = in_empty_tiles(e, tile)
        return {"lse": lambda lse, bound: (lse.masked_fill(skipped, 0.0), bound.masked_fill(skipped, 0.0))}

    return Change(results=results)


@alternative(
    "rows of {tensors} past the last whole tile of {tile} are 0{unless}",
    scopes=(("out",), ("dq",), ("dk",), ("dv",), DK_AND_DV),
    tile=TILES,
    unless=("", ", unless there is no other tile"),
)
def tail_not_written(tile: int, unless: str) -> Change:
    """What is past the last whole tile is not written, in memory that is full of zeros."""

    def move(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        value = value.clone()
        whole = value.shape[2] // tile * tile
        value[:, :, whole if whole or not unless else value.shape[2] :] = 0.0
        return value, bound

    return Change(results=lambda e, g: dict.fromkeys(("out", *BACKWARD), move))
