"""What is different on a CPU and on an accelerator, such as how large a drawn case may be."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ByDevice(Generic[T]):
    """A value for the CPU, and one for accelerators of all types, read by the type of a device: ``limit["cuda"]``."""

    cpu: T
    accelerator: T

    def __getitem__(self, device_type: str) -> T:
        """Return the value for a type of device, such as "cpu", "cuda" or "xpu"."""
        return self.cpu if device_type == "cpu" else self.accelerator
