"""The clock, temperature and power of the GPU, which decide how far two times can be compared."""

import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True)
class Clocks:
    """The clock of the multiprocessors in MHz, the temperature in degrees Celsius and the power in watts."""

    sm_mhz: int
    celsius: int
    watts: int

    def __str__(self) -> str:
        return f"{self.sm_mhz} MHz, {self.celsius} °C, {self.watts} W"


Read = Callable[[], Clocks]


def by_torch() -> Clocks:
    """Read them through torch, which needs the package nvidia-ml-py."""
    return Clocks(torch.cuda.clock_rate(), torch.cuda.temperature(), torch.cuda.power_draw() // 1000)


def by_nvidia_smi() -> Clocks:
    """Read them from the program nvidia-smi, which takes a tenth of a second or more."""
    told = subprocess.run(
        [
            "nvidia-smi",
            f"--id=GPU-{torch.cuda.get_device_properties().uuid}",
            "--query-gpu=clocks.sm,temperature.gpu,power.draw",
            "--format=csv,noheader,nounits",
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=10,
    ).stdout
    return Clocks(*(round(float(value)) for value in told.split(",")))


WAYS: tuple[Read, ...] = (by_torch, by_nvidia_smi)


def reader() -> tuple[Callable[[], Clocks | None], str]:
    """Return a function that reads the clocks in the first way that works, or None; and why no way does, or ""."""
    reasons = []
    for way in WAYS:
        try:
            way()
            return partial(_if_it_works, way), ""
        except Exception as error:  # torch, NVML and nvidia-smi each fail in their own ways
            reasons.append(f"{type(error).__name__}: {error}")
    return lambda: None, "; ".join(reasons)


def _if_it_works(way: Read) -> Clocks | None:
    with suppress(Exception):  # a reading that fails must not cost the times it belongs to
        return way()
    return None


def extremes(readings: Iterable[Clocks | None]) -> str:
    """Return the lowest and the highest of each value, in words; "" if there are no readings."""
    read = [clocks for clocks in readings if clocks]
    if not read:
        return ""
    ranges = (
        f"{min(values)} to {max(values)} {unit}"
        for values, unit in (
            ([c.sm_mhz for c in read], "MHz"),
            ([c.celsius for c in read], "°C"),
            ([c.watts for c in read], "W"),
        )
    )
    return ", ".join(ranges)
