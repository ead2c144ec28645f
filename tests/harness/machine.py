"""What this machine bears: its cores and its memory, and how many processes of a run they are enough for."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from strategies.by_device import ByDevice

SHARERS = "PYTEST_XDIST_WORKER_COUNT"
"""The variable in which pytest-xdist tells each of its workers how many there are."""
GB = 10**9
PROCESS_BYTES = ByDevice(cpu=2 * GB, accelerator=4 * GB)
"""Memory of a worker of pytest-xdist and the process that calls the kernel, by device type.

On a CPU these held 0.5 and at most 1.3 GB of their own in a minute of every law. CUDA adds its code.
"""
KERNEL_BYTES = 0.3 * GB
"""What the process of each further kernel holds while another kernel is called: its median on a CPU."""
GPU_BYTES = 2.7 * GB
"""Memory of a GPU for the process that calls a kernel: a context, and the 2 GiB that torch may keep after a call."""
GPU_KERNEL_BYTES = 1.0 * GB
"""What the process of each further kernel holds there: a context, and what torch keeps of ordinary calls.

16 workers with as many processes as they may have each are known to run on a GPU of 140 GB.
"""
START_SECONDS, START_SHARE = ByDevice(cpu=4.0, accelerator=20.0), 1.5
"""The least seconds in which workers of pytest-xdist start, and how many times as long as this process they take.

One process alone would try cases in that time. With two H200, 8 workers began after 10 seconds and 32 after 20, as each
imports PyTorch twice and its process for the kernel opens the GPU.
"""
GAIN = 1.5
"""Workers must try so many times as many cases as one process alone, since each looks into a bug by itself."""


@dataclass(frozen=True)
class Machine:
    """What a run finds on a machine.

    Attributes:
        cores: processor cores that it may use, in fractions where a quota has some.
        memory: bytes of memory that are free.
        gpus: bytes of memory of each GPU; empty for a run on the CPU.
        sharers: how many processes such as this one share the machine, as workers of pytest-xdist do.
    """

    cores: float
    memory: float
    gpus: tuple[int, ...] = ()
    sharers: int = 1


def processes(
    machine: Machine,
    kernels: int = 1,
    most: int | None = None,
    seconds: float = math.inf,
    age: float = 0.0,
) -> tuple[int, str]:
    """Return how many workers of pytest-xdist a run takes, and why; 0 if a single process does all.

    A worker waits while a process of its own calls the kernel, so both together keep one core busy.

    Args:
        machine: what the run finds.
        kernels: how many kernels have a process in each worker at the same time.
        most: the largest number that the user allows.
        seconds: the time for starting workers and trying cases.
        age: the seconds that this process took to start, which are more where others have the cores.
    """
    process = PROCESS_BYTES.accelerator if machine.gpus else PROCESS_BYTES.cpu
    own = process + (kernels - 1) * KERNEL_BYTES
    memory, on_gpu = machine.memory / machine.sharers, GPU_BYTES + (kernels - 1) * GPU_KERNEL_BYTES
    cores = f"{machine.cores:g} core{'s' * (machine.cores != 1)}"
    bounds = {cores: machine.cores / machine.sharers, _room("memory", memory, own): memory / own}
    if machine.gpus:
        each, number = min(machine.gpus) / machine.sharers, len(machine.gpus)
        where = "memory of the GPU" if number == 1 else f"memory on each of {number} GPUs"
        bounds[_room(where, each, on_gpu)] = number * (each // on_gpu)
    if most is not None:
        bounds[f"--maxprocesses {most}"] = most
    reason = min(bounds, key=bounds.__getitem__)
    number = max(1, int(bounds[reason]))
    least = START_SECONDS.accelerator if machine.gpus else START_SECONDS.cpu
    start = max(least, START_SHARE * age)
    if number > 1 and seconds < math.inf and number * (seconds - start) < GAIN * seconds:
        number, reason = 1, f"{seconds:.0f} s are too few for others to start"
    told = [reason, *([cores] if reason != cores else [])]
    if machine.sharers > 1:
        told.append(f"shared by {machine.sharers} workers of pytest-xdist")
    return (number if number > 1 else 0), f"-n {number if number > 1 else 0} ({', '.join(told)})"


def _room(what: str, size: float, each: float) -> str:
    return f"{size / GB:.1f} GB of {what}, {each / GB:.1f} GB for each process"


def this_machine(gpus: tuple[int, ...], environment: Mapping[str, str] = os.environ) -> Machine:
    """Return what this process may use of the machine, within the limits of its control groups."""
    sharers = environment.get(SHARERS, "")
    return Machine(
        cores=min(len(os.sched_getaffinity(0)), quota()),
        memory=min(meminfo().get("MemAvailable:", math.inf), most_memory()),
        gpus=gpus,
        sharers=int(sharers) if sharers.isdecimal() and int(sharers) else 1,
    )


def meminfo() -> dict[str, int]:
    """Return the memory of the machine in bytes, by the names of /proc/meminfo; empty where there is no such file."""
    with suppress(OSError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        return {name: 1024 * int(size) for name, size, *_ in lines}
    return {}


def quota(root: Path = Path("/")) -> float:
    """Return the cores that the control groups of this process allow; infinite without a limit."""
    return min((cores_in(folder) for folder in control_groups("cpu", root)), default=math.inf)


def most_memory(root: Path = Path("/")) -> float:
    """Return the bytes of memory that the control groups of this process allow; infinite without a limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    found = (_number(folder / name) for folder in control_groups("memory", root) for name in names)
    return min(found, default=math.inf)


def cores_in(folder: Path) -> float:
    """Return the cores that one control group allows, by a file of either version; infinite without a limit."""
    with suppress(OSError, ValueError):
        time, period = (folder / "cpu.max").read_text().split()
        return math.inf if time == "max" else int(time) / int(period)
    allowed, each = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return allowed / each if 0 < allowed < math.inf else math.inf


def control_groups(kind: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups of this process that limit "cpu" or "memory", and of all around them.

    A container may see the folders of its own group at the top, whatever the name of the group is.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds or kind in kinds.split(","):
                top = root / "sys/fs/cgroup" / kinds
                inner = top / path.lstrip("/")
                yield from (x for x in (inner, *inner.parents) if x.is_relative_to(top))


def _number(file: Path) -> float:
    """Return the number in a file; infinite if there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return math.inf
