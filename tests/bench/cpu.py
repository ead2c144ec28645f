"""Time kernels in Triton without a GPU, interpreted and executed: ``python -m tests.bench.cpu [SPEC ...]``.

Each call is made in both ways in turn, by one thread, and its results are compared bit for bit. By default the kernels
are ours and those of the panel that launch Triton; others are added by their SPEC. Each runs in a process of its own,
which compiles all that it needs.
"""

import argparse
import json
import math
import os
import platform
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton

from kernels import registry
from tests.bench.both_ways import Task, measured
from tests.bench.cpu_lines import COLUMNS, SIZES, Ended, Line, line_of, summary
from tests.bench.processes import gather
from tests.bench.timings import DIED
from tests.compile.items import launches_triton
from tests.harness.files import write_whole
from tests.harness.running.child import environment_of
from tests.panel import PANEL


def specs() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield SPEC and claims of each of our kernels, and of each of the panel's, that launches Triton on a CPU."""
    for spec in registry.REGISTERED:
        if registry.unavailable_reason(spec, "cpu") is None and launches_triton(spec):
            yield spec, ()
    for member in PANEL:
        if member.is_triton:
            yield member.spec, member.claims


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cpu", description=__doc__.partition("\n")[0])
    parser.add_argument("spec", nargs="*", metavar="SPEC", help="kernels besides, or instead with --only")
    parser.add_argument("--only", action="store_true", help="no kernels but those that are named")
    parser.add_argument(
        "--claims", action="append", default=[], metavar="KEY=VALUE", help="of the kernels that are named"
    )
    parser.add_argument("--sizes", default=",".join(SIZES), help="default: %(default)s")
    parser.add_argument("--dtypes", default="float16,bfloat16", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="after which a call is not repeated (default: %(default)g)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the figures are written")
    asked = parser.parse_args(arguments)
    asked.sizes, asked.dtypes = (tuple(x.split(",")) for x in (asked.sizes, asked.dtypes))
    if unknown := [name for name in asked.sizes if name not in SIZES]:
        parser.error(f"--sizes: got {unknown[0]!r}, expected some of {', '.join(SIZES)}")
    if asked.only and not asked.spec:
        parser.error("--only: got no SPEC, expected one at least")
    return asked


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each kernel, print each line as it comes and then a summary, and write the file."""
    asked = options(arguments)
    os.environ.update(environment_of("cpu"))  # for the processes, which import the kernels
    chosen = [*([] if asked.only else specs()), *((spec, tuple(asked.claims)) for spec in asked.spec)]
    environment = {
        "processor": processor(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(line_of(COLUMNS), flush=True)
    lines: list[Line] = []
    ended: list[Ended] = []
    try:
        for spec, claims in chosen:
            task = Task(spec, claims, asked.sizes, asked.dtypes, asked.repeats, asked.seconds)
            before = len(ended)
            for made in gather([partial(measured, task)], lambda: math.inf):
                if isinstance(made, Ended):
                    ended.append(made)
                else:
                    lines.append(made)
                    print(line_of(made.cells), flush=True)
            if len(ended) == before:
                ended.append(Ended(spec, problem=DIED))
    finally:
        print()
        for text in summary(lines, ended):
            print(text)
        if asked.json:
            content = {
                "environment": environment,
                "lines": [line.record() for line in lines],
                "ended": [vars(end) for end in ended],
            }
            write_whole(asked.json, json.dumps(content, indent=1) + "\n")


def processor() -> str:
    """Return the name of the processor, as far as the system tells it."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
