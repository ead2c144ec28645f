"""How small a factor is found: ``python -m tests.bench.sharpness [--laws LAW ...] [--tensors NAME ...]``.

A kernel computes in float64, and one of its tensors is multiplied by 1 + 2^-n before it is stored. For each tensor and
dtype a line says the largest n by which a call is told as broken (X), and the largest by which one is told as less
precise, or broken (~). It has no claims but those of a plain function.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.contract import AttentionKernel
from kernels.contract.parsing import PLAIN_FUNCTION
from reference import safe_softmax
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.designs.explanations import with_explanations
from tests.harness.law import law_named
from tests.harness.run import ONE_DESIGN
from tests.harness.trial.trial import CannotRun, LawBroken, Refused, Trial

TENSORS = ("out", "lse", "dq", "dk", "dv")
DTYPES = ("float16", "bfloat16", "float32")
LAWS = ("unbiased", "forward", "backward")
LARGEST = 24
"""The largest n that is tried."""
CASES = (
    Case(heads_kv=4, seqlen_q=64, seqlen_k=32, head_dim=64, seed=1),
    Case(heads_kv=2, group=2, seqlen_q=64, seqlen_k=100, head_dim=64, causal=True, seed=2),
    Case(batch=2, heads_kv=4, seqlen_q=70, seqlen_k=16, head_dim=32, seed=3),
    Case(batch=2, seqlen_q=9, seqlen_k=1, head_dim=32, seed=4),
    Case(batch=2, seqlen_q=1, seqlen_k=3, head_dim=16, q_values="tiny_logits", seed=5),
    Case(
        seqlen_q=33, seqlen_k=40, head_dim=32, q_values="integers", k_values="integers", causal=True, seed=6
    ),
)
"""Calls of different sizes: with many elements, with a single key, and with scores near 0."""


def kernel(tensor: str, factor: float) -> AttentionKernel:
    """Return a kernel with one tensor that is multiplied by a factor, with the claims of a plain function."""

    def stored(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        return (x.double() * (factor if name == tensor else 1.0)).to(dtype)

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = safe_softmax.forward(q, k, v, **options)
        return stored("out", out, q.dtype), stored("lse", lse, torch.float32)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
    ) -> tuple[Tensor, ...]:
        found = safe_softmax.backward(dout, q, k, v, **options)
        return tuple(stored(name, x, q.dtype) for name, x in zip(("dq", "dk", "dv"), found, strict=True))

    return AttentionKernel(
        name=f"{tensor}_times", forward=forward, backward=backward, capabilities=PLAIN_FUNCTION
    )


def is_wrong(made: AttentionKernel, law: str, case: Case, device: str, *, whatever: bool) -> bool:
    """Whether a law is broken by a case, ``whatever`` design may explain it or by what none explains."""
    trial = Trial(made, case, device, SAFETY)
    try:
        law_named(law)(trial)
    except LawBroken as broken:
        return (
            whatever or not with_explanations(broken.finding, trial, law_named(law), ONE_DESIGN).explained_by
        )
    except (Refused, CannotRun):
        return False
    return False


def is_told(tensor: str, dtype: str, asked: argparse.Namespace, n: int, *, whatever: bool) -> bool:
    """Whether a factor of 1 + 2^-n is told in any case."""
    made, device = kernel(tensor, 1 + 2.0**-n), "cuda" if torch.cuda.is_available() else "cpu"
    return any(
        is_wrong(made, law, replace(case, dtype=dtype), device, whatever=whatever)
        for law in asked.laws
        for case in CASES
    )


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest n, up to ``most``, for which something holds that holds for all smaller ones; 0 for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def main() -> None:
    """Print the table, a line for each tensor and dtype as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--laws", nargs="+", default=LAWS)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--tensors", nargs="+", default=TENSORS)
    asked = parser.parse_args()
    print("| on | dtype | X | ~ |\n| --- | --- | --- | --- |", flush=True)
    for tensor in asked.tensors:
        for dtype in asked.dtypes:
            tried = partial(is_told, tensor, dtype, asked)
            less = largest(partial(tried, whatever=True), LARGEST)
            broken = largest(partial(tried, whatever=False), less)
            print(f"| {tensor} | {dtype} | {broken} | {less} |", flush=True)


if __name__ == "__main__":
    main()
