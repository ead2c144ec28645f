"""Rules by which a size decides whether a bug shows, such as "above 64", and the search for the one that holds.

The size is a number of queries, keys, columns, sequences or heads, or that of a page. All rules that agree with every
size seen so far are kept, and the next size to ask is the one whose answer refutes most of them, until one rule is
left. ``told`` says in words what is left, also where it is more than one rule.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

ABOVE = "above"
"""Sizes from 65 on: a bug of a second tile of 64 rows."""
AT_MOST = "at most"
"""Sizes up to 64: a bug of cases with a single tile of 64 rows."""
NO_MULTIPLE = "no multiple of"
"""Sizes such as 63 and 65: a bug of a last tile of 64 rows that is not full."""
BEYOND = "above and no multiple of"
"""Sizes such as 65 to 127: a bug of a last tile of 64 rows that is not full and not the only one."""
ONE_ABOVE = "one above a multiple of"
"""Sizes such as 65 and 129: a bug that leaves out a last tile of a single row."""
MULTIPLE = "a multiple of"
"""Sizes such as 64 and 128: a bug of a path for whole tiles of 64 rows."""

ENDS, OF_TILES = (ABOVE, AT_MOST), (NO_MULTIPLE, BEYOND, ONE_ABOVE, MULTIPLE)
TILES = (256, *range(240, 0, -16), 8, 4, 2)
"""Rows of a tile, the most first. Tensor cores take multiples of 16; fewer rows are those of unrolled loops."""
MOST_ASKED = 40
"""How many sizes are asked at most."""
FAINT = 128
"""Of so many keys, a single one that is left out, or counted too much, is as small as the roundings of bfloat16."""
CHECKED = 10
"""How many more sizes at its borders are asked of the last rule that is left."""


@dataclass(frozen=True)
class Rule:
    """A rule such as "above 64": one of the kinds above, and its size."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} {self.size}"

    def shows_at(self, size: int) -> bool:
        """Whether a bug shows at a size by this rule."""
        match self.kind:
            case "above":
                return size > self.size
            case "at most":
                return size <= self.size
            case "a multiple of":
                return size > 0 and size % self.size == 0
            case "one above a multiple of":
                return size % self.size == 1
        return size % self.size != 0 and (self.kind == NO_MULTIPLE or size > self.size)

    def is_faint_at(self, size: int) -> bool:
        """Whether a bug of the last tile may be absent at a size although it shows by the rule.

        What is left out or counted too much is then a part of the last tile, or its padding, and small beside the rest.
        """
        if self.kind not in (NO_MULTIPLE, BEYOND):
            return False
        return 0 < min(size % self.size, -size % self.size) * FAINT < size

    def is_refuted_by(self, size: int) -> bool:
        """Whether the rule is wrong if a bug is absent at a size."""
        return self.shows_at(size) and not self.is_faint_at(size)

    @property
    def borders(self) -> tuple[int, ...]:
        """The sizes that tell it from other rules most easily."""
        n = self.size
        if self.kind in ENDS:
            next_whole = dict.fromkeys(n // tile * tile + tile for tile in (16, 32, 64))
            return (n, n + 1, *next_whole, *WHOLE_TILES, n // 2, 2 * n + 1)
        return (n, n + 1, 2 * n, 2 * n + 1, n - 1, 3 * n, 8 * n)


TILED = tuple(
    Rule(kind, size) for kind, size in product(OF_TILES, TILES) if (kind, size) != (ONE_ABOVE, min(TILES))
)
"""The rules about tiles. What is one above a multiple of 2 is no multiple of 2."""
SIZES = (*range(1, 321), 336, 352, 384, 416, 448, 480, 511, 512, 513)
"""Sizes that tell all rules apart: dense up to beyond the largest tile, then two tiles of each number of rows."""
WHOLE_TILES = (64, 32, 128, 16, 256)
"""Sizes that are asked once more where a bug seems not to depend on tiles: most tiles are full there."""


@cache
def left(fails: tuple[int, ...], holds: tuple[int, ...]) -> tuple[Rule, ...]:
    """Return the rules that agree with the sizes at which a bug was seen and with those at which it was not.

    There are none if it was not seen to be absent anywhere. Rules on ends of a range are given by the largest and the
    smallest size that they may have. The order is by kind and, of tiles, by size, the largest first.

    A size of 0 at which a bug is absent tells nothing of tiles, as nothing is wrong in an empty tensor.
    """
    if not fails or not holds:
        return ()
    full = [n for n in holds if n]
    above = dict.fromkeys((max(holds), min(fails) - 1)) if max(holds) < min(fails) else ()
    below = dict.fromkeys((min(full) - 1, max(fails))) if full and max(fails) < min(full) else ()
    agreeing = (x for x in TILED if full and all(map(x.shows_at, fails)))
    tiled = [x for x in agreeing if not any(map(x.is_refuted_by, full))]
    whole = [x for x in tiled if x.kind == NO_MULTIPLE]
    ends = [Rule(AT_MOST, n) for n in below]
    return (*(Rule(ABOVE, n) for n in above), *whole, *ends, *(x for x in tiled if x not in whole))


def told(fails: tuple[int, ...], holds: tuple[int, ...], *, is_asked: bool = True) -> str:
    """Say by which rule a size decides, and what is not known where several rules are left.

    Without ``is_asked`` sizes were seen by chance, so that no rule is named. Examples: "above 64"; "above something
    between 33 and 64: asked too little"; "such as 47, not 46: asked too little".
    """
    rules = left(fails, holds)
    if len(rules) == 1 and is_asked:
        return str(rules[0])
    if is_asked and len({rule.kind for rule in rules}) == 1 and rules[0].kind in ENDS:
        few, many = sorted(rule.size for rule in rules)
        return f"{rules[0].kind} something between {few} and {many}: asked too little"
    nearest = min(holds, key=lambda n: abs(n - fails[0]), default=None)
    beside = "" if nearest is None else f", not {nearest}"
    why = "by no rule that was tried" if is_asked and not rules else "asked too little"
    return f"such as {fails[0]}{beside}: {why}"


@dataclass
class SizeSearch:
    """The search for the rule by which a size decides whether a bug shows.

    ``own`` is a size at which it was seen, and ``sizes`` are those that can be asked, in order. ``seen`` has the
    answers so far, and ``refuting`` by hypothesis the sizes at which an absent bug refutes it. If another bug shows by
    a rule of its own, no single rule explains all answers. Then ``pairs`` of rules are kept in the same way, the first
    of which ``own`` meets. ``is_always`` says that the size does not matter: no rule is left but that the bug
    shows at every size.
    """

    own: int
    sizes: Sequence[int]
    seen: dict[int, bool | None] = field(default_factory=dict)
    pairs: list[tuple[Rule, Rule]] = field(default_factory=list)
    is_always: bool = False
    refuting: dict[int, int] = field(default_factory=dict)

    def run(self, ask: Callable[[int], bool | None]) -> None:
        """Ask sizes until one rule is left, or no size tells those that are left apart.

        ``ask`` says whether the bug shows at a size, or None if no call of this size is answered. An exception that it
        raises ends the search with what is known.
        """
        ends = (*(Rule(ABOVE, n) for n in (0, *self.sizes)), *(Rule(AT_MOST, n) for n in self.sizes))
        singles = {self._bits(rule): rule for rule in (*ends, *TILED) if rule.shows_at(self.own)}
        always = self._bits(Rule(ABOVE, 0))
        found = self._narrowed(singles, ask)
        for rule in found[:1]:
            borders = WHOLE_TILES if rule == always else singles[rule].borders
            unasked = [n for n in borders if n in self.sizes and n not in self.seen]
            for n in unasked[:CHECKED]:
                self.seen[n] = ask(n)
        if found := self._agreeing(found):
            self.is_always = found == [always]
            return
        rules = [*TILED, *(Rule(kind, size) for kind, size in product(ENDS, TILES))]
        failing, holding = self._answers()
        bits = {rule: self._bits(rule) for rule in rules}
        kept = {rule: x for rule, x in bits.items() if not x & holding}
        together = {
            x | y: (one, other)
            for (one, x), (other, y) in product(kept.items(), repeat=2)
            if one.shows_at(self.own) and x | y not in (x, y) and (x | y) & failing == failing
        }
        self.refuting = {x: x for x in together}
        self.pairs = [together[x] for x in self._narrowed(together, ask)]

    def _narrowed(self, hypotheses: Iterable[int], ask: Callable[[int], bool | None]) -> list[int]:
        """Ask the size whose answer, whatever it is, refutes most hypotheses, until none does; return what is left.

        A hypothesis is a number whose bit i says whether the bug shows at the i-th of ``sizes``.
        """
        some = self._agreeing(hypotheses)
        while len(some) > 1 and len(self.seen) < MOST_ASKED:
            refuted = {
                at: min(sum(self.refuting[x] >> at & 1 for x in some), sum(~x >> at & 1 for x in some))
                for at, n in enumerate(self.sizes)
                if n not in self.seen
            }
            # Of two such sizes the larger one: with few rows a wrong result may be right by chance.
            best = max(reversed(refuted), key=lambda at: refuted[at], default=None)
            if best is None or not refuted[best]:
                break
            self.seen[self.sizes[best]] = ask(self.sizes[best])
            some = self._agreeing(some)
        return some

    def _bits(self, rule: Rule) -> int:
        """Return as bits at which of ``sizes`` a bug shows by a rule, and note in ``refuting`` what refutes it."""
        bits, refuting = (
            sum(1 << at for at, n in enumerate(self.sizes) if of(n))
            for of in (rule.shows_at, rule.is_refuted_by)
        )
        self.refuting[bits] = refuting
        return bits

    def _answers(self) -> tuple[int, int]:
        """Return as bits at which of ``sizes`` the bug was seen, and at which it was not."""
        failing, holding = (
            sum(1 << at for at, n in enumerate(self.sizes) if self.seen.get(n) is answer)
            for answer in (True, False)
        )
        return failing, holding

    def _agreeing(self, hypotheses: Iterable[int]) -> list[int]:
        failing, holding = self._answers()
        return [x for x in hypotheses if x & failing == failing and not self.refuting[x] & holding]

    @property
    def found(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes at which the bug shows, ``own`` first, and those at which it does not.

        If two rules explain them together, only those are given at which it shows by the rule that ``own`` meets. If
        ``own`` meets both, that is the one which alone explains the nearest size.
        """
        fails = dict.fromkeys((self.own, *(n for n in sorted(self.seen) if self.seen[n])))
        holds = tuple(n for n in sorted(self.seen) if self.seen[n] is False)
        if self.pairs:
            mine, _ = min(self.pairs, key=lambda pair: self._distance(*pair))
            fails = {n: None for n in fails if mine.shows_at(n)}
        return (*fails,), holds

    def _distance(self, rule: Rule, other: Rule) -> int:
        """Return how far ``own`` is from the nearest size at which the bug shows by this rule and not by the other."""
        return min(abs(n - self.own) for n in self.sizes if rule.shows_at(n) and not other.shows_at(n))
