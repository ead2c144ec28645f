"""What only the process that holds the device can tell of it: whether it still answers, and when it is done."""

import os
from threading import Timer

import torch

WAIT_SECONDS = 120.0
"""Of the device alone, once a kernel's launcher has come back, and with it all compilation: a case takes milliseconds,
on a device that many processes share some seconds.
"""

OVERRAN = 124
"""Status of a process whose device overran its time, as of timeout(1)."""


def device_answers(device: str) -> bool:
    """Whether the device still does: an illegal address ends the process's context for good."""
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def wait_for_device(device: str, seconds: float = WAIT_SECONDS) -> None:
    """Until the device has done what it was given. A process whose device takes longer ends, with ``OVERRAN``."""
    if device == "cpu":
        return
    timer = Timer(seconds, os._exit, (OVERRAN,))
    timer.start()
    try:
        torch.cuda.synchronize()
    finally:
        timer.cancel()
