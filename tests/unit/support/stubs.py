"""What stands in for a kernel in tests of what is asked of it."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from kernels.contract import Capabilities
from tests.harness.running.runs import Runs


def runs_of(capabilities: Capabilities, **answers: Any) -> Any:
    """Return what stands in for ``Runs`` of a kernel with these claims that refuses nothing, with other ``answers``.

    Of a kernel for which only ``hard`` is given, no design would explain what is wrong.
    """
    info = SimpleNamespace(capabilities=capabilities)
    answers.setdefault("wrong", answers.get("hard"))
    runs: Any = SimpleNamespace(info=info, bugs={}, claims_of=lambda law: capabilities, **answers)
    runs.asked = partial(Runs.asked, runs)
    return runs
