"""Turns: every law at every dtype of every kernel gets a few examples first, and twice as many in each later round.

In a run that ends by the clock, processes write down how much time each kernel has had, so that each gets a fair share.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from kernels.contract import Capabilities
from strategies.by_device import ByDevice
from strategies.cases import without_huge_strides
from tests.harness.files import Lines, is_alive

FEWEST = 3
"""A turn in the first round has at least this many examples."""
FIRST_ROUND_SECONDS = 45.0
"""Seconds of the first round of a run that ends by the clock: after a minute there is a first matrix."""
ITEM_SECONDS = 0.5
"""The least seconds for each law at each dtype in the first round, even if that delays later rounds."""
TURN_SECONDS = 6.0
"""The least seconds of a turn, where a round has time for several turns of each law at each dtype.

Each turn draws from compiled variants of its own, so that many short turns would spend most of their time compiling.
"""
VARIANTS = ByDevice(cpu=8, accelerator=1)
"""So many compiled variants a turn of the first round draws from. On a CPU to compile one takes a tenth of a second."""
TURNS_OF_SERIES = 2
"""The number of successive turns of a round in which a law at a dtype uses the same compiled variants."""
LAST_ROUND = 0.2
"""The time share of the last round. Huge strides are drawn in it alone, because they crash many kernels."""

TURNS = "turns.jsonl"
"""The file, beside the journals, to which each process writes when a turn begins and when it ends."""

OVERRUN_SECONDS = 5.0
"""A kernel is held up if one of its turns overruns its time by this many seconds."""


@dataclass(frozen=True)
class Turn:
    """One turn of a law at one dtype of a kernel: a Hypothesis run of its own.

    Attributes:
        number: its place among the turns of its law and dtype.
        round: its round; in each later round a turn draws from more compiled variants.
        weight: its share of the time among all turns.
        last: whether its round is the last one, in which huge strides are drawn as well.
        examples: the most examples that it has; None if only the clock ends it.
        series: turns of one series draw from the same compiled variants.
        variant: the number of the first variant of its series among those of all series.
        before: how many examples the earlier turns of its law and dtype have. A turn that the clock ends begins a
            covering design of its own, as nobody knows how many they have.
    """

    number: int
    round: int
    weight: float
    last: bool
    examples: int | None = None
    series: int = 0
    before: int = 0
    variant: int = 0

    def of_cost(self, costs: int) -> "Turn":
        """Return the turn of a law whose cases take so many times as long: it has so many times fewer examples.

        All turns of a law together have one example at least, but one of them may have none.
        """
        if self.examples is None:
            return self
        start, end = (-(-number // costs) for number in (self.before, self.before + self.examples))
        return replace(self, examples=end - start, before=start)

    def claims(self, capabilities: Capabilities) -> Capabilities:
        """Return the claims that cases are drawn from: those of huge strides in the last turn alone.

        A run by the clock that is too short for a second round draws none, as one such case may take all of its time.
        """
        is_short = self.examples is None and self.round == 0
        return capabilities if self.last and not is_short else without_huge_strides(capabilities)

    def variants(self, device_type: str) -> range:
        """Return the numbers of the compiled variants that the turn draws from: in each round twice as many."""
        several = VARIANTS[device_type]
        return range(self.variant * several, (self.variant + 2**self.round) * several)

    def begins_far(self, claims: Capabilities, device_type: str) -> bool:
        """Whether the first example has huge strides in all tensors, as in the last of several turns on the CPU.

        A slow kernel may have time for no other example in that turn. On a GPU such tensors would leave no memory to
        other processes.
        """
        is_last_of_many = self.last and self.number > 0
        return is_last_of_many and device_type == "cpu" and "huge" in claims.layouts


def turns_of_examples(examples: int) -> tuple[Turn, ...]:
    """Return turns with ``examples`` in all: each has twice as many as the turn before, but for the last.

    The last turn has the share ``LAST_ROUND``.
    """
    weights = _weights(int(math.log2((1 - LAST_ROUND) * examples / FEWEST + 1)))
    ends = [round(examples * sum(weights[: i + 1])) for i in range(len(weights))]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(
        Turn(
            i,
            i,
            weight=size,
            last=i == len(sizes) - 1,
            examples=size,
            before=sum(sizes[:i]),
            variant=2**i - 1,
        )
        for i, size in enumerate(sizes)
    )


def turns_of_seconds(seconds: float, workers: int, items: int) -> tuple[Turn, ...]:
    """Return the turns of one law at one dtype in a run that ends by the clock.

    ``items`` is the number of combinations of a kernel, a law and a dtype, all of which take part in each round. In a
    round each has as many turns as there are workers if every turn then has ``TURN_SECONDS``, else fewer, and at least
    one.
    """
    first_round = max(FIRST_ROUND_SECONDS, ITEM_SECONDS * items)
    weights = _weights(round(math.log2((1 - LAST_ROUND) * seconds / first_round + 1)))
    turns: list[Turn] = []
    variant = 0
    for round_, weight in enumerate(weights):
        count = max(1, min(workers, int(weight * seconds * workers / (items * TURN_SECONDS))))
        last = round_ == len(weights) - 1
        series = math.ceil(count / TURNS_OF_SERIES)
        turns += [
            Turn(
                len(turns) + i,
                round_,
                weight / count,
                last,
                series=i % series,
                variant=variant + i % series * 2**round_,
            )
            for i in range(count)
        ]
        variant += series * 2**round_
    return tuple(turns)


def _weights(doubling: int) -> list[float]:
    """Return the time shares of the rounds, which add up to 1: each but the last is twice the share before.

    For 3 rounds that double, and a last round of 0.2: 0.8 / 7, 1.6 / 7, 3.2 / 7, 0.2.
    """
    if doubling < 1:
        return [1.0]
    total = 2**doubling - 1
    return [*((1 - LAST_ROUND) * 2**i / total for i in range(doubling)), LAST_ROUND]


def seconds_for(
    place: int, weights: Sequence[float], left: float, workers: int, patience: float = 1.0
) -> float:
    """Return how long the turn at ``place`` may take of the seconds ``left`` for this and all later turns.

    ``workers`` take the turns in order. With ``patience`` a turn may take that many times its share, since later turns
    share whatever time is left then.
    """
    return min(left, patience * left * workers * weights[place] / sum(weights[place:]))


def fair_seconds(
    kernel: str, part: float, weights: Mapping[str, float], had: Mapping[str, float], left: float
) -> float:
    """Return how long a turn of a kernel may take; it is ``part`` of the kernel's remaining turns, by weight.

    In the end each kernel shall have had seconds in proportion to the weight of all its turns (``weights``). Example:
    of two kernels of equal weight the first has had 30 s and the second 10 s, and 40 s are ``left`` for all workers
    together. In the end each shall have had 40 s, so that the first gets 10 s more, and the second 30 s. A kernel that
    has had more than its share gets none.
    """
    ordered = sorted(
        weights, key=lambda name: had[name] / weights[name]
    )  # kernels that are behind come first
    seconds, total = (accumulate(map(of.__getitem__, ordered)) for of in (had, weights))
    level = min((left + s) / weight for s, weight in zip(seconds, total, strict=True))
    return part * max(0.0, level * weights[kernel] - had[kernel])


@dataclass(frozen=True)
class Running:
    """A turn of a kernel that began at the time ``begun``, and may take the seconds ``given``."""

    kernel: str
    given: float
    begun: float

    def had(self, now: float) -> float:
        """Return the seconds that count for the turn by now: at least those it was given, even if it ends early."""
        return max(self.given, now - self.begun)


class Shares:
    """One process's view of the turns of a run."""

    def __init__(self, path: Path) -> None:
        self.lines = Lines(path)
        self.ended: dict[str, float] = defaultdict(float)
        self.running: dict[int, Running] = {}

    @contextmanager
    def turn(self, kernel: str, seconds: float) -> Iterator[None]:
        """Announce to all processes when a turn of a kernel begins, how many seconds it may take, and when it ends."""
        self.lines.append({"turn": kernel, "given": seconds, "time": time.time()})
        try:
            yield
        finally:
            self.lines.append({"time": time.time()})

    def had(self) -> Mapping[str, float]:
        """Return the seconds that each kernel has had, in ended turns and in running ones."""
        self._read()
        had, now = self.ended.copy(), time.time()
        for turn in self.running.values():
            had[turn.kernel] += turn.had(now)
        return had

    def held_up(self) -> set[str]:
        """Return the kernels with a running turn that takes much longer than it was given."""
        self._read()
        now = time.time()
        return {x.kernel for x in self.running.values() if x.had(now) > x.given + OVERRUN_SECONDS}

    def _read(self) -> None:
        for record in self.lines.added():
            self._end(record["process"], record["time"])
            if "turn" in record:
                turn = Running(record["turn"], record["given"], record["time"])
                self.running[record["process"]] = turn
        for process in [process for process in self.running if not is_alive(process)]:
            self._end(process, -math.inf)

    def _end(self, process: int, now: float) -> None:
        turn = self.running.pop(process, None)
        if turn is not None:
            self.ended[turn.kernel] += turn.had(now)
