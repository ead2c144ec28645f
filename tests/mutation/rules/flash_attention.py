"""The test in the repository of FlashAttention 2."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import product

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
    repeated,
    require,
    run,
    sample,
)

_HEAD_DIMS = (32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256)
_LENGTHS = {
    "cuda": (
        *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512)),
        *((512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)),
    ),
    # Lengths above 256 are divided, so that partial tiles stay, and the longer side stays the longer.
    "cpu": (
        *((113, 203), (128, 217), (113, 211), (108, 256), (128, 256)),
        *((256, 128), (256, 256), (255, 256), (256, 255), (384, 384)),
    ),
}
_HEADS = {"cuda": ((6, 6), (6, 1), (6, 2)), "cpu": ((2, 2), (2, 1), (4, 2))}
"""Heads of q and of k for multi-head, multi-query and grouped-query attention."""
_FACTORS = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}


class FlashAttention2(Rule):
    """max|out - ref| <= 2 max|pt - ref|, and 3 times for dq, dk and dv; lse is returned but not compared.

    ref is PyTorch in float32, rounded to the dtype; pt is PyTorch in the dtype, which scales k instead of q.
    NaN fails, as no comparison with it holds. Standard normal inputs and dout, seed 0, sm_scale 1/sqrt(d);
    (batch, seqlen, heads, d) views, k and v packed or not. Without dropout, softcap, alibi and windows the
    test has 2,640 cases, of which this is a fixed sample. On the CPU, batch is 1 instead of 4, heads are 2 to 4
    instead of 6, and lengths above 256 are shortened.
    """

    name = "FlashAttention 2"
    source = (
        "https://github.com/Dao-AILab/flash-attention/blob/0251105a2fb19d2957484b7f023cd8c115286ced/"
        "tests/test_flash_attn.py (test_flash_attn_output)"
    )

    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return the sample: 12 cases on the CPU, 120 elsewhere. The last factor varies fastest, as in pytest."""
        place, batch, count = ("cpu", 1, 12) if device == "cpu" else ("cuda", 4, 120)
        dtypes, layouts = ("float16", "bfloat16"), ("kvpacked", "bnhd")
        axes = (_LENGTHS[place], _HEAD_DIMS, (False, True), _HEADS[place], dtypes, layouts)
        cases = [
            RuleCase(batch, *heads, *lengths, head_dim, dtype=dtype, causal=causal, variant=layout)
            for lengths, head_dim, causal, heads, dtype, layout in product(*axes)
        ]
        return sample(cases, count)

    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Check the four assertions at the end of the test, in its order."""
        p = problem(case, device, normal(), layout=case.variant)
        actual = run(kernel, p)
        ref = differentiate(partial(_attention, p, upcast=True), p, case.torch_dtype)
        pt = differentiate(partial(_attention, p, upcast=False), p, case.torch_dtype)
        for name, factor in _FACTORS.items():
            error, yardstick = max_error(actual[name], ref[name]), max_error(pt[name], ref[name])
            require(error <= factor * yardstick, f"{name}: {error} > {factor} * {yardstick}")


def _attention(p: Problem, q: Tensor, k: Tensor, v: Tensor, *, upcast: bool) -> Tensor:
    """Compute ``attention_ref`` of the test in float32, or in the dtype with k scaled (``reorder_ops``)."""
    dtype, root = q.dtype, math.sqrt(q.shape[-1])
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
        scores = (q / root) @ k.mT
    else:
        scores = matmul(q, (k / root).mT)
    mask = hidden(p)
    weights = scores.masked_fill(mask, -math.inf).softmax(-1).masked_fill(mask.all(-1, keepdim=True), 0.0)
    return matmul(weights, v).to(dtype)
