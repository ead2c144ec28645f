"""What only the process that holds the device can find out: whether it still answers, and when its work is done."""

import os
from threading import Timer

import torch

WAIT_SECONDS = 120.0
"""Seconds that the device may take once a kernel's launcher has returned, and with it all compilation. A case takes
milliseconds, or some seconds on a device that many processes share.
"""

OVERRAN = 124
"""Exit status of a process whose device overran its time, as in timeout(1)."""


def device_answers(device: str) -> bool:
    """Whether the device still answers. After an illegal address, the process's context on it is lost for good."""
    if not device.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def wait_for_device(device: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait until the device has finished its work. If it takes longer, the process exits with ``OVERRAN``."""
    if device == "cpu":
        return
    timer = Timer(seconds, os._exit, (OVERRAN,))
    timer.start()
    try:
        torch.cuda.synchronize()
    finally:
        timer.cancel()
