"""Time every kernel forward and backward beside PyTorch's: ``python -m tests.bench [--quick] [-k SERIES]``.

Times are medians of ``triton.testing.do_bench``, which empties the L2 cache before each call. All providers are timed
at one shape before the next shape comes, so that the times of a ratio are taken at the same temperature.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench

from kernels import registry
from kernels.registry import unavailable_reason
from tests.bench.providers import OTHERS, Provider, ours
from tests.bench.results import Timing, show, write
from tests.bench.shapes import Shape, shapes
from tests.compile.items import launches_triton

Timer = Callable[[Callable[[], Any]], float]


def time_all(
    chosen: Sequence[Shape], providers: Mapping[str, Provider], device: str, timer: Timer
) -> Iterator[Timing]:
    """Time every provider at every shape; for one that refuses a shape, or runs out of memory, yield the reason."""
    for shape in chosen:
        made = torch.Generator(device).manual_seed(0)

        def tensor(
            heads: int, length: int, shape: Shape = shape, made: torch.Generator = made
        ) -> torch.Tensor:
            size = (shape.batch, heads, length, shape.head_dim)
            return torch.randn(size, generator=made, device=device, dtype=torch.bfloat16)

        q, k, v = (
            tensor(shape.heads_q, shape.seqlen_q),
            *(tensor(shape.heads_kv, shape.seqlen_k) for _ in "kv"),
        )
        dout = tensor(shape.heads_q, shape.seqlen_q)
        for name, provider in providers.items():
            for direction in ("forward", "backward"):
                try:
                    call = getattr(provider(shape, q, k, v, dout), direction)
                    taken, reason = (timer(call), "") if call else (None, "no backward")
                except Exception as error:  # whatever way others refuse a shape in
                    taken, reason = None, f"{type(error).__name__}: {error}"[:300]
                yield Timing(shape, direction, name, taken, reason)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def main(prog: str = "tox -e bench --") -> None:
    """Time the providers, print the tables and write the files.

    ``prog`` is what the user typed before the options, for messages.
    """
    parser = argparse.ArgumentParser(prog=prog, description="speed of kernels beside PyTorch's")
    parser.add_argument("--quick", action="store_true", help="a few shapes: minutes")
    parser.add_argument("-k", metavar="SERIES", default="", help="shapes of the series whose name has this")
    parser.add_argument("--kernel", action="append", metavar="SPEC", help="repeatable (default: all of ours)")
    parser.add_argument("--report-dir", default="reports", metavar="DIR", type=Path)
    asked = parser.parse_args()
    chosen = [shape for shape in shapes(quick=asked.quick) if asked.k in shape.series]
    if not chosen:
        series = ", ".join(dict.fromkeys(shape.series for shape in shapes(quick=asked.quick)))
        parser.error(f"-k: got {asked.k!r}, expected a part of one of these names: {series}")
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
    providers = {**{spec: ours(spec) for spec in specs}, **OTHERS}
    environment = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
    }
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    timings: list[Timing] = []
    try:
        for timing in time_all(chosen, providers, "cuda", lambda call: do_bench(call, return_mode="median")):
            timings.append(timing)  # an interrupted run keeps what it has
    finally:
        show(timings, list(providers))
        write(asked.report_dir, environment, timings)
    refusals = dict.fromkeys((t.provider, t.direction, t.refusal) for t in timings if t.refusal)
    for provider, direction, reason in refusals:
        print(f"{provider} {direction}: not everywhere, {reason.partition(chr(10))[0]}")
    print(f"figures and plots: {asked.report_dir}")


if __name__ == "__main__":
    main()
