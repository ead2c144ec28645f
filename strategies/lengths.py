"""The lengths that are drawn: the shortest, and those near whole tiles, where kernels have their mistakes."""

from collections.abc import Iterable
from functools import partial
from typing import TypeVar

import hypothesis.strategies as st
from hypothesis.strategies import SearchStrategy

from kernels.contract import Capabilities

MAX_SEQLEN = 512
"""The longest sequence: several whole tiles and a part of one."""
TILES = (16, 32, 64, 128)
T = TypeVar("T")


def shortest_lengths(capabilities: Capabilities) -> tuple[int, int]:
    """Return the smallest seqlen_q and seqlen_k that are claimed."""
    seqlen_k = capabilities.length_from(capabilities.min_seqlen_k)
    return capabilities.length_from(0) if capabilities.unequal_lengths else seqlen_k, seqlen_k


def longest(shortest: int, usual: int, asked: int | None) -> int:
    """Return the largest length that is drawn: what is ``asked`` or ``usual``, and more if that leaves no length."""
    if asked is None or asked < shortest:
        return usual + max(0, shortest - 1)
    return asked


def often(strategy: SearchStrategy[T], times: int) -> list[SearchStrategy[T]]:
    """Return so many copies of the strategy that ``one_of`` draws from it that much more often."""
    return [strategy.map(_same) for _ in range(times)]


def _same(value: T) -> T:
    return value


def lengths(tiles: Iterable[int], smallest: int, largest: int) -> SearchStrategy[int]:
    """Draw lengths of a sequence: the smallest ten, any, and up to three whole tiles, one row more or less.

    An empty sequence tests little, so each other of the smallest lengths is drawn twice as often.
    """
    near_tiles = [
        st.integers(first, min(first + 3 * tile, largest) - 1).map(partial(_near_tiles, tile))
        for tile in sorted(set(tiles))
        if (first := _first_tile(tile, smallest)) < largest
    ]
    smallest_ten = range(smallest, min(smallest + 9, largest) + 1)
    few = st.sampled_from([length for length in smallest_ten for _ in range(2 if length else 1)])
    some = st.integers(smallest, largest)
    return st.one_of(few, some, *(copy for near in near_tiles for copy in often(near, 2)))


def _first_tile(tile: int, smallest: int) -> int:
    """Return the end of the first whole tile that is longer than the smallest length."""
    return (smallest // tile + 1) * tile


def claimed_length_pairs(capabilities: Capabilities, largest: int) -> SearchStrategy[tuple[int, int]]:
    """(seqlen_q, seqlen_k) as ``length_pairs`` has them, counted in the multiples that are claimed."""
    tiles, multiple = _declared_blocks(capabilities) or TILES, capabilities.seqlen_multiple
    of_q, of_k = (length // multiple for length in shortest_lengths(capabilities))
    most_q = largest if capabilities.max_seqlen_q is None else min(capabilities.max_seqlen_q, largest)
    if multiple > 1:
        tiles, most_q, largest = (
            tuple(tile // multiple for tile in tiles if tile >= multiple),
            most_q // multiple,
            largest // multiple,
        )

    def pairs(of_q: int, of_k: int) -> SearchStrategy[tuple[int, int]]:
        if (of_q, most_q) == (of_k, largest):
            return length_pairs(tiles, of_q, largest)
        return st.tuples(lengths(tiles, of_q, most_q), lengths(tiles, of_k, largest))

    if multiple == 1 and most_q == largest:
        return pairs(of_q, of_k)
    # There are so few lengths that every third one drawn would be 0.
    some = pairs(max(of_q, min(1, most_q)), max(of_k, min(1, largest)))
    return st.one_of(pairs(of_q, of_k), *often(some, 5)).map(partial(_times, multiple))


def _times(multiple: int, pair: tuple[int, int]) -> tuple[int, int]:
    return multiple * pair[0], multiple * pair[1]


def length_pairs(tiles: Iterable[int], smallest: int, largest: int) -> SearchStrategy[tuple[int, int]]:
    """(seqlen_q, seqlen_k), most of them up to three whole tiles apart, two keys more or less.

    The corner of a causal mask then lies that near to the corner of a tile, and a bound on tiles that is one off
    shows for one such offset alone.
    """
    seqlen_k = st.one_of(
        lengths(tiles, smallest, largest),
        *(
            st.tuples(st.just(tile), st.integers(first, min(first + 3 * tile, largest) - 1))
            for tile in sorted(set(tiles))
            if (first := _first_tile(tile, smallest)) < largest
        ),
    )
    return st.builds(partial(_pair, smallest, largest), lengths(tiles, smallest, largest), seqlen_k)


def _pair(smallest: int, largest: int, seqlen_q: int, drawn: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(drawn, int):
        return seqlen_q, drawn
    tile, length = drawn
    # seqlen_k is then as far from a whole tile as seqlen_q is; for the shortest, no further than ``_near_tiles`` goes.
    beyond = (seqlen_q + tile // 2) % tile - tile // 2
    seqlen_k = length // tile * tile + beyond + (length - tile) % 5 - 2
    return seqlen_q, min(max(seqlen_k, smallest), largest)


def _near_tiles(tile: int, length: int) -> int:
    # The result is at most a row longer than ``length``, so a failure in which tiles do not matter shrinks further.
    return length // tile * tile + (length - tile) % 3 - 1


def _declared_blocks(capabilities: Capabilities) -> tuple[int, ...]:
    return (*capabilities.launch.get("block_m", ()), *capabilities.launch.get("block_n", ()))
