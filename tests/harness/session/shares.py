"""How much of the time of a run by the clock each kernel has had, in all processes, so that all get a fair share."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.harness.files import Lines, is_alive

TURNS = "turns.jsonl"
"""The file, beside the journals, to which each process writes when a turn begins and when it ends."""

OVERRUN_SECONDS = 5.0
"""A kernel is held up if one of its turns is not over so many seconds after the time that it was given."""


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
