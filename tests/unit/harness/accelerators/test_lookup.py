"""Which accelerators there are, as this torch and this machine have them."""

from types import SimpleNamespace

import pytest
import torch

from tests.harness.accelerators import lookup
from tests.harness.accelerators.cuda import Cuda
from tests.harness.accelerators.interface import Accelerator, NoAccelerator
from tests.harness.accelerators.lookup import accelerator_of, available, in_use

TYPES: dict[str, type[Accelerator]] = {
    "cpu": NoAccelerator,
    "cuda": Cuda,
    "cuda:1": Cuda,
    "xpu:0": Accelerator,
    "npu": Accelerator,
    "mps": Accelerator,
    "mine:3": Accelerator,
}


@pytest.mark.parametrize("device", TYPES)
def test_each_type_has_one_interface(device: str) -> None:
    found = accelerator_of(device)
    assert type(found) is TYPES[device]
    assert found.type == device.partition(":")[0]
    assert accelerator_of(found.type) is found


def test_a_device_of_torch_is_looked_up_as_its_name() -> None:
    assert accelerator_of(torch.device("xpu", 1)) is accelerator_of("xpu")


def there(monkeypatch: pytest.MonkeyPatch, accelerator: str | None, *, cuda: bool) -> None:
    found = None if accelerator is None else SimpleNamespace(type=accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)


@pytest.mark.parametrize(
    ("accelerator", "cuda", "types"),
    [
        (None, False, ("cpu",)),
        ("cuda", True, ("cuda", "cpu")),
        ("xpu", False, ("xpu", "cpu")),
        ("mine", False, ("mine", "cpu")),
        ("mine", True, ("cuda", "mine", "cpu")),
    ],
)
def test_what_torch_finds_is_available(
    monkeypatch: pytest.MonkeyPatch, accelerator: str | None, cuda: bool, types: tuple[str, ...]
) -> None:
    there(monkeypatch, accelerator, cuda=cuda)
    assert available() == types


def test_a_process_uses_an_accelerator_once_it_has_memory_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, "mine", cuda=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    has_memory = [False, True]
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: has_memory.pop(0))
    assert in_use() is None
    assert in_use() is accelerator_of("mine")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert in_use() is lookup.OF_CUDA


def test_a_process_without_any_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for accelerator in (None, "cuda"):
        there(monkeypatch, accelerator, cuda=False)
        assert in_use() is None
