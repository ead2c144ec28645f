"""The roofline: how fast a call can be on a GPU with a measured speed of its tensor cores and of its memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.bench.shapes import Shape
from tests.bench.timings import Times

Timer = Callable[[Callable[[], Any]], Times]
"""A function that calls another one many times, and returns the times of these calls."""

SIDE = 8192
"""Rows and columns of the bfloat16 matrices of the product: enough tiles for every multiprocessor, many times over."""
BYTES = 2**30
"""Bytes that are copied: many times the L2 cache."""


@dataclass(frozen=True)
class Ceiling:
    """The speed of a large bfloat16 matrix product, in TFLOPS, and of a large copy, in 10^12 bytes per second.

    They are measured, not those of a data sheet: a GPU at work lowers its clocks to stay within its power, and no
    library reaches the peak of the data sheet. A copy counts the bytes that it reads and those that it writes.
    """

    tflops: float
    terabytes_per_second: float

    def __str__(self) -> str:
        return (
            f"a matrix product reaches {self.tflops:.0f} TFLOPS, a copy {self.terabytes_per_second:.2f} TB/s"
        )

    def attainable(self, shape: Shape, direction: str) -> float:
        """Return the most TFLOPS that a call can reach: those of the product, or what the memory has bytes for.

        A call of F operations that moves at least B bytes takes the longer of F / tflops and
        B / terabytes_per_second, so its speed is the smaller of tflops and terabytes_per_second * F / B.
        """
        return min(
            self.tflops,
            self.terabytes_per_second * shape.flops(direction) / shape.least_bytes(direction),
        )


def measured(device: str, timer: Timer, side: int = SIDE, copied: int = BYTES) -> Ceiling:
    """Time the copy and the product.

    The data of the product are normal, as in the calls, because its power depends on them. The copy comes first, and a
    GPU that was idle has raised its clocks when the product is timed.
    """
    source = torch.zeros(copied, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = timer(lambda: target.copy_(source))
    a, b = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    product = timer(lambda: torch.matmul(a, b, out=out))
    return Ceiling(2 * side**3 / product.median / 1e9, 2 * copied / copy.median / 1e9)
