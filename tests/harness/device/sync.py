"""What only the process that holds the device can find out: whether it still answers, and when its work is done."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread, Timer

from tests.harness.accelerators.lookup import accelerator_of

WAIT_SECONDS = 20.0
"""Seconds that the device may take for the work that it has got, without any compilation. A case takes milliseconds, or
some seconds on a device that many processes share. A kernel that hangs is then told in a run of a minute as well.
"""
IMPATIENT_SECONDS = 5.0
"""Seconds that the device may take for a kernel that has hung before. Cases like the one that hung are tried to find a
smaller one, and most of them hang as well.
"""

LOOK_SECONDS = 5.0
"""Seconds between two looks at whether the device goes on with its work while a kernel's launcher runs."""

FULL_BELOW = 2**27
"""A GPU with fewer free bytes is full: the libraries that kernels call may need more, such as cuBLAS for workspaces."""

OVERRAN = 124
"""Exit status of a process whose device overran its time, as in timeout(1)."""


def device_answers(device: str) -> bool:
    """Whether the device still answers. After an illegal address, the process's context on it is lost for good."""
    try:
        accelerator_of(device).synchronize()
    except Exception:
        return False
    return True


def device_is_full(device: str) -> bool:
    """Whether the device has hardly any memory left, so that a library may fail there, whatever it calls its failure.

    Other processes may hold that memory. A device that does not answer is not said to be full.
    """
    try:
        memory = accelerator_of(device).memory()
    except Exception:
        return False
    return memory is not None and memory[0] < FULL_BELOW


def wait_for_device(device: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait until the device has finished its work. If it takes longer, the process exits with ``OVERRAN``."""
    if device == "cpu":
        return
    timer = Timer(seconds, os._exit, (OVERRAN,))
    timer.start()
    try:
        accelerator_of(device).synchronize()
    finally:
        timer.cancel()


@contextmanager
def watched(device: str, seconds: float = WAIT_SECONDS, look: float = LOOK_SECONDS) -> Iterator[None]:
    """Watch a device beside the code that launches work on it, which may take long to compile.

    If the device needs more than so many seconds for work that has been launched, the process exits with ``OVERRAN``. A
    launcher can't tell, since it may wait for the device without end: a module is loaded only once the device is idle.
    """
    over = Event()
    if device != "cpu":
        Thread(target=_watch, args=(device, over, seconds, look), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(device: str, over: Event, seconds: float, look: float) -> None:
    """Wait again and again for what has been launched by then, until all is over."""
    while not over.wait(look):
        timer = Timer(seconds, os._exit, (OVERRAN,))
        timer.start()
        try:
            accelerator_of(device).wait_for_launched()
        except Exception:  # the device is lost, as the launcher will find out
            return
        finally:
            timer.cancel()


ASKS_WHERE = signal.SIGUSR1
"""The signal at which a process prints where it is, as it does when it ends by a fault."""
