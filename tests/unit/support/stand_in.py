"""A stand-in for an accelerator, which the CPU computes for: it has streams, two devices and graphs in name alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.harness.accelerators.interface import Accelerator


class StandIn(Accelerator):
    """An accelerator on the CPU. ``called`` has the names of the methods that were called, in their order."""

    has_graphs = True
    has_float64 = has_streams = has_events = True
    tells_memory = tells_held = False

    def __init__(self) -> None:
        super().__init__("cpu")
        self.stream = SimpleNamespace(number=0)
        self.device, self.is_replayed = 0, False
        self.called: list[str] = []

    def device_count(self) -> int:
        """Return two."""
        return 2

    def current_device(self) -> int:
        """Return the number of the current device."""
        return self.device

    def set_device(self, number: int) -> None:
        """Make another device the current one."""
        self.device = number

    def current_stream(self) -> Any:
        """Return the current stream."""
        return self.stream

    def set_stream(self, stream: Any) -> None:
        """Make another stream the current one."""
        self.stream = stream

    def synchronize(self) -> None:
        """Note that it is waited for."""
        self.called.append("synchronize")

    def keep_busy(self, cycles: int) -> None:
        """Note the stream that is kept busy."""
        self.called.append(f"keep_busy {self.stream.number}")

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Make stream 1 the current one meanwhile."""
        self.called.append("side_stream")
        before, self.stream = self.stream, SimpleNamespace(number=1, wait_stream=self._wait)
        try:
            yield
        finally:
            self.stream = before

    def _wait(self, other: Any) -> None:
        self.called.append(f"wait_stream {other.number}")

    @contextmanager
    def beside(self, number: int) -> Iterator[None]:
        """Make device 1 the current one meanwhile."""
        self.called.append("beside")
        self.device = 1
        try:
            yield
        finally:
            self.device = 0

    def captured(self, call: Callable[[], Mapping[str, Tensor]]) -> tuple[Callable[[], object], Any]:
        """Make the call, and return what makes it again and writes to the same tensors."""
        self.called.append("captured")
        results = call()

        def replay() -> None:
            self.called.append("replay")
            self.is_replayed = True
            for name, x in call().items():
                results[name].detach().copy_(x.detach())
            self.is_replayed = False

        return replay, results
