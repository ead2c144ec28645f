"""Calls of one kernel on the CPU, by Triton's interpreter and by the executor of its IR in turn, in one process."""

import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

import torch

from kernels import registry
from kernels.contract import AttentionKernel
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.bench.cpu_lines import FORWARD, GRADIENTS, SIZES, WAYS, Ended, Line, case_of, difference
from tests.harness.device.poison import PoisonedAllocations
from tests.harness.interpreter.installation import INTERPRET, repair_interpreter
from tests.harness.interpreter.ttir.launch import fallbacks, interpreted
from tests.harness.interpreter.ttir.store import FOLDER
from tests.harness.trial.problem import Outputs
from tests.harness.trial.trial import CannotRun, Trial, run_kernel

BEFORE, AFTER = WAYS
FEWEST = {BEFORE: 1, AFTER: 2}
"""Calls of each way that are made however long they take: the first executed one compiles."""


@dataclass(frozen=True)
class Task:
    """A kernel and the calls of it that are timed: names of sizes, and dtypes.

    Each call is repeated ``repeats`` times in each way, or until those of one way have taken ``seconds``. The least
    time counts; that of the first call only if it is the only one. Times are those of the processor, which depend less
    on what else the machine does.
    """

    spec: str
    claims: tuple[str, ...]
    sizes: tuple[str, ...]
    dtypes: tuple[str, ...]
    repeats: int
    seconds: float


def measured(task: Task) -> Iterator[Line | Ended]:
    """Yield each call of a kernel as it is measured, and the end. It is meant for a process of its own."""
    repair_interpreter()
    os.environ[INTERPRET] = "1"  # read when a kernel is imported
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:  # no code that was kept, as the first call shall compile
        os.environ[FOLDER] = folder
        yield from _measured(task)


def _measured(task: Task) -> Iterator[Line | Ended]:
    try:
        kernel = registry.load(task.spec, task.claims)
    except ValueError as error:  # SpecError and ClaimError
        yield Ended(task.spec, problem=str(error))
        return
    cases = list(_cases(kernel, task))
    if not cases:
        yield Ended(kernel.name, problem="claims no call of these sizes and dtypes")
        return
    for size, case, call in cases:
        yield _timed(kernel, task, size, case, call)
    yield Ended(kernel.name, fallbacks())


def _cases(kernel: AttentionKernel, task: Task) -> Iterator[tuple[str, Case, str]]:
    c = kernel.capabilities
    for size in task.sizes:
        for dtype in task.dtypes:
            for causal in (False, True):
                case = case_of(c, SIZES[size], dtype, causal=causal)
                if case is not None:
                    yield size, case, FORWARD
                if (
                    case is not None
                    and case.ragged in c.kinds_with_gradients
                    and c.gives_gradients(causal=causal)
                ):
                    yield size, case, GRADIENTS


def _timed(kernel: AttentionKernel, task: Task, size: str, case: Case, call: str) -> Line:
    sizes = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_k, case.head_dim)
    line = Line(kernel.name, size, sizes, case.dtype, case.causal, call)
    try:
        trial = Trial(kernel, case, "cpu", SAFETY)
    except CannotRun as error:
        return replace(line, problem=str(error))
    prepared = trial.prepared(trial.problem)

    def made() -> Outputs:
        with PoisonedAllocations(math.nan):
            return run_kernel(kernel, prepared.problem, prepared.launch, backward=call == GRADIENTS)

    return timed_in_turn(line, made, task.repeats, task.seconds)


def timed_in_turn(line: Line, made: Callable[[], Outputs], repeats: int, seconds: float) -> Line:
    """Return the line with the times of a call that is made in each way in turn, and how the results differ."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    results: dict[str, Outputs] = {}
    differs = ""
    for _ in range(1 + repeats):
        for way, spent in times.items():
            if len(spent) >= FEWEST[way] and sum(spent) >= seconds:
                continue
            try:
                with _in(way):
                    begun = time.process_time()
                    results[way] = made()
                    spent.append(time.process_time() - begun)
            except NotImplementedError as error:
                return replace(line, problem=f"refused, {way}: {_first_line(error)}")
            except Exception as error:  # whatever a kernel raises, or what runs it
                problem = f"{way}: {type(error).__name__}: {_first_line(error)}"
                return replace(line, problem=problem, trace=traceback.format_exc())
        differs = differs or difference(*(results[way].named() for way in WAYS))
    return replace(
        line,
        milliseconds={way: 1e3 * min(spent[1:] or spent) for way, spent in times.items()},
        first=1e3 * times[AFTER][0],
        differs=differs,
    )


def _in(way: str) -> AbstractContextManager[object]:
    return interpreted() if way == BEFORE else nullcontext()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
