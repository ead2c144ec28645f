"""Settings of tests that run in this process."""

import os
import subprocess
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import pytest
import torch

# The workers of pytest-xdist, one for each core, would spend most of their time waiting for each other's threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=not torch.cuda.is_available())
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test start a process, which takes seconds: such tests are in tests/runs. A GPU needs compilers."""

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"a test in tests/unit starts a process: {arguments}")

    for owner, name in ((subprocess, "Popen"), (os, "fork"), (BaseProcess, "start")):
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture
def nothing_left_to_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which kernels earlier tests of this process have left to the interpreter: their accesses are not known."""
    monkeypatch.setattr("tests.harness.interpreter.ttir.launch._fallbacks", {})
