"""Print the error of fp8 attention on data with outliers as a table: ``python -m tests.bench.fp8_error``.

As in Shah et al., *FlashAttention-3* (2024), section 4.3, entries of q, k and v are N(0, 1) + N(0, 100) *
Bernoulli(0.001), and the error is the root mean square of out - float64. ``tensor``, one scale for a head, is the plain
kernel that block scales and the rotation are compared with; float16 is flash_v2, whose error is left without fp8. There
is a line for each 8-bit kernel that runs here.
"""

import argparse
import itertools
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when a kernel is imported

from torch import Tensor

from kernels.algorithms import flash_v2, fp8
from kernels.algorithms.flash_v3 import gluon_fp8 as fp8_gluon
from kernels.registry import unavailable_reason
from reference import safe_softmax
from tests.harness.interpreter.installation import repair_interpreter

LENGTHS = {"cpu": (1024, 2048), "cuda": (1024, 2048, 4096, 8192, 16384)}
"""Lengths by device type: on the CPU, those that the interpreter has time for."""


def outliers(heads: int, seqlen: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Draw (1, heads, seqlen, head_dim) float32 from N(0, 1), with N(0, 100) added to one entry in a thousand."""
    shape = (1, heads, seqlen, head_dim)
    chosen = torch.rand(shape, generator=generator) < 1e-3
    return torch.randn(shape, generator=generator) + 10.0 * chosen * torch.randn(shape, generator=generator)


def errors(seqlen: int, head_dim: int, heads: int, seed: int, device: str) -> dict[str, dict[str, float]]:
    """Return the root mean square errors of out on q, k and v of one length without a causal mask.

    There is a dictionary for each 8-bit kernel that runs on the device, by its name: the error of each format and way
    to choose scales, beside that of flash_v2 in float16.
    """
    generator = torch.Generator().manual_seed(seed)
    # Inputs are rounded to float16, so that they are the same for all kernels.
    q, k, v = (outliers(heads, seqlen, head_dim, generator).half().to(device) for _ in range(3))
    options = {"causal": False, "sm_scale": head_dim**-0.5}
    exact, _ = safe_softmax.forward(q, k, v, **options)

    def error(out: Tensor) -> float:
        return (out.double() - exact).square().mean().sqrt().item()

    float16 = error(flash_v2.forward(q, k, v, **options)[0])
    found = {}
    for kernel in (fp8.KERNEL, fp8_gluon.KERNEL):
        if unavailable_reason(kernel.name, device) is None:
            found[kernel.name] = {"float16": float16}
            for form, scaling in itertools.product(fp8.LAUNCH["format"], fp8.LAUNCH["scaling"]):
                out, _ = kernel.forward(q, k, v, **options, format=form, scaling=scaling)
                found[kernel.name][f"{form} {scaling}"] = error(out)
    return found


def main() -> None:
    """Print the table, each line as soon as its length is done."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        repair_interpreter()
    parser = argparse.ArgumentParser(description="RMSE of fp8 attention against float64, data with outliers")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS[device])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for number, seqlen in enumerate(options.lengths):
        rows = errors(seqlen, options.head_dim, options.heads, options.seed, device)
        if number == 0:
            print("seqlen    kernel", *(f"{name:>13}" for name in rows["fp8"]))
        for kernel, row in rows.items():
            print(f"{seqlen:6} {kernel:>9}", *(f"{error:13.2e}" for error in row.values()), flush=True)


if __name__ == "__main__":
    main()
