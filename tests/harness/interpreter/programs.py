"""The order in which the programs of Triton kernels run on the CPU. A GPU promises none, so a law may choose it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.harness.interpreter.installation import REPAIRED

QUICKEST, FORWARD, BACKWARD = "", "forward", "backward"
"""All at once as far as that can be; one after the other by their numbers; one after the other from the last one."""


@contextmanager
def in_order(order: str) -> Iterator[Any]:
    """Have the programs of launches run in an order.

    Yields an object whose ``most`` is the number of programs of the largest launch for which an order could be chosen.
    That leaves out launches that this process does not run itself, on a GPU say, and those of kernels whose programs
    may wait for each other, and so have to run by their numbers.
    """
    state: Any = getattr(sys.modules.get(REPAIRED), "programs", None) or SimpleNamespace()
    state.order, state.most = order, 0
    try:
        yield state
    finally:
        state.order = QUICKEST
