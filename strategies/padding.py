"""Key padding: which keys of each sequence of a batch may be attended, by family."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from strategies.case import Case

TILES = (16, 32, 64, 128)
SHARES = (0.02, 0.5, 0.98)


def key_padding_mask(case: Case) -> Tensor | None:
    """The mask of the case, (batch, seqlen_k) bool, True where a key may be attended; None without padding.

    Each sequence has its own, decided by the seed; of some no key is left. Raises ValueError for a family that is
    not known.
    """
    if case.key_padding == "none":
        return None
    if case.key_padding not in FAMILIES:
        raise ValueError(f"key_padding: got {case.key_padding!r}, expected none or one of {(*FAMILIES,)}")
    chance, keys = random.Random(f"key_padding {case.seed}"), torch.arange(case.seqlen_k)
    masks = [FAMILIES[case.key_padding](keys, chance) for _ in range(case.batch)]
    return torch.stack(masks) if masks else torch.ones(0, case.seqlen_k, dtype=torch.bool)


def is_spoiled(case: Case) -> bool:
    """Whether masked keys and their values are NaN, as they are for every other seed."""
    return case.key_padding != "none" and case.seed % 2 == 1


def _right(keys: Tensor, chance: random.Random) -> Tensor:
    """The first keys, as many as the sequence is long."""
    return keys < _length(len(keys), chance)


def _left(keys: Tensor, chance: random.Random) -> Tensor:
    """The last keys."""
    return keys >= len(keys) - _length(len(keys), chance)


def _gap(keys: Tensor, chance: random.Random) -> Tensor:
    """All but a run of keys: some of those that follow may see none of a whole tile."""
    start, end = sorted(_length(len(keys), chance) for _ in range(2))
    return (keys < start) | (keys >= end)


def _scattered(keys: Tensor, chance: random.Random) -> Tensor:
    """Any keys: few, half or nearly all."""
    share = chance.choice(SHARES)
    return torch.tensor([chance.random() < share for _ in keys], dtype=torch.bool)


def _length(most: int, chance: random.Random) -> int:
    """0, 1, around whole tiles, any, or the most."""
    tile = chance.choice(TILES)
    near_tile = chance.randint(1, max(1, most // tile)) * tile + chance.randint(-1, 1)
    return min(most, chance.choice((0, 1, near_tile, near_tile, chance.randint(0, most), most)))


FAMILIES: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    "right": _right,
    "left": _left,
    "gap": _gap,
    "scattered": _scattered,
}
