"""A process of ``flashproof serve``: it has imported everything, and waits for one kernel to verify.

It writes the line ``READY`` to stdout, reads one line of JSON from stdin, with a ``folder`` and the ``words`` of the
command, writes the verdict to stdout, and ends.
"""

import json
import os
import sys
from importlib import import_module

from tests.harness.accelerators.lookup import available
from tests.harness.commands.command import CONFTEST, run_pytest
from tests.harness.law import LAWS, law_named
from tests.harness.running.child import WORKER, environment_of
from tests.harness.running.fork_server import origin_of
from tests.harness.session.budget import begin

READY = "ready"


def prepare() -> None:
    """Import what a run imports, and start the process that the process of the kernel will be a copy of."""
    origin_of(WORKER, environment_of(available()[0]))
    import_module(CONFTEST)
    for name in LAWS:
        law_named(name)


def main() -> int:
    """Verify the kernel that stdin names, and return the exit status of the run."""
    prepare()
    print(READY, flush=True)
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # the server has ended; what torch does at the end of a process takes a while
    asked = json.loads(line)
    begin()
    os.chdir(asked["folder"])
    sys.path.insert(0, asked["folder"])
    return run_pytest("properties", asked["words"])


if __name__ == "__main__":
    sys.exit(main())
