"""Settings of tests that run in this process."""

import pytest
import torch

# The workers of pytest-xdist, one for each core, would spend most of their time waiting for each other's threads.
torch.set_num_threads(1)


@pytest.fixture
def nothing_left_to_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which kernels earlier tests of this process have left to the interpreter: their accesses are not known."""
    monkeypatch.setattr("tests.harness.interpreter.ttir.launch._fallbacks", {})
