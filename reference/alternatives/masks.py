"""Masks: which keys a row sees, by the causal diagonal, a pattern of places, or a padding mask."""

from dataclasses import replace

import torch
from torch import Tensor

from reference.alternatives.declaration import Change, Given, Scores, alternative
from reference.heads import fold
from reference.mask_pattern import NO_PATTERN

TILES = (16, 32, 64, 128)
"""The sizes of tiles that are tried."""


def is_causal(g: Given) -> bool:
    """Whether a call has a causal mask."""
    return bool(g["causal"])


def rows_of(g: Given) -> Tensor:
    """Return the numbers of the queries, (seqlen_q,) int64."""
    return torch.arange(g["q"].shape[2], device=g["q"].device)


def diagonals_of(g: Given) -> Tensor:
    """Return the last key on the diagonal of each query, (seqlen_q,) int64."""
    if g["diagonals"] is not None:
        return g["diagonals"]
    shift = g["k"].shape[2] - g["q"].shape[2] if g["alignment"] == "bottom_right" else 0
    return rows_of(g) + shift


def with_diagonals(diagonals: Tensor, g: Given) -> Given:
    """Return the call with its causal mask along other diagonals, (seqlen_q,) int64."""
    return {**g, "diagonals": diagonals}


@alternative("the causal mask is left out", when=is_causal)
def no_mask() -> Change:
    """No row is masked."""
    return Change(call=lambda g: {**g, "causal": False})


@alternative("the causal mask is aligned {corner}", when=is_causal, corner=("top-left", "bottom-right"))
def other_corner(corner: str) -> Change:
    """The mask starts at the first key, or ends at the last one."""

    def call(g: Given) -> Given:
        shift = g["k"].shape[2] - g["q"].shape[2] if corner == "bottom-right" else 0
        return with_diagonals(rows_of(g) + shift, g)

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
    "{field} is ignored",
    when=lambda g: bool(g["rule"]),
    field=("softcap", "alibi_slopes", "bias", "sinks"),
)
def rule_ignored(field: str) -> Change:
    """What is done to scores besides the scale is not done."""

    def call(g: Given) -> Given:
        return {**g, "rule": replace(g["rule"], **{field: 0.0 if field == "softcap" else None})}

    return Change(call=call)
