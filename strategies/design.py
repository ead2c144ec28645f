"""A covering design: levels for successive cases, so that all levels are tried first, then all pairs of levels.

The algorithm is that of AETG: "The AETG system: an approach to testing based on combinatorial design" (Cohen, Dalal,
Fredman, Patton, IEEE Transactions on Software Engineering 23, 1997). Each row takes, axis by axis, the level that forms
most pairs which no row has had yet.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from random import Random
from typing import Any

from kernels.contract import Capabilities
from strategies.axes import MANY_OF, Axis, Level, axes_of
from strategies.by_device import ByDevice
from strategies.case import OF_CALLS, Case
from strategies.cases import Space
from strategies.limits import cut_down, is_affordable, with_fewer_heads, with_heads_at_most

Row = Mapping[str, Level]
"""A level of some of the axes, by name."""

USUAL = 4
"""Every fourth row has levels that models use, chosen at random, and no others."""
MOST_HEADS = ByDevice(cpu=128, accelerator=4096)
"""The most query heads of all batch elements together that such a case has: a program each, interpreted or not."""
SHARE = 16
"""A case that is given levels has at most the most products of any case, divided by this."""


class Design:
    """The rows of a law and a kernel, the same in all processes.

    Row ``i`` is for the dtype ``i % len(dtypes)``: the items of all dtypes share the rows. The first rows take levels
    in their order, from the one with the number ``first`` on. With ``variants``, which are rows of ``Variants``, each
    case has the levels of one of these, as far as its space has them, and is steered to levels of all other axes.

    Rows of large cases, of which there are few, have the sizes in the order of ``SCALES``, whatever pairs they form:
    row ``i`` has the size with the number ``first + i * step``.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        *,
        numbers: bool = True,
        seed: object = 0,
        first: int = 0,
        step: int = 1,
        variants: Sequence[Row] = (),
    ) -> None:
        self.spaces, self.seed, self.first, self.step = spaces, seed, first, step
        self.dtypes = [space.dtype for space in spaces]
        self.axes = self.axes_of(spaces[0], numbers)
        self.sizes = next((axis.levels for axis in self.axes if axis.name == "size"), ())
        self.variants = [self._known(row) for row in variants]
        self.found: list[Row] = []

    def axes_of(self, space: Space, numbers: bool) -> tuple[Axis, ...]:
        """Return the axes of the design."""
        return axes_of(space, self.dtypes, numbers=numbers)

    def _known(self, row: Row) -> Row:
        """Return the part of a row whose levels the space has."""
        levels = {axis.name: axis.levels for axis in self.axes}
        return {name: level for name, level in row.items() if level in levels.get(name, ())}

    @cached_property
    def pairs(self) -> "Pairs":
        """The pairs of levels that no row has had yet."""
        return Pairs(self)

    def row(self, number: int) -> Row:
        """Return a row; it leaves out the axes of which it would try nothing new."""
        while len(self.found) <= number:
            place = len(self.found)
            turn, dtype = divmod(place, len(self.dtypes))
            fixed = {"dtype": self.dtypes[dtype]} if len(self.dtypes) > 1 else {}
            fixed |= self._variant(turn)
            if self.sizes:
                fixed["size"] = self.sizes[(self.first + place * self.step) % len(self.sizes)]
            chance = Random(f"{self.seed} {place}")
            if turn % USUAL == 1:
                self.found.append({**{axis.name: _usual(axis, chance) for axis in self.axes}, **fixed})
            else:
                self.found.append(self.pairs.next_row(fixed, chance))
        return self.found[number]

    def steered(self, place: int, case: Case) -> Case:
        """Return what is tried in place of a drawn case, the one of that number of its dtype.

        The first case and every other one stay as they are drawn, but for the levels of a variant, as a bug may need
        several options to be left out, or tensors of different layouts. The others have the levels of the next row. Of
        large cases, which are few, each has those of a row.
        """
        space = self.spaces[self.dtypes.index(case.dtype)]
        turn = place if space.large else place // 2
        if place % 2 == 0 and not space.large:
            changed = self.with_levels(space, case, self._variant(turn)) if self.variants else case
            return _if_drawn(space, changed, case)
        return self.given(case, self.row(turn * len(self.dtypes) + self.dtypes.index(case.dtype)))

    def _variant(self, turn: int) -> Row:
        return self.variants[turn % len(self.variants)] if self.variants else {}

    def given(self, case: Case, row: Row) -> Case:
        """Return a case with the levels of a row, as far as it can have them all; itself if it has to stay as it is."""
        space = self.spaces[self.dtypes.index(case.dtype)]
        changed = self.with_levels(space, case, row)
        if not space.large:
            changed = space.fitted(self._cut(space, changed, row))
        return _if_drawn(space, changed, case)

    def _cut(self, space: Space, case: Case, row: Row) -> Case:
        """Return a case with fewer heads or shorter sequences, as a case that is given levels has."""
        changed = with_heads_at_most(MOST_HEADS[space.device_type], case)
        limits = space.within(SHARE)
        has_many = MANY_OF in row.values()
        if changed.seqlen_q == changed.seqlen_k and not has_many:  # to cut one length would make them unequal
            changed = with_fewer_heads(changed, **limits)
        kept = "heads" if has_many else "seqlen_k"
        return cut_down(space.claims, (), limits, limits, kept, changed)

    def with_levels(self, space: Space, case: Case, row: Row) -> Case:
        """Return a case with the levels of a row, and with what the claims ask for beside them."""
        for axis in self.axes:
            if axis.name in row:
                case = axis.give(case, row[axis.name])
        return space.fitted(case)


def _if_drawn(space: Space, changed: Case, case: Case) -> Case:
    """Return the changed case, if it is one of the space, or else the case as it was."""
    return changed if space.claims.admits(changed) and is_affordable(changed, **space.limits) else case


class Variants(Design):
    """A design of what kernels are compiled for alone: each row is a compiled variant, of whatever law.

    The spaces have the options and the kinds of calls of all laws.
    """

    def axes_of(self, space: Space, numbers: bool) -> tuple[Axis, ...]:
        """Return the axes for whose levels a kernel is compiled anew."""
        return tuple(axis for axis in super().axes_of(space, numbers) if axis.is_compiled)


def variants_of(capabilities: Capabilities, device_type: str, seed: object) -> Variants:
    """Return the compiled variants of a kernel with these claims: row ``i`` is for the dtype ``i % len(dtypes)``."""
    options: dict[str, Any] = dict.fromkeys(("key_padding", "dropout", "variants"), True)
    calls = tuple(name for name in OF_CALLS if getattr(capabilities, name))
    spaces = [
        Space(capabilities=capabilities, dtype=dtype, device_type=device_type, calls=calls, **options)
        for dtype in capabilities.dtypes
    ]
    return Variants(spaces, seed=seed)


def _usual(axis: Axis, chance: Random) -> Level:
    """Return a level that models use, the more frequent ones more often."""
    most = max(1, axis.usual)
    return axis.levels[min(chance.randrange(most), chance.randrange(most))]


class Pairs:
    """Which pairs of levels are possible, and which of them no row has had yet.

    The levels of all axes are numbered. ``possible`` and ``untried`` have a set of bits for each: the levels of other
    axes with which it forms such a pair.
    """

    def __init__(self, design: Design) -> None:
        self.levels = [(axis, level) for axis in design.axes for level in axis.levels]
        self.number = {(axis.name, level): i for i, (axis, level) in enumerate(self.levels)}
        self.possible = [0] * len(self.levels)
        space = design.spaces[0]
        simplest = _start(design, space)
        given = [axis.give(simplest, level) for axis, level in self.levels]
        for (i, (one, x)), (j, (other, y)) in combinations(enumerate(self.levels), 2):
            if one is not other:
                case = space.fitted(other.give(given[i], y))
                if one.level(case) == x and other.level(case) == y:
                    self.possible[i] |= 1 << j
                    self.possible[j] |= 1 << i
        self.used = [False] * len(self.levels)
        self.axes = design.axes
        self.rank = [
            (i - design.first) % len(axis.levels) for axis in self.axes for i in range(len(axis.levels))
        ]
        self.begin()

    def begin(self) -> None:
        """Take all possible pairs for untried."""
        self.untried = [*self.possible]

    def next_row(self, fixed: Row, chance: Random) -> dict[str, Level]:
        """Return the next row that has the ``fixed`` levels, and count its pairs as tried.

        When all are tried, it begins anew: other rows with all pairs try further triples.
        """
        if not any(self.untried):
            self.begin()
        chosen = [self.number[item] for item in fixed.items()]
        left = [axis for axis in self.axes if axis.name not in fixed]
        chance.shuffle(left)
        # The axis with the level that lacks most pairs comes first, and gets that level.
        left.sort(key=lambda axis: -max(self._lacking(axis)))
        for axis in left:
            taken = sum(1 << i for i in chosen)
            is_first = axis is left[0]
            best = max(self._numbers(axis), key=lambda i: self._merit(i, 0 if is_first else taken, chance))
            is_new = self.untried[best] if is_first else self.untried[best] & taken
            if is_new and self.possible[best] & taken == taken:
                chosen.append(best)
        for i, j in combinations(chosen, 2):
            self.untried[i] &= ~(1 << j)
            self.untried[j] &= ~(1 << i)
        for i in chosen:
            self.used[i] = True
        return {axis.name: level for axis, level in map(self.levels.__getitem__, chosen)}

    def _numbers(self, axis: Axis) -> list[int]:
        return [self.number[axis.name, level] for level in axis.levels]

    def _lacking(self, axis: Axis) -> list[int]:
        return [self.untried[i].bit_count() for i in self._numbers(axis)]

    def _merit(self, level: int, taken: int, chance: Random) -> tuple[Any, ...]:
        """Return what makes a level the best beside those that are taken.

        It is possible with them, forms most untried pairs with them, and lacks most pairs. Of levels that no row has
        had yet, the order decides.
        """
        is_possible = self.possible[level] & taken == taken
        new, lacking = (self.untried[level] & taken).bit_count(), self.untried[level].bit_count()
        is_used = self.used[level]
        order = chance.random() if is_used else -self.rank[level]
        return is_possible, new, lacking, not is_used, order


def _start(design: Design, space: Space) -> Case:
    """Return a simple case of the space that has room for any level."""
    fields: dict[str, Any] = {
        "launch": tuple((name, values[0]) for name, values in space.claims.launch.items())
    }
    fields |= {name: space.values_of_call(name)[0] for name in space.call_fields[:1]}
    case = Case(dtype=space.dtype, seqlen_q=min(65, space.longest), seqlen_k=min(67, space.longest), **fields)
    return design.with_levels(space, case, {axis.name: axis.levels[0] for axis in design.axes})
