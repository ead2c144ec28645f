"""How much of the space of a kernel's cases was tried: levels of its fields, and pairs and triples of levels."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from kernels.contract.tuners import MOST_NAMED, is_tuner
from strategies.axes import Axis, Level
from strategies.case import Case
from strategies.design import Design

SET_BY_LAWS = {"numbers": "numbers", "scores": "sm_scale", "lengths": "lengths"}
"""What a law may set whatever its cases say (``Law.sets``), with the name of the axis that then tells nothing."""
Levels = tuple[int, ...]
"""The levels of a case, by their numbers, the smallest first."""


@dataclass(frozen=True)
class Tried:
    """What was tried of what can be: of the levels, the pairs and the triples of levels.

    ``missing`` are the levels of no case, each with the name of its axis.
    """

    levels: tuple[int, int]
    pairs: tuple[int, int]
    triples: tuple[int, int]
    missing: tuple[tuple[str, Level], ...]


class Coverage:
    """Which levels cases have together. The designs are those of all laws that a kernel has to keep."""

    def __init__(self, designs: Sequence[Design]) -> None:
        self.designs = designs
        self.axes: dict[str, Axis] = {}
        found: dict[tuple[str, Level], None] = {}
        for axis in (axis for design in designs for axis in design.axes):
            self.axes.setdefault(axis.name, axis)
            found |= dict.fromkeys((axis.name, level) for level in axis.levels)
        self.names = tuple(found)
        self.number = {name: i for i, name in enumerate(self.names)}
        self.seen: set[Levels] = set()

    def levels_of(self, case: Case, sets: Collection[str] = ()) -> Levels:
        """Return the levels of a case, but for those of what a law ``sets`` whatever the case says: see ``Law``."""
        unheard = [SET_BY_LAWS[name] for name in sets]
        names = ((axis.name, axis.level(case)) for axis in self.axes.values() if axis.name not in unheard)
        return tuple(sorted(self.number[name] for name in names if name in self.number))

    def is_new(self, levels: Levels) -> bool:
        """Whether three of the levels, or two, have not been together in a case before; it is remembered now."""
        parts = {*combinations(levels, 2), *combinations(levels, 3)} - self.seen
        self.seen |= parts
        return bool(parts)

    @cached_property
    def possible(self) -> list[int]:
        """For each level, a set of bits: the levels of other axes that a case of some law can have beside it."""
        found = [0] * len(self.names)
        for pairs in (design.pairs for design in self.designs):
            numbers = [self.number[axis.name, level] for axis, level in pairs.levels]
            for i, partners in zip(numbers, pairs.possible, strict=True):
                found[i] |= sum(1 << numbers[j] for j in range(len(numbers)) if partners >> j & 1)
        return found

    def tried(self, cases: Iterable[Levels]) -> Tried:
        """Return how much was tried by cases of these levels. A triple can be tried if each of its pairs can."""
        had = 0
        together: dict[
            Levels, int
        ] = {}  # for each pair, a set of bits: the levels of all cases that have both
        for levels in cases:
            of_case = sum(1 << i for i in levels)
            had |= of_case
            for pair in combinations(levels, 2):
                together[pair] = together.get(pair, 0) | of_case
        pairs = [
            pair for pair in combinations(range(len(self.names)), 2) if self.possible[pair[0]] >> pair[1] & 1
        ]
        return Tried(
            (had.bit_count(), len(self.names)),
            (sum(pair in together for pair in pairs), len(pairs)),
            (
                sum((together.get(pair, 0) & self._beyond(*pair)).bit_count() for pair in pairs),
                sum(self._beyond(*pair).bit_count() for pair in pairs),
            ),
            tuple(name for i, name in enumerate(self.names) if not had >> i & 1),
        )

    def _beyond(self, i: int, j: int) -> int:
        """Return a set of bits: the levels with numbers above ``j`` that a case can have beside two levels."""
        return (self.possible[i] & self.possible[j]) >> j + 1 << j + 1


def told(tried: Tried) -> str:
    """Return one line: what was tried, and the levels that were not."""
    (levels, all_levels), (pairs, all_pairs), (triples, all_triples) = (
        tried.levels,
        tried.pairs,
        tried.triples,
    )
    values = "every value" if levels == all_levels else f"{levels} of {all_levels} values"
    share = f", {100 * triples // all_triples} % of triples" if all_triples else ""
    missing: dict[str, list[str]] = {}
    for name, level in tried.missing:
        missing.setdefault(name, []).append(str(level))
    for name, found in missing.items():
        if is_tuner(name) and len(found) > MOST_NAMED:
            missing[name] = [f"{len(found)} configurations"]
    never = "; ".join(f"{name} {', '.join(found)}" for name, found in missing.items())
    return f"{values}, {pairs:,} of {all_pairs:,} pairs{share}" + (f"; never {never}" if never else "")
