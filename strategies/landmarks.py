"""Numbers of rows, keys and heads that stand for all: where kernels are wrong, if they are wrong at some of them."""

from random import Random

BEYOND = (1, 2, 33)
"""A size that is to be larger than a power of two is larger by one of these numbers."""
MANY = 1024
"""A sequence of more rows or keys is long. Some kernels take others for such sequences, or parts of so many keys."""
MOST_LANDMARKS = 16
"""So many rows of a sequence, or heads, stand for all."""
FIRST_POWER = 6
"""Exponent: numbers next to this power of two and to each higher one are landmarks."""


def landmarks(length: int, most: int, chance: Random) -> list[int]:
    """Return at most so many numbers below ``length``, in order, at which rows, keys or heads are likely to be wrong.

    They are among the first and the last, those next to the largest power of two, some next to other powers of two and
    to multiples of 128, and some at random.
    """
    if length <= most:
        return list(range(length))
    top = 1 << (length - 1).bit_length() - 1
    powers = [2**i for i in range(FIRST_POWER, top.bit_length())] or [1]
    found = dict.fromkeys(chance.sample((0, length - 1, top - 1, min(top, length - 1)), 4))
    while len(found) < most:
        near = chance.choice(
            (chance.choice(powers), 128 * chance.randrange(length // 128 + 1), chance.randrange(length))
        )
        found[min(max(0, near + chance.choice((-1, 0, 1))), length - 1)] = None
    return sorted([*found][:most])
