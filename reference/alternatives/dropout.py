"""Dropout: a mask that is left out, unscaled, or of another seed or place."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from reference.alternatives.declaration import Change, Given, alternative
from reference.alternatives.masks import TILES
from reference.bounds import Exact


def has_dropout(g: Given) -> bool:
    """Whether weights are dropped."""
    return bool(g["dropout_p"])


@alternative("no weight is dropped", when=has_dropout)
def not_dropped() -> Change:
    """dropout_p is not looked at."""
    return Change(call=lambda g: {**g, "dropout_p": 0.0})


@alternative(
    "the seed of dropout is {which}",
    when=has_dropout,
    which=("the next one", "0", "cut to its lower 32 bits"),
)
def other_seed(which: str) -> Change:
    """Another mask is drawn, which is as random."""

    def call(g: Given) -> Given:
        seed = g["dropout_seed"]
        found = {"0": 0, "the next one": seed + 1}.get(which, seed % 2**32)
        return {**g, "dropout_seed": found}

    return Change(call=call)


def _with_keep(change: Callable[[Tensor, Exact], Tensor]) -> Change:
    """Return the change to other factors of the weights, made of the right ones (batch, heads_kv, rows, seqlen_k)."""

    def exact(e: Exact, g: Given) -> Exact:
        if e.keep is None:
            return e
        keep = change(e.keep, e)
        return replace(e, keep=keep, out=(e.weights * keep) @ e.v)

    return Change(exact=exact)


@alternative("weights that are kept are not divided by 1 - dropout_p", when=has_dropout)
def kept_unscaled() -> Change:
    """A kept weight stays as it is."""
    return _with_keep(lambda keep, e: keep / e.keep_scale)


@alternative(
    "the dropout mask of {which} is taken",
    when=has_dropout,
    which=(
        "the first sequence",
        "the first query head of each group",
        *(f"the place of a key in its tile of {tile}" for tile in TILES),
        *(f"the place of a row in its tile of {tile}" for tile in TILES),
    ),
)
def mask_of_another(which: str) -> Change:
    """An offset is left out of the number by which the mask is drawn."""

    def change(keep: Tensor, e: Exact) -> Tensor:
        if which == "the first sequence":
            return keep[:1].expand_as(keep)
        of_heads = keep.unflatten(2, (e.group, -1))
        if which.endswith("group"):
            return of_heads[:, :, :1].expand_as(of_heads).flatten(2, 3)
        tile = int(which.rpartition(" ")[2])
        dim = 4 if " key " in which else 3
        at = torch.arange(of_heads.shape[dim], device=keep.device) % tile
        return of_heads.index_select(dim, at).flatten(2, 3)

    return _with_keep(change)
