"""GPUs: a child process has one of those that the caller may see."""

import os
from types import SimpleNamespace

import pytest
import torch

from tests.harness.device.gpus import VISIBLE, entry, gpus, pinned
from tests.harness.running.child import seen_by_child
from tests.harness.session.plan import chosen_device

PARTS = "MIG-1c0d,MIG-2e5f"


@pytest.mark.parametrize(
    ("visible", "number", "expected"),
    [
        (None, 0, "0"),
        (None, 3, "3"),
        ("4,6", 0, "4"),
        ("4, 6", 1, "6"),
        ("GPU-8932f937, GPU-b2c1", 1, "GPU-b2c1"),
        (PARTS, 1, "MIG-2e5f"),
    ],
)
def test_an_entry_of_what_the_caller_may_see(visible: str | None, number: int, expected: str) -> None:
    assert entry(visible, number) == expected


@pytest.mark.parametrize(
    ("visible", "number", "expected"),
    [
        (None, 0, "0,1"),
        (None, 3, "3,0"),
        ("4,6", 0, "4,6"),
        ("4, 6", 1, "6,4"),
        ("4", 0, "4"),
        ("GPU-8932f937, GPU-b2c1", 1, "GPU-b2c1,GPU-8932f937"),
        (PARTS, 1, "MIG-2e5f"),
    ],
)
def test_a_process_has_its_gpu_first_and_may_see_another(
    visible: str | None, number: int, expected: str
) -> None:
    caller = {"HOME": "/home"} | ({} if visible is None else {VISIBLE: visible})
    assert pinned(f"cuda:{number}", caller) == {"HOME": "/home", VISIBLE: expected}


@pytest.mark.parametrize(("visible", "number"), [("4,6", 2), ("", 0)])
def test_never_more_than_the_caller_may_see(visible: str, number: int) -> None:
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES: got '{visible}', expected an entry for GPU"):
        entry(visible, number)


def test_on_the_cpu_nothing_changes() -> None:
    assert pinned("cpu", {VISIBLE: "4,6"}) == {VISIBLE: "4,6"}
    assert pinned("cpu") == os.environ


@pytest.mark.parametrize(
    ("visible", "seen", "expected"), [(None, 8, 8), ("4,6", 2, 2), ("4,-1,6", 1, 1), (PARTS, 1, 2)]
)
def test_parts_of_gpus_are_counted_by_the_list(visible: str | None, seen: int, expected: int) -> None:
    assert gpus(visible, seen) == expected


def test_workers_share_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = {"getoption": lambda name: "auto"}
    workers = [SimpleNamespace(**options, workerinput={"workerid": f"gw{i}"}) for i in range(4)]
    devices = [chosen_device(worker) for worker in (SimpleNamespace(**options), *workers)]  # type: ignore[arg-type]
    assert devices == ["cuda:0", "cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_workers_share_the_devices_of_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,6")
    found = SimpleNamespace(type="mine")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for asked in ("auto", "mine"):
        options = {"getoption": lambda name, asked=asked: asked}
        workers = [SimpleNamespace(**options, workerinput={"workerid": f"gw{i}"}) for i in range(4)]
        devices = [chosen_device(worker) for worker in workers]  # type: ignore[arg-type]
        assert devices == ["mine:0", "mine:1", "mine:2", "mine:0"]
    assert pinned("mine:1", {VISIBLE: "4,6"}) == {VISIBLE: "4,6"}
    assert [seen_by_child(x) for x in ("mine:1", "cuda:1", "cpu")] == ["mine:1", "cuda:0", "cpu"]


@pytest.mark.parametrize("asked", ["cuda", "xpu", "cuda:0", "mine"])
def test_a_device_that_this_torch_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = SimpleNamespace(getoption=lambda name: asked)
    with pytest.raises(pytest.UsageError) as raised:
        chosen_device(config)  # type: ignore[arg-type]
    assert (
        str(raised.value) == f"--device: got {asked}, expected cpu or auto: torch finds no other device here"
    )
