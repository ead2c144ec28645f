"""Streams: on a GPU, an answer does not depend on where a call runs.

A call is made on a side stream while the default stream is busy, then while another device is the current one, and then
in a CUDA graph, which is captured with other numbers and replayed. Each answers as a plain call does. A kernel that
can't be captured is told so in one line, which is no bug. Catches launches on the default stream, results that are used
before they are there, a missing device guard, and numbers that are read once and stay in a graph.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.harness.law import law
from tests.harness.trial.relate import agree, allowances, of_a_repeat
from tests.harness.trial.streams import BESIDE, GRAPH, SIDE, CaptureRefused
from tests.harness.trial.trial import Trial

CLAIMS = {
    SIDE: "on a side stream, {} is that of a plain call, and not what was in memory before",
    BESIDE: "{} is that of a plain call also where another device is the current one",
    GRAPH: "in a CUDA graph, {} of a replay is that of a plain call, and not that of the numbers at the capture",
}
"""What is claimed of the tensors of a call in each place."""
ONE_DEVICE = (
    "law streams: a call beside another current device was not tried, as this process sees one device"
)
REFUSED = "law streams: {{}} examples can't be captured in a CUDA graph: {}"


@law(
    on_device=True,
    key_padding=True,
    kinds=True,
    place=15,
    stands_alone=True,
    compares=("repeats",),
    needs_gpu=True,
    costs=4,
)
def streams(trial: Trial) -> None:
    """Compare calls in all places with a plain one."""
    plain = trial.gradients()
    allowed = of_a_repeat(trial, allowances(trial, trial.problem, gradients=plain.dq is not None))

    def compare(place: str) -> None:
        call = replace(trial.prepared(trial.problem), place=place)
        agree(trial, CLAIMS[place], trial.call(call, backward=True), plain, allowed)

    compare(SIDE)
    trial.note(ONE_DEVICE, shows=torch.cuda.device_count() == 1)
    if torch.cuda.device_count() > 1:
        compare(BESIDE)
    capture(trial, compare)


def capture(trial: Trial, compare: Callable[[str], None]) -> None:
    """Compare a replayed call, and note what the kernel raises if it can't be captured."""
    try:
        compare(GRAPH)
    except CaptureRefused as refused:
        reason = str(refused).replace("{", "(").replace("}", ")")
        trial.note(REFUSED.format(f"{reason:.160}"), shows=True)
