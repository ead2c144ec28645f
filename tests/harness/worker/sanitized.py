"""The program that a sanitizer watches: it calls a kernel on some cases, and judges nothing.

It is given the device as its argument and JSON on stdin: the records of runs, the seconds after which no further case
is begun, and the path of a file to which it adds a byte for each case that has come to its end. It ends when the device
answers no more, as after an access outside of all memory.
"""

import json
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kernels import registry
from tests.harness.device.poison import alone, inputs_copied
from tests.harness.device.sync import device_answers, wait_for_device
from tests.harness.device.tuning import configured
from tests.harness.run import Run, run_of
from tests.harness.trial.trial import Trial, run_kernel
from tests.harness.worker.main import begin

CALL_SECONDS = 60.0
"""Seconds that the device may take for a call, which takes many times as long under a tool as without one."""


def call(run: Run, device: str) -> None:
    """Call the kernel of a run once, forward and backward.

    Each tensor lies in an allocation of its own, without poison around it, and fresh memory is left as it is.
    """
    trial = Trial(registry.load(run.spec, run.claims), run.case, device, run.safety)
    prepared = trial.prepared(trial.problem)
    p = prepared.problem
    q, k, v, dout = inputs_copied(alone, p.q, p.k, p.v, p.dout)
    given = replace(p, q=q, k=k, v=v, dout=dout)
    with configured(trial.kernel.tuners, prepared.launch, run.case.seed) as chosen:
        run_kernel(trial.kernel, given, chosen.passed, backward=prepared.has_gradients)
    wait_for_device(device, CALL_SECONDS)


def main(device: str) -> None:
    """Call the kernels of the runs on stdin, one after the other."""
    begin(device)
    asked = json.load(sys.stdin)
    until = time.perf_counter() + asked["seconds"]
    for record in asked["runs"]:
        with suppress(Exception):  # what a call returns or raises, laws judge in another process
            call(run_of(record), device)
        if not device_answers(device):
            break
        with Path(asked["done"]).open("a") as done:
            done.write(".")
        if time.perf_counter() > until:
            break


if __name__ == "__main__":
    main(sys.argv[1])
