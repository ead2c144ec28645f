"""Numbers and columns: NaN that is hidden, and columns that are dropped."""

import math

import torch
from torch import Tensor

from reference.alternatives.declaration import BACKWARD, EVERY, OUT_AND_LSE, Change, Given, alternative

COLUMNS = (16, 32, 64, 128, 256)


@alternative(
    "NaN becomes 0 in {tensors}", scopes=(("out",), OUT_AND_LSE, BACKWARD, EVERY, ("dq",), ("dk",), ("dv",))
)
def nan_is_0() -> Change:
    """NaN is taken for a row that sees no key, or a maximum drops it."""

    def move(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        return value.nan_to_num(0.0, math.inf, -math.inf), bound.masked_fill(value.isnan(), 0.0)

    return Change(results=lambda e, g: dict.fromkeys(EVERY, move))


@alternative(
    "columns of {what} past {most} are taken for 0",
    when=lambda g: g["q"].shape[-1] > COLUMNS[0],
    what=("q and k", "v"),
    most=COLUMNS,
)
def columns_dropped(what: str, most: int) -> Change:
    """The columns of a tile are fewer than those of the tensors."""

    def call(g: Given) -> Given:
        changed = {}
        for name in what.split(" and "):
            changed[name] = g[name].clone()
            changed[name][..., most:] = 0.0
        return {**g, **changed}

    return Change(call=call)


@alternative(
    "columns of {tensors} from {first} on are a copy of the first ones",
    scopes=(("out",), ("dq",), ("dk",), ("dv",), BACKWARD),
    when=lambda g: g["q"].shape[-1] > COLUMNS[0],
    first=COLUMNS,
)
def columns_repeated(first: int) -> Change:
    """The offset of a further tile of columns is left out."""

    def move(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(value.shape[-1], device=value.device) % first
        return value[..., at], bound[..., at]

    return Change(results=lambda e, g: dict.fromkeys(("out", *BACKWARD), move))


@alternative("the last column of {tensors} is 0", scopes=(("out",), ("dq",), ("dk",), ("dv",)))
def last_column_lost() -> Change:
    """A loop over columns ends one early."""

    def move(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        value = value.clone()
        value[..., -1] = 0.0
        return value, bound

    return Change(results=lambda e, g: dict.fromkeys(("out", *BACKWARD), move))


@alternative(
    "{tensors} past column {most} is 0",
    scopes=(("out",), ("dq",), ("dk",), ("dv",), BACKWARD),
    when=lambda g: g["q"].shape[-1] > COLUMNS[0],
    most=COLUMNS,
)
def columns_not_written(most: int) -> Change:
    """The columns of a tile are fewer than those of what is written."""

    def move(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        value = value.clone()
        value[..., most:] = 0.0
        return value, bound

    return Change(results=lambda e, g: dict.fromkeys(("out", *BACKWARD), move))
