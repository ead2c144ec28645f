"""The test that an engineer writes with the tools that come with PyTorch."""

from collections.abc import Sequence
from functools import partial
from itertools import product

import torch

from kernels.contract import AttentionKernel
from tests.mutation.rules.base import Rule, RuleBroken, RuleCase, differentiate, normal, plain, problem, run


class AssertClose(Rule):
    """``torch.testing.assert_close`` with its defaults, against a float32 reference cast to the dtype.

    |actual - expected| <= 1e-5 + rtol |expected|, rtol 1e-3 in float16, 1.6e-2 in bfloat16, 1.3e-6 in
    float32; NaN fails. Standard normal inputs, contiguous: batch 2, 2 heads, lengths 128 and 256, head_dim
    64. This is no suite in particular, so its sizes need no reduction on the CPU.
    """

    name = "torch.testing.assert_close"
    source = "https://docs.pytorch.org/docs/stable/testing.html (defaults of assert_close)"

    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return 12 cases: every combination of dtype, length and mask."""
        return [
            RuleCase(2, 2, 2, length, length, 64, dtype=dtype, causal=causal)
            for dtype, length, causal in product(
                ("float16", "bfloat16", "float32"), (128, 256), (False, True)
            )
        ]

    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Judge out, dq, dk and dv, but not lse, which few engineers test."""
        p = problem(case, device, normal())
        expected = differentiate(partial(plain, p), p, torch.float32)
        actual = run(kernel, p)
        for name, reference in expected.items():
            try:
                torch.testing.assert_close(actual[name], reference.to(case.torch_dtype))
            except AssertionError as e:
                raise RuleBroken(f"{name}: {e}") from e
