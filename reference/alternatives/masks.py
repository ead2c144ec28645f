"""Masks: which keys a row sees, by the causal diagonal, a pattern of places, or a padding mask."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from reference.alternatives.declaration import BACKWARD, DQ, Change, Given, Scores, alternative
from reference.heads import fold
from reference.mask_pattern import NO_PATTERN

TILES = (16, 32, 64, 128)
"""The sizes of tiles that are tried."""
ADDED = {"bias": "bias", "sinks": "sink", "alibi_slopes": "ALiBi slope", "softcap": "soft-cap"}
"""The fields of a score rule, by what they are called."""


def is_causal(g: Given) -> bool:
    """Whether a call has a causal mask."""
    return bool(g["causal"])


def rows_of(g: Given) -> Tensor:
    """Return the numbers of the queries, (seqlen_q,) int64."""
    return torch.arange(g["q"].shape[2], device=g["q"].device)


def keys_of(g: Given) -> Tensor:
    """Return the numbers of the keys, (seqlen_k,) int64."""
    return torch.arange(g["k"].shape[2], device=g["k"].device)


def diagonals_of(g: Given) -> Tensor:
    """Return the last key on the diagonal of each query, (seqlen_q,) int64."""
    if g["diagonals"] is not None:
        return g["diagonals"]
    shift = g["k"].shape[2] - g["q"].shape[2] if g["alignment"] == "bottom_right" else 0
    return rows_of(g) + shift


def with_diagonals(diagonals: Tensor, g: Given) -> Given:
    """Return the call with its causal mask along these diagonals, (seqlen_q,) int64: as it is if they are its own."""
    return g if torch.equal(diagonals, diagonals_of(g)) else {**g, "diagonals": diagonals}


@alternative("the causal mask is left out", when=is_causal)
def no_mask() -> Change:
    """No row is masked."""
    return Change(call=lambda g: {**g, "causal": False})


@alternative(
    "the causal mask is aligned {corner}",
    when=is_causal,
    corner=("top-left", "bottom-right", "by seqlen_q - seqlen_k instead of seqlen_k - seqlen_q"),
)
def other_corner(corner: str) -> Change:
    """The mask starts at the first key, ends at the last one, or is shifted the other way."""

    def call(g: Given) -> Given:
        shift = g["k"].shape[2] - g["q"].shape[2]
        return with_diagonals(rows_of(g) + {"top-left": 0, "bottom-right": shift}.get(corner, -shift), g)

    return Change(call=call)


@alternative("each row sees {by:+d} keys under the causal mask", when=is_causal, by=(1, -1, 2))
def shifted_mask(by: int) -> Change:
    """The diagonal is off by a key or two."""
    return Change(call=lambda g: with_diagonals(diagonals_of(g) + by, g))


@alternative(
    "the last row of each tile of {tile} sees one key ahead under the causal mask", when=is_causal, tile=TILES
)
def last_row_ahead(tile: int) -> Change:
    """The diagonal is off by one in the last row of each tile of queries."""

    def call(g: Given) -> Given:
        return with_diagonals(diagonals_of(g) + (rows_of(g) % tile == tile - 1), g)

    return Change(call=call)


@alternative(
    "the first row of each tile of {tile} does not see its last key under the causal mask",
    when=is_causal,
    tile=TILES,
)
def first_row_behind(tile: int) -> Change:
    """The diagonal is off by one in the first row of each tile of queries."""

    def call(g: Given) -> Given:
        return with_diagonals(diagonals_of(g) - (rows_of(g) % tile == 0).long(), g)

    return Change(call=call)


@alternative(
    "under the causal mask, a row sees all of the tile of {tile} keys on its diagonal",
    when=is_causal,
    tile=TILES,
)
def whole_tiles_of_keys(tile: int) -> Change:
    """Only whole tiles of keys are masked."""
    return Change(
        call=lambda g: with_diagonals(diagonals_of(g).div(tile, rounding_mode="floor") * tile + tile - 1, g)
    )


@alternative(
    "under the causal mask, the tile of {tile} keys on the diagonal is left out", when=is_causal, tile=TILES
)
def no_tile_on_diagonal(tile: int) -> Change:
    """The loop over tiles of keys ends before the tile on the diagonal."""
    return Change(
        call=lambda g: with_diagonals(diagonals_of(g).div(tile, rounding_mode="floor") * tile - 1, g)
    )


@alternative(
    "under the causal mask, each row of a tile of {tile} sees what its last row does",
    when=is_causal,
    tile=TILES,
)
def as_last_row(tile: int) -> Change:
    """Whole tiles of queries are masked alike, as their last row is."""

    def call(g: Given) -> Given:
        rows = rows_of(g)
        last = (rows // tile * tile + tile - 1).clamp_max(len(rows) - 1)
        return with_diagonals(diagonals_of(g)[last], g)

    return Change(call=call)


@alternative(
    "under the causal mask, no row sees keys past the end of its own tile of {tile} rows",
    when=is_causal,
    tile=TILES,
)
def ends_with_tile(tile: int) -> Change:
    """The loop over tiles of keys ends as if there were as many queries as keys."""

    def call(g: Given) -> Given:
        return with_diagonals(torch.minimum(diagonals_of(g), rows_of(g) // tile * tile + tile - 1), g)

    return Change(call=call)


def remasked(seen_by: Callable[[Given, Tensor], Tensor]) -> Change:
    """Return the change of a causal mask to what a function of a call and its diagonals (1, seqlen_q, 1) says.

    The function returns bool, (1 or group, seqlen_q, seqlen_k), of the query heads of each group.
    """

    def scores(g: Given) -> Scores:
        heads_kv, count = g["k"].shape[1:3]
        group = g["q"].shape[1] // heads_kv
        mask = seen_by(g, diagonals_of(g)[None, :, None]).expand(group, -1, count).flatten(0, 1)
        if g["key_padding_mask"] is not None:
            mask = mask & g["key_padding_mask"][:, None, None]

        def rescored(x: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
            plain = (fold(g["q"], heads_kv).double() @ g["k"].double().mT) * g["sm_scale"]
            return plain.masked_fill(~mask, -math.inf), mask if mask.ndim == 4 else mask[None, None]

        return rescored

    return Change(scores=scores)


def is_plain(g: Given) -> bool:
    """Whether nothing but a causal mask and padding says what rows see, and how."""
    return not g["pattern"] and not g["rule"]


def is_plainly_causal(g: Given) -> bool:
    """Whether a causal mask and padding alone say what rows see, and how."""
    return is_causal(g) and is_plain(g)


def first_of_tile(tile: int, g: Given) -> Tensor:
    """Return the diagonal of the first row of each query's tile, (seqlen_q, 1) int64."""
    return diagonals_of(g)[rows_of(g) // tile * tile, None]


def last_of_tile(tile: int, g: Given) -> Tensor:
    """Return the diagonal of the last row of each query's tile, (seqlen_q, 1) int64."""
    last = (rows_of(g) // tile * tile + tile - 1).clamp_max(len(rows_of(g)) - 1)
    return diagonals_of(g)[last, None]


@alternative("the causal mask is aligned top-left in rows that see a key", when=is_plainly_causal)
def top_left_where_seen() -> Change:
    """The mask starts at the first key. Rows that should see no key are found by the right mask, and see none."""
    return remasked(lambda g, diagonals: (diagonals >= 0) & (keys_of(g) <= rows_of(g)[:, None]))


@alternative("rows that see no key under the causal mask see the first one", when=is_plainly_causal)
def first_key_seen() -> Change:
    """The last key that a row sees is no less than the first."""
    return remasked(lambda g, diagonals: keys_of(g) <= diagonals.clamp_min(0))


@alternative(
    "under the causal mask, whole tiles of {tile} keys before a row's own number are not masked",
    when=is_plainly_causal,
    tile=TILES,
)
def unmasked_by_number(tile: int) -> Change:
    """How many tiles need no mask is computed without seqlen_k - seqlen_q."""

    def seen(g: Given, diagonals: Tensor) -> Tensor:
        return (keys_of(g) <= diagonals) | (keys_of(g) < rows_of(g)[:, None] // tile * tile)

    return remasked(seen)


@alternative("places under the causal mask are rounded to the dtype of the inputs", when=is_plainly_causal)
def rounded_places() -> Change:
    """bfloat16 tells no numbers above 256 apart."""

    def seen(g: Given, diagonals: Tensor) -> Tensor:
        rows, keys = (x.to(g["q"].dtype) for x in (rows_of(g), keys_of(g)))
        return keys <= rows[:, None] + int(diagonals.flatten()[0])

    return remasked(seen)


@alternative("the causal mask is left out in rows that see a key", when=is_plainly_causal)
def no_mask_where_seen() -> Change:
    """No row is masked, but rows that see no key are told apart."""
    return remasked(lambda g, diagonals: (diagonals >= 0) & (keys_of(g) >= 0))


@alternative(
    "under the causal mask, a tile of {rows} rows sees all of each tile of {tile} keys that its last row sees",
    when=is_plainly_causal,
    tile=TILES,
    rows=TILES,
)
def tiles_on_diagonal_whole(tile: int, rows: int) -> Change:
    """Tiles on the diagonal are not masked."""
    return remasked(lambda g, diagonals: keys_of(g) // tile * tile <= last_of_tile(rows, g))


@alternative(
    "under the causal mask, a tile of {rows} rows does not see tiles of {tile} keys that {which}",
    when=is_plainly_causal,
    tile=TILES,
    rows=TILES,
    which=("its first row does not see", "its first row does not see to the end"),
)
def tiles_on_diagonal_lost(tile: int, rows: int, which: str) -> Change:
    """Tiles on the diagonal are left out."""
    end = tile - 1 if which.endswith("end") else 0

    def seen(g: Given, diagonals: Tensor) -> Tensor:
        return (keys_of(g) <= diagonals) & (keys_of(g) // tile * tile + end <= first_of_tile(rows, g))

    return remasked(seen)


def without(hidden: Callable[[Given], Tensor]) -> Change:
    """Return the change that rows do not see further keys, (seqlen_q, seqlen_k) bool."""

    def scores(g: Given) -> Scores:
        of = hidden(g).repeat(g["q"].shape[1] // g["k"].shape[1], 1)

        def rescored(x: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return x.masked_fill(of, -math.inf), ~of if seen is None else seen & ~of

        return rescored

    return Change(scores=scores)


@alternative(
    "the keys of a tile of {rows} rows start with the tile of {tile} {which}",
    when=lambda g: bool(g["pattern"].window) and not g["pattern"].first_keys and not g["pattern"].prefix,
    tile=TILES,
    rows=(1, *TILES),
    which=(
        "in which the window of its last row starts",
        "after that in which the window of its first row starts",
    ),
)
def window_starts_late(tile: int, rows: int, which: str) -> Change:
    """The first tile of keys is that of another row, or one too far."""

    def hidden(g: Given) -> Tensor:
        of_last = "last row" in which
        diagonals = last_of_tile(rows, g) if of_last else first_of_tile(rows, g)
        start = (diagonals - g["pattern"].window + 1).clamp_min(0)
        tiles = (
            start.div(tile, rounding_mode="floor") if of_last else -(-start).div(tile, rounding_mode="floor")
        )
        return keys_of(g) < tiles * tile

    return without(hidden)


@alternative(
    "under the causal mask, a row of a group, folded by {which}",
    when=lambda g: is_plainly_causal(g) and g["q"].shape[1] > g["k"].shape[1],
    which=(
        "row and head, is taken for its remainder by seqlen_q",
        "head and row, is taken for its quotient by the size of the group",
    ),
)
def row_by_remainder(which: str) -> Change:
    """Rows are unfolded in another order than they were folded."""

    def seen(g: Given, diagonals: Tensor) -> Tensor:
        group, rows = g["q"].shape[1] // g["k"].shape[1], rows_of(g)
        of_group = torch.arange(group, device=rows.device)[:, None]
        if which.startswith("row"):
            at = (rows * group + of_group) % max(1, len(rows))
        else:
            at = (of_group * len(rows) + rows) // group
        return keys_of(g) <= (diagonals[0, :, 0][at])[..., None]

    return remasked(seen)


@alternative(
    "under the causal mask, the number of a row is that within its tile of {tile}",
    when=is_plainly_causal,
    tile=TILES,
)
def row_within_tile(tile: int) -> Change:
    """The start of a tile of queries is not added."""
    return remasked(lambda g, diagonals: keys_of(g) <= diagonals - (rows_of(g) // tile * tile)[:, None])


@alternative(
    "the causal mask is aligned as if the {which} were filled up to a multiple of {tile}",
    when=is_causal,
    which=("queries", "keys", "queries and keys"),
    tile=TILES,
)
def aligned_as_filled_up(which: str, tile: int) -> Change:
    """The offset between queries and keys follows from lengths in whole tiles."""

    def call(g: Given) -> Given:
        lacking = {name: -g[x].shape[2] % tile for x, name in (("q", "queries"), ("k", "keys"))}
        by = lacking["keys"] * which.endswith("keys") - lacking["queries"] * which.startswith("queries")
        return with_diagonals(diagonals_of(g) + by, g) if by else g

    return Change(call=call)


@alternative(
    "in a tile of {rows} rows, tiles of {tile} keys are masked causally only {which}",
    when=is_plainly_causal,
    tile=TILES,
    rows=(*TILES, "all"),
    which=(
        "where they would reach the diagonal of as many queries as keys",
        "past those that its first row sees, rounded up",
        "as far from the last one as so many rows reach",
    ),
)
def tiles_unmasked(tile: int, rows: int | str, which: str) -> Change:
    """The number of tiles that need no mask is wrong."""

    def seen(g: Given, diagonals: Tensor) -> Tensor:
        of_tile = max(1, g["q"].shape[2]) if isinstance(rows, str) else rows
        tiles, start = keys_of(g) // tile, (rows_of(g) // of_tile * of_tile)[:, None]
        if which.endswith("rounded up"):
            bare = tiles < -(-(first_of_tile(of_tile, g) + 1) // tile)
        elif which.endswith("reach"):
            last = last_of_tile(of_tile, g).clamp_max(g["k"].shape[2] - 1)
            filled = (start + of_tile).clamp_max(g["q"].shape[2]) - start
            bare = tiles <= last.div(tile, rounding_mode="floor") + (-filled).div(tile, rounding_mode="floor")
        else:
            bare = tiles * tile + tile <= start
        return bare | (keys_of(g) <= diagonals)

    return remasked(seen)


@alternative("the last key is seen by every row under the causal mask", when=is_causal)
def last_key_seen() -> Change:
    """The mask is not applied to the last key."""

    def scores(g: Given) -> Scores:
        last = g["k"].shape[2] - 1

        def rescored(x: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
            if seen is None:
                return x, seen
            plain = (fold(g["q"], g["k"].shape[1]).double() @ g["k"][:, :, last:].double().mT) * g["sm_scale"]
            x, seen = x.clone(), seen.clone()
            x[..., last:], seen[..., last] = plain, True
            return x, seen

        return rescored

    return Change(scores=scores)


@alternative("a causal mask is applied where none is asked for", when=lambda g: not g["causal"])
def mask_unasked() -> Change:
    """Every call is causal."""
    return Change(call=lambda g: {**g, "causal": True})


def _fields(g: Given) -> list[str]:
    return [name for name, value in vars(g["pattern"]).items() if value]


@alternative("the mask pattern (window, chunk, prefix) is ignored", when=lambda g: bool(g["pattern"]))
def no_pattern() -> Change:
    """Nothing but the causal mask hides keys."""
    return Change(call=lambda g: {**g, "pattern": NO_PATTERN})


@alternative(
    "{field} is off by {by:+d}",
    when=lambda g: bool(g["pattern"]),
    field=("window", "window_right", "chunk", "prefix", "first_keys"),
    by=(1, -1),
)
def pattern_off(field: str, by: int) -> Change:
    """A number of the pattern is off by one."""

    def call(g: Given) -> Given:
        value = getattr(g["pattern"], field)
        return {**g, "pattern": replace(g["pattern"], **{field: max(1, value + by)} if value else {})}

    return Change(call=call)


@alternative(
    "{field} is ignored",
    when=lambda g: len(_fields(g)) > 1,
    field=("window", "window_right", "chunk", "prefix", "first_keys"),
)
def field_ignored(field: str) -> Change:
    """A number of the pattern is not looked at."""
    return Change(call=lambda g: {**g, "pattern": replace(g["pattern"], **{field: 0})})


@alternative("key_padding_mask is ignored", when=lambda g: g["key_padding_mask"] is not None)
def no_padding_mask() -> Change:
    """Padded keys count like others."""
    return Change(call=lambda g: {**g, "key_padding_mask": None})


@alternative(
    "key_padding_mask {which}",
    when=lambda g: g["key_padding_mask"] is not None,
    which=("says which keys are hidden", "of the first sequence is used for all"),
)
def other_padding_mask(which: str) -> Change:
    """Its meaning is the other way about, or an offset by the number of the sequence is left out."""

    def call(g: Given) -> Given:
        mask = g["key_padding_mask"]
        if mask is None:
            raise LookupError("another alternative leaves the mask out")
        return {**g, "key_padding_mask": ~mask if "hidden" in which else mask[:1].expand_as(mask)}

    return Change(call=call)


@alternative(
    "{what}",
    when=lambda g: any(getattr(g["rule"], name) is not None for name in ADDED),
    what=(
        "the bias of the first sequence is used for all",
        "the bias is multiplied by sm_scale",
        *(
            f"the {name} of a query head is read at {place}"
            for name in ("bias", "sink", "ALiBi slope")
            for place in ("its key head", "the first query head of its group")
        ),
        *(
            f"the {name} is multiplied by {unit}"
            for name in ("bias", "sink", "ALiBi slope", "soft-cap")
            for unit in ("ln 2", "log2(e)")
        ),
    ),
)
def rule_read(what: str) -> Change:
    """What changes scores besides the scale is looked for at another place, or is in another unit."""
    name = next(field for field, word in ADDED.items() if what.startswith(f"the {word} "))

    def changed(x: Tensor, g: Given) -> Tensor:
        heads, heads_kv = g["q"].shape[1], g["k"].shape[1]
        at = torch.arange(heads, device=g["q"].device) // (heads // heads_kv)
        if what.endswith("used for all"):
            return x[:1]
        if " head" in what:
            at = at * (heads // heads_kv) if what.endswith("of its group") else at
            of_heads = x.ndim == 1 or x.shape[1] > 1
            return x if not of_heads else x[at] if x.ndim == 1 else x[:, at]
        factor = math.log(2.0) if what.endswith("ln 2") else math.log2(math.e)
        return x * (g["sm_scale"] if what.endswith("sm_scale") else factor)

    def call(g: Given) -> Given:
        x = getattr(g["rule"], name)
        if x is None or not name:
            return g
        x = x.double() if isinstance(x, Tensor) else x
        return {**g, "rule": replace(g["rule"], **{name: changed(x, g)})}

    return Change(call=call)


@alternative(
    "the derivative of the soft-cap is left out of {tensors}",
    scopes=(BACKWARD, ("dq", "dk"), DQ, ("dk",)),
    when=lambda g: bool(g["rule"].softcap),
)
def no_slope() -> Change:
    """The gradient of the capped scores is taken for that of the products."""
    return Change(exact=lambda e, g: replace(e, cap_slope=None, softcap=0.0))


@alternative(
    "ALiBi counts distances from the number of the row, also where the lengths differ",
    when=lambda g: g["rule"].alibi_slopes is not None and g["alignment"] == "bottom_right",
)
def alibi_from_row() -> Change:
    """The offset between rows and keys is left out."""

    def scores(g: Given) -> Scores:
        own, other = (g["rule"].added(g["q"], g["k"], corner) for corner in ("bottom_right", "top_left"))
        return lambda x, seen: (x + (other - own), seen)

    return Change(scores=scores)


@alternative(
    "{field} is ignored",
    when=lambda g: bool(g["rule"]),
    field=("softcap", "alibi_slopes", "bias", "sinks"),
)
def rule_ignored(field: str) -> Change:
    """What is done to scores besides the scale is not done."""

    def call(g: Given) -> Given:
        return {**g, "rule": replace(g["rule"], **{field: 0.0 if field == "softcap" else None})}

    return Change(call=call)
