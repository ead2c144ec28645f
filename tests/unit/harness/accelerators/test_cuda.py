"""CUDA: each method calls the function of ``torch.cuda`` that it stands for, and nothing else."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.harness.accelerators import cuda
from tests.harness.accelerators.cuda import Cuda
from tests.harness.accelerators.interface import CaptureRefused
from tests.unit.support.recorded import Recorded

STATISTICS = {"allocated_bytes": {"all": {"current": 7}}}
CALLS: dict[str, tuple[Callable[[Cuda], object], list[str]]] = {
    "is_available": (lambda a: a.is_available(), ["is_available()"]),
    "is_initialized": (lambda a: a.is_initialized(), ["is_initialized()"]),
    "device_count": (lambda a: a.device_count(), ["device_count()"]),
    "name": (lambda a: a.name(), ["get_device_name()"]),
    "use": (lambda a: a.use("cuda:0"), ["set_device('cuda:0')"]),
    "current_device": (lambda a: a.current_device(), ["current_device()"]),
    "set_device": (lambda a: a.set_device(1), ["set_device(1)"]),
    "beside": (lambda a: a.beside(0), ["device_count()", "device(1)"]),
    "synchronize": (lambda a: a.synchronize(), ["synchronize()"]),
    "current_stream": (lambda a: a.current_stream(), ["current_stream()"]),
    "set_stream": (lambda a: a.set_stream("s"), ["set_stream('s')"]),
    "side_stream": (lambda a: a.side_stream(), ["Stream()", "stream(Stream)"]),
    "keep_busy": (lambda a: a.keep_busy(8), ["_sleep(8)"]),
    "memory": (lambda a: a.memory(), ["mem_get_info()"]),
    "limit_memory": (lambda a: a.limit_memory(0.5), ["set_per_process_memory_fraction(0.5)"]),
    "empty_cache": (lambda a: a.empty_cache(), ["empty_cache()"]),
}
"""By method, a call of it and what it calls of ``torch.cuda``."""


@pytest.mark.parametrize("method", CALLS)
def test_each_method_calls_one_function(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    recorded = Recorded(answer=2)
    monkeypatch.setattr(torch, "cuda", recorded)
    call, expected = CALLS[method]
    call(Cuda())
    assert recorded.calls == expected


def test_what_has_been_launched_is_waited_for_in_the_relaxed_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(answer=2)
    monkeypatch.setattr(torch, "cuda", recorded)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Recorded(0, name, recorded.calls))
    monkeypatch.setattr(ctypes, "byref", lambda mode: mode.value)
    Cuda().wait_for_launched()
    assert recorded.calls == [
        f"libcuda.so.1.cuThreadExchangeStreamCaptureMode({cuda.RELAXED})",
        "Event(blocking=True)",
        "default_stream()",
        "Event.record(2)",
        "Event.synchronize()",
    ]


def test_memory_is_read_from_the_nested_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: STATISTICS)
    assert (Cuda().held("allocated"), Cuda().held("reserved")) == (7, 0)


def test_nothing_is_left_out() -> None:
    found = Cuda()
    assert (found.has_graphs, found.has_sanitizers, found.has_pinned_memory) == (True, True, True)
    needs = ("has_float64", "has_streams", "has_events", "tells_memory", "tells_held")
    assert all(vars(Cuda)[name] is True for name in needs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_call_is_captured_and_replayed() -> None:
    found, x = Cuda(), torch.ones(3, device="cuda")
    with found.side_stream():
        replay, y = found.captured(lambda: x + 1)
    x.fill_(2.0)
    replay()
    found.synchronize()
    assert y.tolist() == [3.0] * 3
    with found.side_stream(), pytest.raises(CaptureRefused):
        found.captured(found.synchronize)
    assert not found.left_out()
    assert torch.rand(2, device="cuda").shape == (2,)


def test_the_memory_of_a_gpu_is_known_without_using_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 7, 1: 9}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=sizes[number])
    )
    assert [Cuda().total_memory(number) for number in sizes] == [7, 9]
