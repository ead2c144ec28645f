"""PyTorch's tests of its own attention: ``scaled_dot_product_attention`` and FlexAttention."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    uniform,
)

_LENGTHS = {
    "cuda": ((4, 8, 64, 143, 256, 512, 1024, 2048), (4, 8, 64, 128, 256, 587, 1024, 2048)),
    "cpu": ((4, 8, 64, 143, 256), (4, 8, 64, 128, 256, 203)),
}
_HEAD_DIMS = (8, 16, 21, 32, 64, 72, 96, 128, 160, 192, 203, 256)
_FUDGE = {"out": 4.0, "dq": 180.0, "dk": 16.0, "dv": 4.0}


class PyTorchSdpa(Rule):
    """max|gold - test| <= max(1e-5, fudge * max|gold - lp|): 4 for out, 180 for dq, 16 for dk, 4 for dv.

    gold is the math backend in float32 (float64 for float32), lp the math backend in the dtype. NaN fails
    unless lp has one in the same tensor. lse is not compared. Inputs and dout are uniform in [0, 1); 4 heads,
    contiguous, sm_scale 1/sqrt(d) or 1/d; causal only where the lengths are equal. The grid of 2024, without
    dropout; a fixed sample. On the CPU, batch is 1, and lengths are up to 256 (203 stands for 587).
    """

    name = "PyTorch SDPA"
    source = (
        "https://github.com/pytorch/pytorch/pull/131743 "
        "(test/test_transformers.py: test_flash_attention_vs_math_ref_grads, check_out_and_grad)"
    )

    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return the sample: 12 cases on the CPU, 120 elsewhere."""
        cpu = device == "cpu"
        lengths_q, lengths_k = _LENGTHS["cpu" if cpu else "cuda"]
        batches, dtypes = (1,) if cpu else (1, 8), ("float16", "bfloat16")
        axes = (batches, lengths_q, lengths_k, _HEAD_DIMS, (True, False), dtypes)
        cases = [
            RuleCase(batch, 4, 4, seqlen_q, seqlen_k, head_dim, dtype=dtype, causal=causal, sm_scale=sm_scale)
            for batch, seqlen_q, seqlen_k, head_dim, causal, dtype in product(*axes)
            for sm_scale in (None, 1 / head_dim)
            if not causal or seqlen_q == seqlen_k
        ]
        return sample(cases, 12 if cpu else 120)

    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Check as ``check_out_and_grad`` does, with the factors of CUDA."""
        p = problem(case, device, uniform())
        high = torch.float64 if case.dtype == "float32" else torch.float32
        gold = differentiate(partial(_math, p), p, high)
        low = differentiate(partial(_math, p), p, case.torch_dtype)
        actual = run(kernel, p)
        for name, fudge in _FUDGE.items():
            error, yardstick = max_error(gold[name], actual[name]), max_error(gold[name], low[name])
            require(not math.isnan(error) or math.isnan(yardstick), f"{name} has NaN")
            # As in the original, ``error > threshold`` is what fails, which is False if both are NaN.
            threshold = max(1e-5, fudge * yardstick)
            require(not error > threshold, f"{name}: {error} > {threshold}")


def _math(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=p.causal, scale=p.sm_scale, enable_gqa=q.shape[1] != k.shape[1]
        )


class FlexAttention(Rule):
    """mean|gold - test| <= 1.1 mean|gold - eager| for out, dq, dk and dv; 10 instead of 1.1 in float32.

    gold is eager FlexAttention in float64, eager the same in the dtype: scores and P rounded to it, softmax in
    float32. NaN in the test or in eager fails. lse is compared in the tests of paged attention alone.
    Standard normal inputs and dout, contiguous, head_dim 64, length 2048 and half as many keys: 256 and 128 on
    the CPU, where batch is 1 instead of 4 and heads are 2 instead of 8. (Gradients are tested there too, unlike in the
    original.) Masks and score_mods other than none and causal are left out. A later form of the check
    (``assert_close(rtol=1.1)`` of the two means) allows 2.1 times and 11 in float32.
    """

    name = "FlexAttention"
    source = (
        "https://github.com/pytorch/pytorch/blob/00125ef3dad64a9f8dd8768e81326a34ed7ba91d/"
        "test/inductor/test_flex_attention.py (run_test)"
    )

    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return 11 cases: three dtypes, no mask and causal; half as many keys; grouped heads."""
        cpu = device == "cpu"
        length, batch, heads = (256, 1, 2) if cpu else (2048, 4, 8)

        def case(dtype: str, causal: bool, *, keys: int = length, group: int = 1) -> RuleCase:
            return RuleCase(batch, heads * group, heads, length, keys, 64, dtype=dtype, causal=causal)

        dtypes = ("float16", "bfloat16", "float32")
        return [
            *(case(dtype, causal) for dtype, causal in product(dtypes, (False, True))),
            # A causal mask is j <= i in that test, which is not our mask if lengths differ.
            *(case(dtype, False, keys=length // 2) for dtype in dtypes),
            *(case("float16", causal, group=2) for causal in (False, True)),
        ]

    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Check as ``_check_out_and_grad`` does."""
        p = problem(case, device, normal())
        gold = differentiate(partial(_eager, p), p, torch.float64)
        eager = differentiate(partial(_eager, p), p, case.torch_dtype)
        actual = run(kernel, p)
        fudge = 10.0 if case.dtype == "float32" else 1.1
        for name, reference in gold.items():
            error = (reference - actual[name]).abs().mean().item()
            yardstick = (reference - eager[name]).abs().mean().item()
            require(not (math.isnan(error) or math.isnan(yardstick)), f"{name} has NaN")
            require(error <= fudge * yardstick, f"{name}: {error} > {fudge} * {yardstick}")


def _eager(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute ``math_attention`` of torch/_higher_order_ops/flex_attention.py."""
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = matmul(q, k.mT).to(working) * p.sm_scale
    return matmul(scores.masked_fill(hidden(p), -math.inf).softmax(-1).to(q.dtype), v)
