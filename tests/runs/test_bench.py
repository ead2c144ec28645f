"""The processes of the benchmark: what they make is kept when one crashes, never ends, or the run is interrupted."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from tests.bench.processes import CONTEXT, gather


def two_then_silence(number: int) -> Iterator[int]:
    yield number
    yield number + 1
    # This stands for a call that hangs. ``gather`` kills the process when its time is up.
    time.sleep(3600)


def one_then_a_crash() -> Iterator[int]:
    yield 7
    os._exit(1)


class TestProcesses:
    def test_what_all_of_them_make_is_gathered(self) -> None:
        assert sorted(gather([partial(range, 3), partial(range, 10, 12)], lambda: math.inf)) == [
            0,
            1,
            2,
            10,
            11,
        ]

    def test_one_that_crashes_leaves_the_others_alone(self) -> None:
        parts: list[Callable[[], Iterable[int]]] = [one_then_a_crash, partial(range, 2)]
        assert sorted(gather(parts, lambda: math.inf)) == [0, 1, 7]

    def test_one_that_never_ends_is_killed_when_the_time_is_up(self) -> None:
        made: list[int] = []
        processes: list[Any] = []

        def left() -> float:
            processes[:] = CONTEXT.active_children()
            return 0.0 if len(made) == 2 else 3600.0

        for each in gather([partial(two_then_silence, 4)], left):
            made.append(each)
        assert made == [4, 5]
        assert [process.exitcode for process in processes] == [-9]
