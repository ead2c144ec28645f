"""A process of ``flashproof serve``: it has imported everything, and waits for one kernel to verify.

It writes the line ``READY`` to stdout, reads one line of JSON from stdin, with a ``folder`` and the ``words`` of the
command, writes the verdict to stdout, and ends.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from kernels.contract import Capabilities
from strategies.cases import cases
from tests.harness.accelerators.lookup import available
from tests.harness.commands.command import CONFTEST, run_pytest
from tests.harness.law import LAWS, law_named
from tests.harness.report.folder import can_draw, draw
from tests.harness.running import exits
from tests.harness.running.child import WORKER, environment_of
from tests.harness.running.fork_server import origin_of
from tests.harness.session.budget import begin
from tests.harness.session.subject import drawn

READY = "ready"


def prepare() -> None:
    """Import what a run imports, and start the processes that those of kernels and scripts will be copies of."""
    import_module(CONFTEST)  # sets variables of the environment, which the processes below must have as well
    device = available()[0]
    origin_of(WORKER, environment_of(device))
    exits.prepare(device)
    for name in LAWS:
        law_named(name)
    # What is done for the first time takes longest: a case is drawn, and a picture.
    drawn(cases(Capabilities(), dtype="float32", device_type=device), seed=0)
    if can_draw():
        draw(Path(os.devnull), "", [{"tensor": "out", "side": "query", "ratio": [[1.0]]}], {})


def main() -> NoReturn:
    """Verify the kernel that stdin names, and end with the exit status of the run."""
    prepare()
    print(READY, flush=True)
    line = sys.stdin.readline()
    if not line:
        end(0)  # the server has ended
    asked = json.loads(line)
    begin()
    os.chdir(asked["folder"])
    sys.path.insert(0, asked["folder"])
    end(run_pytest("properties", asked["words"]))


def end(status: int) -> NoReturn:
    """End the process at once: what torch does at the end of a process takes a while, and the server waits for it."""
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
