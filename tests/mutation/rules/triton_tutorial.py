"""The test of Triton's tutorial on fused attention."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kernels.contract import AttentionKernel
from tests.harness.trial.problem import Problem
from tests.mutation.rules.base import (
    Rule,
    RuleCase,
    differentiate,
    hidden,
    matmul,
    max_error,
    normal,
    problem,
    require,
    run,
)

_SIZES = {
    # Shapes are (batch, heads, length). Batch 4 x 48 heads at 4096 is left out: its reference takes 60 GB.
    "cuda": ((1, 2, 128), (1, 2, 1024), (1, 2, 4096), (4, 48, 128), (4, 48, 1024)),
    "cpu": ((1, 2, 128), (1, 2, 256), (1, 2, 384)),
}


class TritonTutorial(Rule):
    """allclose(atol=1e-2, rtol=0) for out, dv, dk and dq, which NaN fails; M, its lse, is not compared.

    float16 throughout, q, k and v of standard deviation 0.5, dout of 1, sm_scale 0.5, seed 20, equal lengths
    that are multiples of 128, as many key heads as query heads, contiguous. The reference's products are
    float16, only its softmax float32. The tolerance is that of the test's old form, the shapes are those of its new
    one. On the CPU, lengths of 128 to 384 stand for those of 128 to 4096.
    """

    name = "Triton tutorial 06"
    source = (
        "https://github.com/triton-lang/triton/blob/003da478/python/tutorials/06-fused-attention.py (test_op)"
    )

    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return the grid: 12 cases on the CPU, 20 elsewhere."""
        sizes = _SIZES["cpu" if device == "cpu" else "cuda"]
        return [
            RuleCase(
                batch,
                heads,
                heads,
                length,
                length,
                head_dim,
                dtype="float16",
                causal=causal,
                sm_scale=0.5,
                seed=20,
            )
            for (batch, heads, length), head_dim, causal in product(sizes, (64, 128), (False, True))
        ]

    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Check the four assertions of the test, in its order."""
        p = problem(case, device, normal(0.5), dout=normal())
        expected = differentiate(partial(_attention, p), p, torch.float16)
        actual = run(kernel, p)
        for name in ("out", "dv", "dk", "dq"):
            close = torch.allclose(expected[name], actual[name], atol=1e-2, rtol=0)
            require(close, f"{name}: off by {max_error(expected[name], actual[name])}")


def _attention(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the reference of the test: the scores, and P before its product with v, are rounded to float16."""
    scores = (matmul(q, k.mT) * p.sm_scale).masked_fill(hidden(p), -math.inf)
    return matmul(scores.float().softmax(-1).to(q.dtype), v)
