"""Splits of the keys that a kernel handles by themselves and merges by their lse, as in decoding."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from reference.alternatives.backward import OF_DS, has_gradients, with_ds
from reference.alternatives.declaration import BACKWARD, OUT_AND_LSE, Change, Given, Moved, alternative
from reference.alternatives.keys import with_keys
from reference.alternatives.masks import is_plainly_causal, keys_of, remasked
from reference.alternatives.rows import empty_rows
from reference.bounds import Exact
from reference.heads import fold, unfold

SIZES = (32, 64, 128, 256)
"""The numbers of keys of a split that are tried."""
UNIT = 16
"""The multiple to which a kernel may round up the size of equal splits."""
MOST = 8
"""The most splits of kernels that limit their number."""


def _of_equal(tile: int, unit: int, most: int | None = None) -> Callable[[int], int]:
    """Return the size of equal splits by the number of keys: up to ``tile``, but no more than ``most`` of them.

    It is rounded up to a multiple of ``unit``.
    """

    def size(count: int) -> int:
        splits = -(-count // tile)
        of_one = -(-count // (splits if most is None else min(splits, most)))
        return -(-of_one // unit) * unit

    return size


def _of_fixed(tile: int) -> Callable[[int], int]:
    return lambda count: tile


SPLITS: Mapping[str, Callable[[int], int]] = {
    **{f"{tile} keys": _of_fixed(tile) for tile in (UNIT, *SIZES)},
    **{f"equal numbers of keys, up to {tile}": _of_equal(tile, 1) for tile in SIZES},
    **{f"equal numbers of keys, up to {tile}, in whole {UNIT}s": _of_equal(tile, UNIT) for tile in SIZES},
    **{
        f"equal numbers of keys, up to {tile}, in no more than {MOST} splits": _of_equal(tile, 1, MOST)
        for tile in SIZES
    },
}
"""How many keys a split has, but for the last one, by the number of keys of a call."""


def _has_splits(g: Given) -> bool:
    """Whether a call may have several splits, and plain scores."""
    return g["k"].shape[2] > UNIT and not g["rule"]


def _size(split: str, g: Given) -> int:
    """Return the number of keys of a split in a call."""
    return SPLITS[split](g["k"].shape[2])


def _lse_of_splits(split: str, e: Exact, g: Given) -> Tensor:
    """Return the lse of each split, (splits, batch, heads_q, seqlen_q), -inf where a row sees none of its keys."""
    of_splits = [part.logsumexp(-1) for part in e.scores.split(_size(split, g), -1)]
    return torch.stack([unfold(lse, e.q.shape[1] * e.group) for lse in of_splits])


@alternative(
    "weights of splits of {split} have no gradient in {tensors}",
    scopes=OF_DS,
    when=lambda g: has_gradients(g) and _has_splits(g) and not g["dropout_p"],
    split=tuple(SPLITS),
)
def splits_detached(split: str) -> Change:
    """Splits are merged by factors that autograd takes for constants, so that each has a delta of its own."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        dp = e.weights * (fold(g["dout"], g["k"].shape[1]).double() @ e.v.mT)
        delta, of_splits, size = dp.sum(-1, keepdim=True), [], _size(split, g)
        for p, own in zip(e.weights.split(size, -1), dp.split(size, -1), strict=True):
            of_splits.append(
                p * (delta - own.sum(-1, keepdim=True) / p.sum(-1, keepdim=True).clamp_min(1e-300))
            )
        return with_ds(torch.cat(of_splits, -1), e, g)

    return Change(results=results)


@alternative(
    "under the causal mask, the number of a key is that within its split of {split}",
    when=lambda g: is_plainly_causal(g) and _has_splits(g),
    split=tuple(SPLITS),
)
def key_within_split(split: str) -> Change:
    """The start of a split is not added."""
    return remasked(lambda g, diagonals: keys_of(g) % _size(split, g) <= diagonals)


@alternative(
    "the causal mask of a split of {split} is aligned as if the call had these keys alone",
    when=lambda g: is_plainly_causal(g) and _has_splits(g),
    split=tuple(SPLITS),
)
def mask_of_split(split: str) -> Change:
    """The offset between queries and keys follows from the length of the split."""

    def seen(g: Given, diagonals: Tensor) -> Tensor:
        keys, count, size = keys_of(g), g["k"].shape[2], _size(split, g)
        of_split = (count - keys // size * size).clamp_max(size)
        return keys % size <= diagonals - count + of_split

    return remasked(seen)


@alternative(
    "a split of {split} in which {whose} sees no key has an lse of 0",
    scopes=(OUT_AND_LSE,),
    when=lambda g: is_plainly_causal(g) and _has_splits(g),
    whose=("a row", "a row that sees other keys"),
    split=tuple(SPLITS),
)
def empty_split_counts(whose: str, split: str) -> Change:
    """Such a split counts like one of a weight of 1 and an output of 0."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        empty = (_lse_of_splits(split, e, g) == -math.inf).sum(0).double()
        if whose == "a row that sees other keys":
            empty = empty.masked_fill(empty_rows(e), 0.0)
        true = unfold(e.lse, e.q.shape[1] * e.group)
        whole = torch.logaddexp(true, empty.log())
        rounding = torch.finfo(torch.float32).eps * whole.abs().nan_to_num(0.0, 0.0, 0.0)
        return {
            "out": lambda value, bound: (value * (true - whole).exp().nan_to_num(0.0)[..., None], bound),
            "lse": lambda value, bound: (whole, bound + rounding),
        }

    return Change(results=results)


@alternative(
    "of the splits of {split}, as many are merged as the largest power of two that they reach, the others dropped",
    when=_has_splits,
    split=tuple(SPLITS),
)
def splits_of_power_of_two(split: str) -> Change:
    """Splits are merged in pairs, or read by a block of a power of two."""

    def call(g: Given) -> Given:
        count, size = g["k"].shape[2], _size(split, g)
        kept = 1 << (-(-count // size)).bit_length() - 1
        return with_keys(keys_of(g) < kept * size, g)

    return Change(call=call)


@alternative(
    "v of the last split of {split} is read so that it ends with the keys, but k is not",
    when=_has_splits,
    split=tuple(SPLITS),
)
def last_values_moved(split: str) -> Change:
    """The last split, of fewer keys than the others, is moved back to be full for v alone."""

    def places(g: Given) -> Tensor:
        keys, count, size = keys_of(g), g["k"].shape[2], _size(split, g)
        start = keys // size * size
        return keys - start + start.clamp_max(max(0, count - size))

    def call(g: Given) -> Given:
        return {**g, "v": g["v"][:, :, places(g)]}

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        def move(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            at, none = places(g), torch.zeros_like(value)
            return none.index_add(2, at, value), none.index_add(2, at, bound)

        return {"dv": move}

    return Change(call=call, results=results)


def _has_lse(g: Given) -> bool:
    return g.get("lse") is not None and _has_splits(g)


@alternative(
    "lse is that of the split of {split} with the largest one",
    scopes=(("lse",), ("lse", *BACKWARD)),
    when=_has_lse,
    split=tuple(SPLITS),
)
def lse_of_largest_split(split: str) -> Change:
    """Splits are merged by a maximum."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        top = _lse_of_splits(split, e, g).amax(0)
        return {"lse": lambda lse, bound: (top, bound)}

    return Change(results=results)


@alternative(
    "lse leaves out the {which} split of {split}, if there are several",
    scopes=(("lse",), ("lse", *BACKWARD)),
    when=_has_lse,
    which=("first", "last"),
    split=tuple(SPLITS),
)
def lse_without_split(which: str, split: str) -> Change:
    """A loop over splits starts one late, or ends one early."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        keys, size = e.scores.shape[-1], _size(split, g)
        if keys <= size:
            return {}
        kept = e.scores[..., size:] if which == "first" else e.scores[..., : (keys - 1) // size * size]
        without = unfold(kept.logsumexp(-1), e.q.shape[1] * e.group)
        return {"lse": lambda lse, bound: (without, bound)}

    return Change(results=results)
