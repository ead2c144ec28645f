"""Key padding: families of masks that say which keys of each sequence of a batch may be attended."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from strategies.case import Case

TILES = (16, 32, 64, 128)
SHARES = (0.02, 0.5, 0.98)


def key_padding_mask(case: Case) -> Tensor | None:
    """Return the case's mask, (batch, seqlen_k) bool, True where a key may be attended; None without padding.

    The seed decides the mask of each sequence; a sequence may be left without any key. Raises ValueError for an
    unknown family.
    """
    if case.key_padding == "none":
        return None
    if case.key_padding not in FAMILIES:
        raise ValueError(f"key_padding: got {case.key_padding!r}, expected none or one of {(*FAMILIES,)}")
    chance, keys = random.Random(f"key_padding {case.seed}"), torch.arange(case.seqlen_k, device="cpu")
    masks = [FAMILIES[case.key_padding](keys, chance) for _ in range(case.batch)]
    return torch.stack(masks) if masks else torch.ones(0, case.seqlen_k, dtype=torch.bool, device="cpu")


def several_attended(case: Case) -> bool:
    """Whether any sequence may attend more than one key."""
    mask = key_padding_mask(case)
    return case.seqlen_k > 1 if mask is None else bool((mask.sum(-1) > 1).any())


def is_spoiled(case: Case) -> bool:
    """Whether masked keys and their values are set to NaN, which is done for odd seeds."""
    return case.key_padding != "none" and case.seed % 2 == 1


def _right(keys: Tensor, chance: random.Random) -> Tensor:
    """Attend a prefix of the keys: the others are padding on the right."""
    return keys < _length(len(keys), chance)


def _left(keys: Tensor, chance: random.Random) -> Tensor:
    """Attend a suffix of the keys: the others are padding on the left."""
    return keys >= len(keys) - _length(len(keys), chance)


def _gap(keys: Tensor, chance: random.Random) -> Tensor:
    """Attend all keys but a run of them, which may be a whole tile that is masked with attended keys after it."""
    start, end = sorted(_length(len(keys), chance) for _ in range(2))
    return (keys < start) | (keys >= end)


def _scattered(keys: Tensor, chance: random.Random) -> Tensor:
    """Attend each key by chance: few of them, half, or nearly all."""
    share = chance.choice(SHARES)
    return torch.tensor([chance.random() < share for _ in keys], dtype=torch.bool, device="cpu")


def _length(most: int, chance: random.Random) -> int:
    """Draw a number of keys up to ``most``: 0, 1, near a multiple of a tile, any, or ``most``."""
    tile = chance.choice(TILES)
    near_tile = chance.randint(1, max(1, most // tile)) * tile + chance.randint(-1, 1)
    return min(most, chance.choice((0, 1, near_tile, near_tile, chance.randint(0, most), most)))


FAMILIES: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    "right": _right,
    "left": _left,
    "gap": _gap,
    "scattered": _scattered,
}
