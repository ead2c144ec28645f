"""Keys that are dropped, counted though they are none, or counted twice: mostly those past the last whole tile."""

import math

import torch
from torch import Tensor

from reference.alternatives.declaration import EVERY, OUT_AND_LSE, Change, Given, Moved, Scores, alternative
from reference.alternatives.masks import TILES, diagonals_of, is_plain, keys_of, rows_of

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
"""The numbers of keys that are tried as the most that a kernel reads."""
SENTINELS = (
    -1e4,
    -1e3,
    -1e5,
    -1e6,
    -1e9,
    -1e30,
    -3e4,
    0.0,
    -100.0,
    -50.0,
    -1e4 * math.log(2.0),
    -1e6 * math.log(2.0),
    -3e4 * math.log(2.0),
    torch.finfo(torch.float32).min,
)
"""The finite numbers that are tried for scores of hidden keys; a kernel that works in base 2 has them times ln 2."""


def with_keys(kept: Tensor, g: Given) -> Given:
    """Return the call in which no row sees a key that is not ``kept``, (seqlen_k,) bool."""
    mask = g["key_padding_mask"]
    kept = kept.expand(len(g["k"]), -1)
    return {**g, "key_padding_mask": kept if mask is None else mask & kept}


def padded(tile: int, g: Given, *, seen: bool) -> Given:
    """Return the call with k and v filled up with zeros to whole tiles, which rows see as far as the mask lets them."""
    count = g["k"].shape[2]
    more = -count % tile
    fill = torch.nn.functional.pad
    mask = g["key_padding_mask"]
    if mask is None:
        mask = torch.ones(len(g["k"]), count, dtype=torch.bool, device=g["k"].device)
    return {
        **g,
        "diagonals": diagonals_of(g) if g["causal"] or g["pattern"] else g["diagonals"],
        **{name: fill(g[name], (0, 0, 0, more)) for name in ("k", "v")},
        "key_padding_mask": fill(mask, (0, more), value=seen),
    }


def cut_back(g: Given) -> dict[str, Moved]:
    """Return what leaves dk and dv of the keys that a call has, without those that were added."""
    count = g["k"].shape[2]
    return {name: lambda value, bound: (value[:, :, :count], bound[:, :, :count]) for name in ("dk", "dv")}


def _has_tail(g: Given) -> bool:
    return bool(g["k"].shape[2]) and not g["rule"].is_biased


@alternative("keys past the last whole tile of {tile} are dropped", when=_has_tail, tile=TILES)
def tail_dropped(tile: int) -> Change:
    """The loop over tiles of keys ends with the last whole one."""
    return Change(call=lambda g: with_keys(keys_of(g) < g["k"].shape[2] // tile * tile, g))


@alternative(
    "keys past the last whole tile of {tile} are dropped, unless there is no other tile",
    when=_has_tail,
    tile=TILES,
)
def tail_dropped_of_several(tile: int) -> Change:
    """The loop over tiles of keys ends with the last whole one, if there is one."""

    def call(g: Given) -> Given:
        count = g["k"].shape[2]
        return with_keys(keys_of(g) < (count // tile * tile or count), g)

    return Change(call=call)


@alternative("the last tile of {tile} keys is dropped where it is full", when=_has_tail, tile=TILES)
def full_tile_dropped(tile: int) -> Change:
    """The keys of the last tile are counted modulo the size of a tile."""

    def call(g: Given) -> Given:
        count = g["k"].shape[2]
        return with_keys(keys_of(g) < (count if count % tile else count - tile), g)

    return Change(call=call)


@alternative(
    "keys past the end, up to a whole tile of {tile}, count with a score of 0", when=_has_tail, tile=TILES
)
def tail_counted(tile: int) -> Change:
    """Keys that are loaded as zeros past the end are not masked."""

    def call(g: Given) -> Given:
        return padded(tile, g, seen=True)

    return Change(call=call, results=lambda e, g: cut_back(g))


@alternative("keys past {most} are dropped", when=lambda g: g["k"].shape[2] > LENGTHS[0], most=LENGTHS)
def keys_past(most: int) -> Change:
    """No more keys than a buffer or a grid has room for are read."""
    return Change(call=lambda g: with_keys(keys_of(g) < most, g))


@alternative("the {which} key is dropped", which=("first", "last"))
def key_dropped(which: str) -> Change:
    """A loop starts one key late, or ends one key early."""

    def call(g: Given) -> Given:
        at = 0 if which == "first" else g["k"].shape[2] - 1
        return with_keys(keys_of(g) != at, g)

    return Change(call=call)


@alternative("the last key is dropped where its tile of {tile} is not full", when=_has_tail, tile=TILES)
def last_key_of_part_dropped(tile: int) -> Change:
    """The mask of keys past the end starts one key early."""

    def call(g: Given) -> Given:
        count = g["k"].shape[2]
        return with_keys(keys_of(g) < count - (count % tile > 0), g)

    return Change(call=call)


@alternative("a last key alone in its tile of {tile} is dropped", when=_has_tail, tile=TILES)
def lone_key_dropped(tile: int) -> Change:
    """A last tile with a single key is left out."""

    def call(g: Given) -> Given:
        count = g["k"].shape[2]
        return with_keys(keys_of(g) < count - (count % tile == 1), g)

    return Change(call=call)


@alternative(
    "keys are split evenly into parts of {tile} or fewer, and those left over are dropped",
    when=_has_tail,
    tile=TILES,
)
def rest_of_splits_dropped(tile: int) -> Change:
    """The number of keys of a split is rounded down."""

    def call(g: Given) -> Given:
        count = g["k"].shape[2]
        splits = -(-count // tile)
        return with_keys(keys_of(g) < (count // splits * splits if splits else 0), g)

    return Change(call=call)


@alternative("only the last tile of {tile} keys is read", when=_has_tail, tile=TILES)
def last_tile_alone(tile: int) -> Change:
    """Each tile overwrites what those before it have left."""
    return Change(call=lambda g: with_keys(keys_of(g) >= (g["k"].shape[2] - 1) // tile * tile, g))


@alternative("only the first tile of {tile} keys is read", when=_has_tail, tile=TILES)
def first_tile_alone(tile: int) -> Change:
    """The loop over tiles of keys ends after the first one."""
    return Change(call=lambda g: with_keys(keys_of(g) < tile, g))


@alternative(
    "the first tile of {tile} keys is dropped, unless there is no other tile", when=_has_tail, tile=TILES
)
def first_tile_dropped(tile: int) -> Change:
    """The loop over tiles of keys starts with the second one."""
    return Change(call=lambda g: with_keys(keys_of(g) >= (tile if g["k"].shape[2] > tile else 0), g))


def twice(of: Tensor) -> Scores:
    """Return what has the keys ``of``, (seqlen_k,) or (rows, seqlen_k) bool, count twice in each sum."""
    return lambda scores, seen: (scores + math.log(2.0) * of, seen)


@alternative("the keys past the last whole tile of {tile} count twice", when=_has_tail, tile=TILES)
def tail_twice(tile: int) -> Change:
    """The last tile, which is not full, is handled both in the loop and after it."""
    return Change(scores=lambda g: twice(keys_of(g) >= g["k"].shape[2] // tile * tile))


@alternative(
    "tiles of {tile} keys that all of a tile of {rows} rows see as a whole count twice",
    when=lambda g: _has_tail(g) and is_plain(g),
    tile=TILES,
    rows=(16, 64, 128),
)
def whole_tiles_twice(tile: int, rows: int) -> Change:
    """The loop over tiles that need a mask starts with the first tile."""

    def scores(g: Given) -> Scores:
        ends, count = keys_of(g) // tile * tile + tile - 1, g["k"].shape[2]
        of = (ends < count).expand(g["q"].shape[2], -1)
        if g["causal"]:
            of = of & (ends <= diagonals_of(g)[rows_of(g) // rows * rows, None])
        return twice(of.repeat(g["q"].shape[1] // g["k"].shape[1], 1))

    return Change(scores=scores)


@alternative(
    "the last tile of {tile} is moved back to end with the keys, and those in two tiles count twice",
    when=_has_tail,
    tile=TILES,
)
def last_tile_moved(tile: int) -> Change:
    """A last tile that is not full starts before the end of the tile before it."""

    def scores(g: Given) -> Scores:
        count, keys = g["k"].shape[2], keys_of(g)
        of = (keys >= count - tile) & (keys < count // tile * tile) & (count > tile and count % tile > 0)
        return twice(of)

    return Change(scores=scores)


@alternative("the first tile of {tile} keys counts twice", when=_has_tail, tile=TILES)
def first_tile_twice(tile: int) -> Change:
    """The first tile of keys is handled before the loop and in it."""
    return Change(scores=lambda g: twice(keys_of(g) < tile))


@alternative(
    "hidden scores are {score} instead of -inf, in tiles of {tile} keys",
    scopes=(EVERY, OUT_AND_LSE),
    when=lambda g: not g["rule"].is_biased,
    tile=(1, *TILES),
    score=SENTINELS,
)
def finite_sentinel(tile: int, score: float) -> Change:
    """A row that sees no key has equal weights; keys past the end count like masked ones."""

    def call(g: Given) -> Given:
        return padded(tile, g, seen=False)

    def scores(g: Given) -> Scores:
        return lambda x, seen: (x.masked_fill(x == -math.inf, score), None)

    return Change(call=call, scores=scores, results=lambda e, g: cut_back(g))


@alternative(
    "hidden scores are {score} before they are multiplied by sm_scale",
    scopes=(EVERY, OUT_AND_LSE),
    when=lambda g: is_plain(g) and bool(g["causal"]) and g["sm_scale"] != 1.0,
    score=SENTINELS,
)
def sentinel_before_scale(score: float) -> Change:
    """A negative scale makes hidden scores the largest, and a small one lets them count."""

    def scores(g: Given) -> Scores:
        return lambda x, seen: (x.masked_fill(x == -math.inf, score * g["sm_scale"]), None)

    return Change(scores=scores)
