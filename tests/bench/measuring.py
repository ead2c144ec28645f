"""What the bench has other processes do on the GPU: they compile kernels ahead of time, and then one times them."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.sharedctypes import Synchronized

import torch
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

from tests.bench import clocks, roofline
from tests.bench.providers import Calls, Provider, provider
from tests.bench.roofline import Ceiling, Timer
from tests.bench.shapes import DIRECTIONS, Shape
from tests.bench.timings import Row, Times, Timing

WARM_UP = 200
"""Milliseconds for which a call is repeated before its times count.

An H200 at heavy work lowers its clock after about a tenth of a second, to stay within its power, and raises it again
when it is idle. Without a warm-up, a call that comes after idleness looks faster than one that comes after other calls.
"""


def tensors(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and dout of a shape, from the same seed each time."""
    made = torch.Generator(device).manual_seed(0)

    def tensor(heads: int, length: int) -> Tensor:
        size = (shape.batch, heads, length, shape.head_dim)
        return torch.randn(size, generator=made, device=device, dtype=torch.bfloat16)

    queries, keys = (shape.heads_q, shape.seqlen_q), (shape.heads_kv, shape.seqlen_k)
    return tensor(*queries), tensor(*keys), tensor(*keys), tensor(*queries)


def _leave_refusals_to_rows() -> None:
    """Keep PyTorch from warning why a backend refuses a shape, which the end of a run tells once."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"tests\.bench\.providers")


def compile_ahead(jobs: Sequence[tuple[Shape, str]], counter: "Synchronized[int]") -> Iterator[int]:
    """Call providers at shapes once, and yield the number of each such job when it is done.

    What they compile stays in the caches that Triton and torch keep on disk, where the process that times them finds
    it. Several processes share the jobs: ``counter`` is the number of the next one that nobody has taken.
    """
    _leave_refusals_to_rows()
    while True:
        with counter.get_lock():
            number = counter.value
            counter.value += 1
        if number >= len(jobs):
            return
        shape, name = jobs[number]
        with suppress(Exception):  # it is raised again, and told, when the provider is timed
            calls = provider(name)(shape, *tensors(shape, "cuda"))
            for call in filter(None, calls):
                call()
            torch.cuda.synchronize()
        torch.cuda.empty_cache()  # other processes need the memory
        yield number


def time_all(
    chosen: Sequence[Shape], providers: Mapping[str, Provider], device: str, timer: Timer
) -> Iterator[Row]:
    """Time every provider at every shape; for one that refuses a shape, or runs out of memory, yield the reason."""
    for shape in chosen:
        inputs = tensors(shape, device)
        for name, calls_at in providers.items():
            calls = partial(calls_at, shape, *inputs)
            yield tuple(_timing(shape, direction, name, calls, timer) for direction in DIRECTIONS)


def _timing(shape: Shape, direction: str, name: str, calls: Callable[[], Calls], timer: Timer) -> Timing:
    try:
        call = getattr(calls(), direction)
        return Timing(shape, direction, name, timer(call) if call else None, "" if call else "no backward")
    except Exception as error:  # whatever way others refuse a shape in
        return Timing(shape, direction, name, None, f"{type(error).__name__}: {error}"[:300])


def measure(
    chosen: Sequence[Shape], names: Sequence[str], rep: int, in_graphs: bool
) -> Iterator[Ceiling | Row]:
    """Yield the ceiling of the GPU, and then the rows of all providers at each shape in turn.

    Each call is repeated for ``rep`` milliseconds after the WARM_UP, and the L2 cache is emptied before each
    repetition. In a CUDA graph there are ten times of many calls each, without a warm-up, and the cache keeps what it
    can of the call before.
    """
    _leave_refusals_to_rows()
    read_clocks, _ = clocks.reader()

    def timer(call: Callable[[], object]) -> Times:
        if in_graphs:
            times = do_bench_cudagraph(call, rep=rep / 5, return_mode="all")
        else:
            times = do_bench(call, warmup=WARM_UP, rep=rep, return_mode="all")
        return Times.of(times, read_clocks())

    # A backward of PyTorch runs on the stream of its forward, and the default stream can't be captured in a graph.
    with torch.cuda.stream(torch.cuda.Stream()):
        yield roofline.measured("cuda", timer)
        yield from time_all(chosen, {name: provider(name) for name in names}, "cuda", timer)
