"""Values that differ between a CPU and accelerators."""

import pytest

from strategies.by_device import ByDevice


@pytest.mark.parametrize(
    ("device_type", "value"), [("cpu", 1), ("cuda", 2), ("xpu", 2), ("npu", 2), ("mps", 2), ("mine", 2)]
)
def test_all_accelerators_have_one_value(device_type: str, value: int) -> None:
    assert ByDevice(cpu=1, accelerator=2)[device_type] == value
