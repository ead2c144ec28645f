"""Settings of tests that run in this process."""

import os
import subprocess
import sys
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import pytest
import torch

# The workers of pytest-xdist, one for each core, would spend most of their time waiting for each other's threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=not torch.cuda.is_available())
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test start Python, which takes seconds: such tests are in tests/runs. On a GPU, Triton compiles by it."""

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"a test in tests/unit starts a process: {arguments}")

    def start(command: Any, *arguments: Any, **options: Any) -> Any:
        # matplotlib asks a program of the system for fonts, once on each machine.
        return refuse(command) if command[0] == sys.executable else popen(command, *arguments, **options)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(BaseProcess, "start", refuse)


@pytest.fixture
def nothing_left_to_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which kernels earlier tests of this process have left to the interpreter: their accesses are not known."""
    monkeypatch.setattr("tests.harness.interpreter.ttir.launch._fallbacks", {})
