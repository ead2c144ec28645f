"""Streams: on a GPU, an answer does not depend on where a call runs.

A call is made on a side stream while the default stream is busy, then, if there are two GPUs, while the other one is
the current device, and then in a CUDA graph, which is captured with other numbers and replayed: without gradients, as
servers do, and with them. Each answers as a plain call does. A kernel that can't be captured is told so in one line,
which is no bug. Catches launches on the default stream, results that are used before they are there, a missing device
guard, and numbers that are read once and stay in a graph.
"""

from dataclasses import replace
from itertools import product

from tests.harness.accelerators.interface import CaptureRefused
from tests.harness.accelerators.lookup import accelerator_of
from tests.harness.law import law
from tests.harness.trial.outputs import quoted
from tests.harness.trial.relate import agree, allowances, of_a_repeat
from tests.harness.trial.streams import BESIDE, GRAPH, SIDE, places
from tests.harness.trial.trial import CannotRun, Trial

CLAIMS = {
    SIDE: "on a side stream, {} is that of a plain call, and not what was in memory before",
    BESIDE: "beside another current device, {} is that of a plain call",
    GRAPH: "in a CUDA graph, {} of a replay is that of a plain call, and not that of the numbers at the capture",
}
"""What is claimed of the tensors of a call in each place."""
REFUSED = "{{}} can't be captured in a CUDA graph, which is no bug: {}"
"""The note about a kernel that waits for the device, with what is raised then."""


@law(
    on_device=True,
    key_padding=True,
    kinds=True,
    place=15,
    stands_alone=True,
    compares=("repeats",),
    only_on="accelerators",
    costs=4,
)
def streams(trial: Trial) -> None:
    """Compare calls in all places with a plain one, without gradients and with them."""
    there = places(accelerator_of(trial.device))
    if not there:
        raise CannotRun("there is no other stream, device or graph to make a call in")
    without, with_gradients = trial.forward(), trial.gradients()
    has_gradients = with_gradients.dq is not None
    bounds = of_a_repeat(trial, allowances(trial, trial.problem, gradients=has_gradients))
    pairs = [(without, False), *([(with_gradients, True)] if has_gradients else [])]
    try:
        for place, (plain, backward) in product(there, pairs):
            call = replace(trial.prepared(trial.problem), place=place)
            agree(trial, CLAIMS[place], trial.call(call, backward=backward), plain, bounds)
    except CaptureRefused as refused:
        trial.note(REFUSED.format(quoted(str(refused))), shows=True)
