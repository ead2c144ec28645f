"""GPUs: a child process has one of those that the caller may see, and sees another one behind it."""

import pytest

from tests.harness.device.gpus import VISIBLE
from tests.harness.running.child import Child


@pytest.mark.parametrize(
    ("visible", "device", "told"),
    [("4,6", "cuda:1", ["cuda:0", "6,4"]), (None, "cuda:1", ["cuda:0", "1,0"]), (None, "cpu", ["cpu", None])],
)
def test_a_child_sees_its_own_gpu_first(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, told: list[str | None]
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    child = Child(device, run_seconds=60.0, worker="tests.unit.support.seeing")
    assert child.environment() == {"device": device, "told": told}
    child.close()
