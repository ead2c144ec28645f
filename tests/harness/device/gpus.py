"""GPUs of a machine: each process that runs kernels has one of those that the caller may see."""

import os
from collections.abc import Mapping

from tests.harness.accelerators.lookup import OF_CUDA, accelerator_of

VISIBLE = OF_CUDA.visible
"""The environment variable that lists, for CUDA, the GPUs that a process may see: by number or by UUID."""
MIG = "MIG-"
"""The beginning of the UUID of a part of a GPU. A process sees only the first part in the list."""


def gpus(visible: str | None, seen: int) -> int:
    """Return how many GPUs, or parts of GPUs, child processes can have one each of.

    Args:
        visible: the value of ``VISIBLE``, or None if it is not set.
        seen: how many GPUs this process sees.
    """
    entries = _entries(visible)
    return len(entries) if entries and all(entry.startswith(MIG) for entry in entries) else seen


def entry(visible: str | None, number: int) -> str:
    """Return what ``VISIBLE`` is in a process that sees only GPU ``number`` of those that ``visible`` lists.

    Raises ValueError, in one line, if there are fewer.
    """
    if visible is None:
        return str(number)
    entries = _entries(visible)
    if number >= len(entries):
        raise ValueError(f"{VISIBLE}: got {visible!r}, expected an entry for GPU {number}, counted from 0")
    return entries[number]


def _entries(visible: str | None) -> list[str]:
    return [each.strip() for each in visible.split(",")] if visible else []


def pinned(device: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process whose GPU is ``device``, such as "cuda:1"; others change nothing.

    In such a process the GPU is "cuda:0". Behind it in the list is another one, if there is any, as a kernel may be
    called while that is the current device. Raises ValueError, in one line, if the list of visible GPUs is shorter.
    """
    if not accelerator_of(device).visible:
        return {**environment}
    visible, number = environment.get(VISIBLE), int(device.partition(":")[2] or 0)
    own = entry(visible, number)
    # Without a list, CUDA leaves out a number that no GPU has.
    others = [x for x in _entries(visible) or ["1" if number == 0 else "0"] if x != own]
    return {**environment, VISIBLE: ",".join([own, *([] if own.startswith(MIG) else others[:1])])}
