"""Time every kernel forward and backward beside PyTorch's: ``python -m tests.bench [--quick] [--graph] [-k SERIES]``.

All providers are timed at one shape before the next shape comes, so that the times of a ratio are taken at the same
temperature. Each row is printed as soon as it is measured.
"""

import argparse
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import triton

from kernels import registry
from kernels.registry import unavailable_reason
from tests.bench import clocks
from tests.bench.files import write
from tests.bench.measuring import compile_ahead, measure
from tests.bench.processes import CONTEXT, gather
from tests.bench.providers import OTHERS, in_order
from tests.bench.roofline import Ceiling
from tests.bench.shapes import QUICK, Shape, shapes
from tests.bench.tables import heading, left_out, legend, refusals, row_line, tables
from tests.bench.timings import DIED, INTERRUPTED, TIME_UP, Row, Timing, not_reached
from tests.compile.items import launches_triton
from tests.harness.clock import Clock

QUICK_MINUTES = 2.0
OUTSIDE_SECONDS = 12.0
"""Seconds of a time limit in which nothing is measured: imports before, tables and plots after."""
COMPILING = 0.5
"""The share of a time limit after which no kernel is compiled ahead of time."""
COMPILERS = 12
"""Processes at most that compile kernels: each takes half a gigabyte on the GPU, and the tensors of a shape."""
REP = {False: 100, True: 50}
"""Milliseconds for which a call is repeated, by ``--quick``."""


class Bench:
    """A run: what it is going to measure, and what it has measured so far."""

    def __init__(self, chosen: Sequence[Shape], providers: Sequence[str], clock: Clock) -> None:
        self.chosen, self.providers, self.clock = chosen, providers, clock
        self.jobs = [(shape, name) for shape in chosen for name in providers]
        self.ceiling: Ceiling | None = None
        self.timings: list[Timing] = []

    def compile(self) -> None:
        """Compile what the providers need, in several processes."""
        processes = min(COMPILERS, len(os.sched_getaffinity(0)), len(self.jobs))
        print(f"compiling for {len(self.jobs)} rows in {processes} processes", flush=True)
        part = partial(compile_ahead, self.jobs, CONTEXT.Value("i", 0))
        until = Clock(COMPILING * self.clock.seconds)
        until.start()
        done = 0
        for done, _ in enumerate(gather([part] * processes, lambda: until.left), 1):
            if 10 * done // len(self.jobs) > 10 * (done - 1) // len(self.jobs):
                print(f"compiled for {done} rows", flush=True)
        if done < len(self.jobs):
            print(f"the other {len(self.jobs) - done} compile when they are timed")

    def measure(self, rep: int, in_graphs: bool) -> None:
        """Measure all rows in one other process, which the time limit can end, and print each as it comes."""
        started = time.perf_counter()
        for made in gather(
            [partial(measure, self.chosen, self.providers, rep, in_graphs)], lambda: self.clock.left
        ):
            if isinstance(made, Ceiling):
                self.ceiling, started = made, time.perf_counter()
                print(made, flush=True)
            else:
                self.add(made, time.perf_counter() - started)

    def add(self, row: Row, elapsed: float) -> None:
        """Keep a row, and print it; ``elapsed`` seconds have passed since the first one began."""
        shape = row[0].shape
        if self.ceiling and not any(t.shape == shape for t in self.timings):
            print(heading(shape, self.ceiling))
        self.timings += row
        left = seconds_left(elapsed, len(self.timings) // len(row), len(self.jobs), self.clock.left)
        print(row_line(row, [t for t in self.timings if t.shape == shape], left), flush=True)

    def finish(self, why: str, environment: dict[str, str], folder: Path) -> None:
        """Print the tables and write the files; ``why`` the rest is not measured, if there is any."""
        timings = [*self.timings, *not_reached(self.chosen, self.providers, self.timings, why)]
        print()
        for lines in tables(timings, self.providers, self.ceiling):
            print(*lines, "", sep="\n")
        for line in (*legend(timings), *left_out(timings, self.providers), *refusals(timings)):
            print(line)
        if while_timed := clocks.extremes(t.clocks for t in timings):
            environment["clocks while timed"] = while_timed
            print(f"clocks while timed {while_timed}")
        write(folder, environment, self.ceiling, timings)
        print(f"figures and plots: {folder}")


def seconds_left(elapsed: float, done: int, total: int, limit: float) -> float:
    """Return the seconds until the last row if the rest is as fast as what is done, or until the time is up."""
    return min(limit, elapsed / done * (total - done))


def main(prog: str = "tox -e bench --") -> None:
    """Time the providers, print each row and the tables, and write the files.

    ``prog`` is what the user typed before the options, for messages.
    """
    asked, chosen = options(prog)
    clock = Clock(max(0.0, 60 * asked.time_limit - OUTSIDE_SECONDS))
    clock.start()
    if not torch.cuda.is_available():
        print(
            "bench: torch finds no GPU here, and times of Triton's interpreter mean nothing: nothing is timed"
        )
        return
    specs = asked.kernel or [
        spec
        for spec in registry.REGISTERED
        if unavailable_reason(spec, "cuda") is None and launches_triton(spec)
    ]
    for spec in specs:
        registry.load(spec)  # raises what the user should see before anything is measured
    read_clocks, no_clocks = clocks.reader()
    environment = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "clocks before": str(read_clocks() or f"not told ({no_clocks})"),
    }
    if asked.graph:
        environment["calls"] = "in a CUDA graph"
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    if asked.time_limit < math.inf:
        print(f"at most {asked.time_limit:g} minutes (--time-limit)")
    bench = Bench(chosen, in_order(specs, asked.other), clock)
    why = DIED
    try:
        bench.compile()
        bench.measure(REP[asked.quick], asked.graph)
        why = DIED if clock.left else TIME_UP
    except KeyboardInterrupt:
        why = INTERRUPTED
        raise
    finally:
        bench.finish(why, environment, asked.report_dir)


def options(prog: str) -> tuple[argparse.Namespace, list[Shape]]:
    """Read the command line, and return it with the shapes that it chooses."""
    parser = argparse.ArgumentParser(prog=prog, description="speed of kernels beside PyTorch's")
    parser.add_argument("--quick", action="store_true", help=f"a few shapes, in {QUICK_MINUTES:g} minutes")
    parser.add_argument(
        "--graph", action="store_true", help="time calls in a CUDA graph, without what a launch costs the CPU"
    )
    parser.add_argument("-k", metavar="SERIES", default="", help="shapes of the series whose name has this")
    parser.add_argument("--kernel", action="append", metavar="SPEC", help="repeatable (default: all of ours)")
    parser.add_argument(
        "--other",
        action="append",
        choices=OTHERS,
        help="what ours are compared with, repeatable (default: all); FlexAttention compiles for a while at each shape",
    )
    parser.add_argument(
        "--time-limit",
        metavar="MINUTES",
        type=float,
        help=f"end after so many minutes, whatever is measured by then (default: none, {QUICK_MINUTES:g} with --quick)",
    )
    parser.add_argument("--report-dir", default="reports", metavar="DIR", type=Path)
    asked = parser.parse_args()
    every = QUICK if asked.quick else shapes()
    chosen = [shape for shape in every if asked.k in shape.series]
    if not chosen:
        series = ", ".join(dict.fromkeys(shape.series for shape in every))
        parser.error(f"-k: got {asked.k!r}, expected a part of one of these names: {series}")
    asked.other = asked.other or list(OTHERS)
    if asked.time_limit is None:
        asked.time_limit = QUICK_MINUTES if asked.quick else math.inf
    if not asked.time_limit > 0:
        parser.error(f"--time-limit: got {asked.time_limit:g}, expected a positive number")
    return asked, chosen


if __name__ == "__main__":
    main()
