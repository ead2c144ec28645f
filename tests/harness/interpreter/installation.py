"""Triton kernels where there is no GPU: what runs them is installed where Triton is."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

FORMATS = "tests.harness.interpreter.formats"
REPAIRED = "tests.harness.interpreter.repaired"
"""The module that repairs Triton's interpreter, and the number formats that it needs. Both import Triton."""

EXECUTOR = "tests.harness.interpreter.ttir.launch"
"""The module that runs kernels faster than the interpreter does."""

INTERPRET = "TRITON_INTERPRET"
"""Triton's variable: if it is "1", kernels are not for a GPU."""

ONLY_INTERPRETER = "FLASHPROOF_INTERPRETER"
"""Our variable: if it is "1", all kernels run in the repaired interpreter."""


def repair_interpreter() -> None:
    """Have kernels of this process run by code made of their IR, and what it can't run in the repaired interpreter."""
    if not importlib.util.find_spec("triton"):
        return
    if os.environ.get(ONLY_INTERPRETER) == "1":
        importlib.import_module(REPAIRED).repair()
        return
    # Functions of Triton's own are part of the kernels that are compiled, so they must not be for the interpreter.
    before = os.environ.pop(INTERPRET, None)
    try:
        importlib.import_module(REPAIRED).repair()
        importlib.import_module(EXECUTOR).install()
    finally:
        if before is not None:
            os.environ[INTERPRET] = before


def accesses_outside() -> list[Any]:
    """Return what kernels have touched outside of tensors since the last call of this function: records ``Touched``.

    Loads of what nobody has written are among them while these are told. All are known of kernels that run by code made
    of their IR.
    """
    executor = sys.modules.get(EXECUTOR)
    return executor.accesses_outside() if executor else []


@contextmanager
def telling_unwritten(unwritten: Mapping[int, int]) -> Iterator[None]:
    """Have loads of numbers that nobody has written told among the accesses: see ``PoisonedAllocations.unwritten``."""
    executor = sys.modules.get(EXECUTOR)
    with executor.telling_unwritten(unwritten) if executor else nullcontext():
        yield


def tells_accesses() -> bool:
    """Whether kernels have run in this process of which accesses outside of tensors are known, and no others."""
    executor = sys.modules.get(EXECUTOR)
    return executor is not None and executor.has_executed_all()


def left_to_interpreter() -> Mapping[str, str]:
    """Return why kernels of this process were left to Triton's interpreter, by their names."""
    executor = sys.modules.get(EXECUTOR)
    return executor.fallbacks() if executor else {}


def makes_code() -> bool:
    """Whether this process has kernels that are run by code, which has to be made for each set of constants."""
    executor = sys.modules.get(EXECUTOR)
    return executor is not None and executor.has_kernels()
