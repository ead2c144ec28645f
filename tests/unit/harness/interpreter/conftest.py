"""The two ways in which kernels run without a GPU, and the one with a GPU."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.harness.interpreter.ttir import launch
from tests.harness.interpreter.ttir.launch import fallbacks, interpreted
from tests.unit.support.calling import DEVICE


@pytest.fixture(params=["compiled"] if DEVICE == "cuda" else ["executed", "interpreted"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels of each test in each way that there is here; none may be left to the interpreter silently."""
    monkeypatch.setattr(launch, "_fallbacks", {})
    with interpreted() if request.param == "interpreted" else nullcontext():
        yield
    assert not fallbacks()
