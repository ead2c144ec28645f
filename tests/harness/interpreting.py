"""Running Triton kernels in the interpreter: how it is repaired where Triton is installed."""

import importlib
import importlib.util

REPAIRED = "tests.harness.interpreter"
"""The module that repairs the interpreter; it imports Triton."""


def repair_interpreter() -> None:
    """Repair the interpreter of this process, where Triton is installed."""
    if importlib.util.find_spec("triton"):
        importlib.import_module(REPAIRED).repair()
