"""Accelerators by ``torch.accelerator``: what each method calls, and what is told of a type that lacks much."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness.accelerators.interface import Accelerator, CaptureRefused, NoAccelerator
from tests.unit.support.recorded import Recorded

CALLS: dict[str, tuple[Callable[[Accelerator], object], list[str]]] = {
    "use": (lambda a: a.use("mine:1"), ["accelerator.set_device_index('mine:1')"]),
    "current_device": (lambda a: a.current_device(), ["accelerator.current_device_index()"]),
    "set_device": (lambda a: a.set_device(1), ["accelerator.set_device_index(1)"]),
    "device_count": (lambda a: a.device_count(), ["accelerator.device_count()"]),
    "beside": (lambda a: a.beside(0), ["accelerator.device_count()", "accelerator.device_index(1)"]),
    "synchronize": (lambda a: a.synchronize(), ["accelerator.synchronize()"]),
    "current_stream": (lambda a: a.current_stream(), ["accelerator.current_stream()"]),
    "set_stream": (lambda a: a.set_stream("s"), ["accelerator.set_stream('s')"]),
    "side_stream": (lambda a: a.side_stream(), ["Stream('mine')"]),
    "wait_for_launched": (
        lambda a: a.wait_for_launched(),
        [
            "Event('mine', blocking=True)",
            "accelerator.current_stream()",
            "Event.record(2)",
            "Event.synchronize()",
        ],
    ),
    "empty_cache": (lambda a: a.empty_cache(), ["accelerator.empty_cache()"]),
    "limit_memory": (lambda a: a.limit_memory(0.5), ["mine.set_per_process_memory_fraction(0.5)"]),
    "name": (lambda a: a.name(), ["mine.get_device_name()"]),
}
"""By method, a call of it and what it calls of torch."""


@pytest.mark.parametrize("method", CALLS)
def test_each_method_calls_torch_once(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    recorded = Recorded(answer=2)
    for name in ("accelerator", "Stream", "Event"):
        monkeypatch.setattr(torch, name, getattr(recorded, name))
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: recorded.mine)
    call, expected = CALLS[method]
    call(Accelerator("mine"))
    assert recorded.calls == expected


class Minimal(Accelerator):
    """A type of which PyTorch knows nothing but how to wait for it; its tensors are those of the CPU."""

    module: Any = SimpleNamespace()

    def _sum(self, dtype: torch.dtype) -> float:
        raise RuntimeError(f"no {dtype} on this device")


class Lacking:
    """Takes the place of ``torch.accelerator`` where it has nothing: each function raises an exception."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def lacking(*arguments: Any) -> Any:
            raise RuntimeError(f"{name} is not implemented")

        return lacking


def test_what_a_type_lacks_is_told_and_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", Lacking())
    found = Minimal("cpu")
    assert found.left_out() == (
        "calls on a side stream",
        "calls in a graph",
        "laws that judge results where the kernel leaves them, for which it lacks float64",
        "memory of the device that calls leave allocated",
        "whether the memory of the device is full",
        "what calls do to its random generator",
        "an early end of kernels that hang while they are launched",
    )
    assert found.memory() is None
    assert found.held("allocated") is None
    assert found.name() == "cpu"
    found.limit_memory(0.5)
    found.empty_cache()
    with pytest.raises(CaptureRefused, match="no graphs of calls on cpu"):
        found.captured(lambda: None)


def test_generators_are_those_of_the_module_or_its_functions() -> None:
    found = Minimal("cpu")
    found.module = SimpleNamespace(default_generators=(torch.default_generator,))
    assert found.generators() == (torch.default_generator,)
    found.module = torch.random
    (generator,) = found.generators()
    assert torch.equal(generator.get_state(), torch.get_rng_state())


def test_the_cpu_has_nothing_to_wait_for() -> None:
    cpu = NoAccelerator()
    cpu.use("cpu")
    cpu.synchronize()
    cpu.empty_cache()
    assert (cpu.device_count(), cpu.memory(), cpu.held("allocated"), cpu.is_available()) == (
        0,
        None,
        None,
        True,
    )
    assert cpu.has_float64
    assert cpu.name()
