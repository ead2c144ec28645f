"""Drawing a program: which features it has, and in which order."""

import math
from dataclasses import dataclass

from tests.unit.support.programs import arithmetic, flow, folding, memory
from tests.unit.support.programs.flow import Step
from tests.unit.support.programs.spans import Span
from tests.unit.support.programs.values import Argument, Shape, Value
from tests.unit.support.programs.writer import Writer

EXACT: dict[Step, int] = {
    arithmetic.compute: 8,
    arithmetic.compute_scalar: 2,
    arithmetic.mix: 3,
    arithmetic.compare: 4,
    arithmetic.cast: 4,
    arithmetic.cast_mask: 2,
    arithmetic.bitcast: 2,
    arithmetic.turn: 3,
    arithmetic.round_once: 3,
    arithmetic.clamp: 1,
    arithmetic.multiply_high: 1,
    arithmetic.draw_numbers: 1,
    memory.load_more: 4,
    memory.load_scalar: 2,
    memory.load_anywhere: 2,
    memory.store_early: 2,
    memory.count_atomically: 2,
    memory.count_one: 1,
    memory.change_atomically: 2,
    memory.of_descriptor: 2,
    memory.to_descriptor: 2,
    memory.of_tuple: 1,
    memory.of_none: 1,
    memory.of_either: 1,
    memory.column: 2,
    folding.reduce: 4,
    folding.find: 2,
    folding.reduce_by: 2,
    folding.reduce_pair: 2,
    folding.scan: 2,
    folding.scan_by: 1,
    folding.multiply: 2,
    folding.multiply_batch: 1,
    folding.reshape: 3,
    folding.sort: 1,
    folding.flip: 1,
    folding.count_bins: 1,
    folding.gather: 1,
    folding.join: 2,
    folding.copy_rows: 1,
    folding.scatter: 1,
    flow.loop: 5,
    flow.repeat: 3,
    flow.branch: 5,
    flow.choose: 1,
    flow.unroll: 1,
    flow.accumulate: 2,
    flow.call: 2,
    flow.end_early: 1,
}
"""What a GPU computes with the same bits, and how often it is drawn."""

APPROXIMATE: dict[Step, int] = {
    arithmetic.apply: 6,
    arithmetic.divide: 3,
    folding.softmax: 3,
    flow.attend: 3,
    folding.concatenate: 1,
    memory.load_again: 1,
    flow.call_apart: 0,
}
"""What a GPU computes otherwise, or in an order that is not told. What has no weight is only in every 57th program."""

FEATURES = (*EXACT, *APPROXIMATE)


@dataclass(frozen=True)
class Program:
    """A small Triton program: the text of its functions, and what it is launched with.

    ``exact`` says that a GPU computes the same bits as the interpreter, with no contraction of products and sums.
    """

    seed: int
    name: str
    source: str
    grid: Shape
    arguments: tuple[Argument, ...]
    num_warps: int
    exact: bool
    features: tuple[str, ...]


def program(seed: int, watched: str = "") -> Program:
    """Return the program of a seed; ``watched`` is told in ``Writer``."""
    first = Writer(seed, False, ())
    grid = tuple(first.pick(1, 2, 3, 4) for _ in range(first.pick(1, 1, 2, 3)))
    while math.prod(grid) > 8:
        grid = grid[:-1] if len(grid) > 1 else (4,)
    forced = FEATURES[seed % len(FEATURES)]
    exact = forced in EXACT and first.chance(0.65)
    w = Writer(seed + 2**32, exact, grid, watched)
    w.prefix = f"program_{seed}"
    _start(w)
    weights = EXACT if exact else EXACT | {step: 2 * n for step, n in APPROXIMATE.items()}
    steps = w.random.choices(list(weights), list(weights.values()), k=w.whole(4, 9))
    steps.insert(w.whole(0, len(steps)), forced)
    if flow.end_early in steps:
        steps = [flow.end_early, *(x for x in steps if x is not flow.end_early)]
    for step in steps:
        step(w)
    _finish(w)
    header = ", ".join(f"{x.name}{x.annotation}" for x in w.arguments)
    kernel = "\n".join(["@triton.jit", f"def {w.prefix}({header}):", *w.lines])
    source = "\n\n\n".join([*w.helpers.values(), kernel]) + "\n"
    names = tuple(dict.fromkeys(x.__name__ for x in steps))
    warps = w.pick(4, 4, 4, 1, 2, 8)
    return Program(seed, w.prefix, source, grid, tuple(w.arguments), warps, exact, names)


def _start(w: Writer) -> None:
    """Write the program's number, and load some tiles."""
    w.emit(*(f"p{d} = tl.program_id({d})" for d in range(len(w.grid))))
    number, step = "p0", "tl.num_programs(0)"
    for d in range(1, len(w.grid)):
        number += f" + p{d} * {step}"
        step += f" * tl.num_programs({d})"
    w.emit(f"pid = {number}")
    w.values.append(Value("pid", "int32", (), Span(0, w.programs - 1)))
    shape: Shape = w.pick(
        (16,),
        (32,),
        (64,),
        (128,),
        (256,),
        (8, 16),
        (16, 16),
        (16, 32),
        (32, 16),
        (32, 32),
        (4, 64),
        (64, 64),
        (2, 4, 8),
        (4, 2, 16),
        (1, 16),
        (16, 1),
    )
    for _ in range(w.pick(2, 2, 3)):
        memory.load(w, shape, w.among(memory.LOADED))
    if not w.tensor():
        memory.load(w, shape, w.pick("int32", "float32"))


def _finish(w: Writer) -> None:
    """Store some of the values."""
    tensors = [x for x in w.values if x.shape]
    for value in tensors[-4:]:
        memory.store(w, value)
    rest = [x for x in tensors[:-4] if w.chance(0.4)]
    scalars = [x for x in w.values if not x.shape and not x.loose and x.text != "pid"]
    for value in (*rest[-3:], *scalars[-2:]):
        memory.store(w, value)
