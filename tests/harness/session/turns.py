"""Turns: every law at every dtype of every kernel gets a few examples first, and twice as many in each later round.

In a run by the clock all processes note how much of the time each kernel has had, so that all get a fair share.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from kernels.contract import Capabilities
from strategies.cases import without_huge_strides
from strategies.focus import Focus, focused
from tests.harness.files import Lines, is_alive

FEWEST = 3
"""A turn in the first round has at least this many examples."""
FIRST_ROUND_SECONDS = 45.0
"""Seconds of the first round of a run that ends by the clock: after a minute there is a first matrix."""
ITEM_SECONDS = 0.5
"""Seconds that each law at each dtype gets in the first round at least, even if later rounds then start later."""
TURN_SECONDS = 6.0
"""Seconds that a turn takes at least, where a round has time for several turns of each law at each dtype.

Each turn draws from compiled variants of its own, so that many short turns would compile most of their time.
"""
TURNS_OF_SERIES = 2
"""The number of successive turns of a round in which a law at a dtype uses the same compiled variants."""
LAST_ROUND = 0.2
"""The share of the last round, in which huge strides are drawn too, because they end the process of many a kernel."""

TURNS = "turns.jsonl"
"""The file, beside the journals, to which each process writes when a turn begins and when it ends."""

OVERRUN_SECONDS = 5.0
"""A kernel is held up if one of its turns is not over so many seconds after the time that it was given."""


@dataclass(frozen=True)
class Turn:
    """One turn of a law at one dtype of a kernel: a Hypothesis run of its own.

    ``number`` tells it from the other turns of its law and dtype, and ``round`` decides from how much it draws. Those
    of one ``series`` draw from the same variants, and from more of them in each round. A turn has at most ``examples``,
    or None if only the clock ends it; ``weight`` is its share of the time among all turns. In the ``last`` round huge
    strides are drawn as well.
    """

    number: int
    round: int
    weight: float
    last: bool
    examples: int | None = None
    series: int = 0

    def focus(self, capabilities: Capabilities, is_compiled: bool, seed: object) -> Focus:
        """Return what the turn draws from: for a kernel that ``is_compiled`` few variants, more of them in each round.

        ``series`` decides which variants. If nothing has to be compiled, every turn draws from all claims. So does the
        last turn of a run by examples, since no turn beside it draws what it would leave out.
        """
        claims = capabilities if self.last else without_huge_strides(capabilities)
        if not is_compiled or (self.last and self.examples is not None):
            return Focus(claims)
        return focused(claims, self.round, f"{seed} {self.series}")

    def begins_far(self, focus: Focus, device_type: str) -> bool:
        """Whether the first example has huge strides in all tensors, as in the last of several turns on the CPU.

        A slow kernel may have time for no other example in that turn. On a GPU such tensors would leave no memory to
        other processes.
        """
        is_last_of_many = self.last and self.number > 0
        return is_last_of_many and device_type == "cpu" and "huge" in focus.capabilities.layouts


def turns_of_examples(examples: int) -> tuple[Turn, ...]:
    """Return turns of ``examples`` in all, each with twice as many as the one before, and a last one."""
    weights = _weights(int(math.log2((1 - LAST_ROUND) * examples / FEWEST + 1)))
    ends = [round(examples * sum(weights[: i + 1])) for i in range(len(weights))]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(
        Turn(i, i, weight=size, last=i == len(sizes) - 1, examples=size) for i, size in enumerate(sizes)
    )


def turns_of_seconds(seconds: float, workers: int, items: int) -> tuple[Turn, ...]:
    """Return the turns of a run that ends by the clock: in each round as many as there is time for.

    ``items`` is the number of combinations of a kernel, a law and a dtype, all of which take part in each round. A
    round has one turn for each worker if that leaves every turn ``TURN_SECONDS``, else fewer, and at least one.
    """
    first_round = max(FIRST_ROUND_SECONDS, ITEM_SECONDS * items)
    weights = _weights(round(math.log2((1 - LAST_ROUND) * seconds / first_round + 1)))
    turns: list[Turn] = []
    for round_, weight in enumerate(weights):
        count = max(1, min(workers, int(weight * seconds * workers / (items * TURN_SECONDS))))
        last = round_ == len(weights) - 1
        series = math.ceil(count / TURNS_OF_SERIES)
        turns += [Turn(len(turns) + i, round_, weight / count, last, series=i % series) for i in range(count)]
    return tuple(turns)


def _weights(doubling: int) -> list[float]:
    """Return the shares of the rounds, which add up to 1: each but the last is twice the one before."""
    if doubling < 1:
        return [1.0]
    total = 2**doubling - 1
    return [*((1 - LAST_ROUND) * 2**i / total for i in range(doubling)), LAST_ROUND]


def seconds_for(
    place: int, weights: Sequence[float], left: float, workers: int, patience: float = 1.0
) -> float:
    """Return how long the turn at ``place`` may take of the seconds ``left`` to it and to those that follow.

    ``workers`` take the turns in their order. With ``patience`` a turn may take that many times its share, since the
    turns that follow share whatever is left then.
    """
    return min(left, patience * left * workers * weights[place] / sum(weights[place:]))


def fair_seconds(
    kernel: str, part: float, weights: Mapping[str, float], had: Mapping[str, float], left: float
) -> float:
    """Return how long a turn may take that is ``part`` of what is left of its kernel's turns, by their weight.

    In the end each kernel shall have had seconds in proportion to the weight of all its turns (``weights``). So those
    that have had less get more of the seconds ``left`` to all workers together, and one that has had more than its
    share gets none.
    """
    ordered = sorted(weights, key=lambda name: had[name] / weights[name])  # those that are behind come first
    seconds, total = (accumulate(map(of.__getitem__, ordered)) for of in (had, weights))
    level = min((left + s) / weight for s, weight in zip(seconds, total, strict=True))
    return part * max(0.0, level * weights[kernel] - had[kernel])


@dataclass(frozen=True)
class Running:
    """A turn of a kernel that has begun at the time ``begun``, and was given so many seconds."""

    kernel: str
    given: float
    begun: float

    def had(self, now: float) -> float:
        """Return the seconds that the turn has had by now; one that ends early counts as if it had had all of them."""
        return max(self.given, now - self.begun)


class Shares:
    """One process's view of the turns of a run."""

    def __init__(self, path: Path) -> None:
        self.lines = Lines(path)
        self.ended: dict[str, float] = defaultdict(float)
        self.running: dict[int, Running] = {}

    @contextmanager
    def turn(self, kernel: str, seconds: float) -> Iterator[None]:
        """Tell all processes that a turn of a kernel begins, which is given so many seconds, and when it ends."""
        self.lines.append({"turn": kernel, "given": seconds, "time": time.time()})
        try:
            yield
        finally:
            self.lines.append({"time": time.time()})

    def had(self) -> Mapping[str, float]:
        """Return the seconds that each kernel has had, in turns that are over and in those that are not."""
        self._read()
        had, now = self.ended.copy(), time.time()
        for turn in self.running.values():
            had[turn.kernel] += turn.had(now)
        return had

    def held_up(self) -> set[str]:
        """Return the kernels of which a turn is running that takes much longer than it was given."""
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
