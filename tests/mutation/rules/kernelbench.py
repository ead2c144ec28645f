"""KernelBench's check of a generated kernel."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.contract import AttentionKernel
from tests.mutation.rules.base import Rule, RuleCase, max_error, problem, require, run, uniform

_TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}


class KernelBench(Rule):
    """``torch.allclose`` with one number for atol and rtol, 1e-4 in float32, over 5 trials; only out is compared.

    NaN fails. Level 1, problem 97: q, k and v uniform in [0, 1), (32, 32, 512, 1024), no mask; the reference
    is ``scaled_dot_product_attention`` in the same dtype. Its head_dim of 1024 is more than the contract's
    kernels take: it is 256 here, and 128 on the CPU, where batch is 1 and heads are 2. float32 is its default.
    """

    name = "KernelBench (float32)"
    source = (
        "https://github.com/ScalingIntelligence/KernelBench/blob/423217d9fda91e0c2d67e4a43bf62f96f6d104f1/"
        "src/kernelbench/eval.py (run_and_check_correctness), KernelBench/level1/97_ScaledDotProductAttention.py"
    )
    dtype: ClassVar[str] = "float32"

    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return 5 cases, whose seeds are drawn from seed 42."""
        batch, heads, head_dim = (1, 2, 128) if device == "cpu" else (32, 32, 256)
        generator = torch.Generator().manual_seed(42)
        seeds = torch.randint(0, 2**32 - 1, (5,), generator=generator).tolist()
        return [
            RuleCase(batch, heads, heads, 512, 512, head_dim, dtype=self.dtype, seed=seed) for seed in seeds
        ]

    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Run one trial."""
        p = problem(case, device, uniform())
        expected = scaled_dot_product_attention(p.q, p.k, p.v)
        actual = run(kernel, p, backward=False)["out"]
        tolerance = _TOLERANCES[case.dtype]
        require(actual.shape == expected.shape, f"out is {tuple(actual.shape)}")
        close = torch.allclose(expected, actual, atol=tolerance, rtol=tolerance)
        require(close, f"out: off by {max_error(expected, actual)}")


class KernelBenchHalf(KernelBench):
    """KernelBench with ``precision=fp16``, whose tolerance is 1e-2."""

    name = "KernelBench (float16)"
    dtype: ClassVar[str] = "float16"
