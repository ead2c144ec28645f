"""What stands in for a kernel in tests of what is asked of it."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from kernels.contract import Capabilities
from tests.harness.running.runs import Runs


def runs_of(capabilities: Capabilities, **answers: Any) -> Any:
    """Return what stands in for ``Runs`` of a kernel with these claims that refuses nothing, with other ``answers``.

    Of a kernel for which only ``judged`` is given, no design would explain what is wrong.
    """
    info = SimpleNamespace(capabilities=capabilities)
    answers.setdefault("judged_raw", answers.get("judged"))
    answers |= {"assumed": (), "assuming": lambda alternatives: nullcontext()}
    runs: Any = SimpleNamespace(info=info, bugs={}, claims_of=lambda law: capabilities, **answers)
    runs.oracle = partial(Runs.oracle, runs)
    return runs
