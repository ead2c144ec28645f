"""The tests of xformers' memory-efficient attention."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.contract import AttentionKernel
from tests.harness.trial.problem import Problem
from tests.mutation.rules.base import (
    Rule,
    RuleCase,
    differentiate,
    hidden,
    max_error,
    normal,
    plain,
    problem,
    require,
    run,
    sample,
)

_FORWARD = {"float16": (4e-3, 4e-4), "bfloat16": (2e-2, 5e-3), "float32": (3e-4, 2e-5)}
_BACKWARD = {"float16": (0.2, 2e-2), "bfloat16": (0.9, 0.1), "float32": (9e-4, 1e-4)}
"""(atol, rtol): ERROR_ATOL and ERROR_RTOL of the base classes of xformers/ops/fmha/common.py."""

_LSE = (2e-4, 1e-5)
_ALIGN = 256
_ODD_LENGTHS = (2, 3, 15, 31, 32, 34, 68, 72, 90, 132, 136)
# 258, 264 and 512 of its list are left out, because the contract's kernels do not take them.
_HEAD_DIMS = (1, 2, 3, 31, 34, 36, 38, 40, 64, 80, 160)
_LONGEST_ON_CPU = 320

Shape = tuple[int, int, int, int, int]
"""(batch, seqlen_q, seqlen_k, heads, head_dim)."""


class Xformers(Rule):
    """allclose with the tolerances, by dtype, of test_forward, test_logsumexp and test_backward on one shape.

    out must be free of NaN, and the same bit for bit on views whose rows up to the next multiple of 256 are
    NaN; out against float32 (``_FORWARD``); lse against logsumexp (2e-4, rtol 1e-5); out, dq, dk and dv of a
    second call (``_BACKWARD``), there with q, k and v packed where lengths are equal, dout ones or random, and
    sm_scale 1/sqrt(32) below 32 columns. NaN fails. Inputs are normal of standard deviation 3, dout of 1;
    the seed is a function of the shape; no mask or a causal one, bottom-right, for which shorter keys are
    lengthened. Both shape lists of the source are used (the grid, and 200 random ones), but not a V narrower or wider
    than K, other masks, or the choice of an op. On the CPU, batch is 1, heads are at most 2, lengths at most 320.

    The op's classes have since moved; these tolerances are the last ones that xformers itself had.
    """

    name = "xformers"
    source = (
        "https://github.com/facebookresearch/xformers/blob/ca6d2aa0d43241fc8a8dcd872debc2406160160d/"
        "tests/test_mem_eff_attention.py; tolerances: "
        "https://github.com/facebookresearch/xformers/blob/bed3978b5efc34b92a84e6116b01f598d83b8af1/"
        "xformers/ops/fmha/common.py"
    )

    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return a fixed sample of both lists: 8 and 4 on the CPU, 80 and 40 elsewhere."""
        cpu = device == "cpu"
        masks = random.Random(0)
        grid, rest = (
            [
                _case(shape, dtype, causal=masks.choice((False, True)), cpu=cpu)
                for shape in shapes
                for dtype in ("bfloat16", "float16", "float32")
            ]
            for shapes in (_grid(batches=(1,) if cpu else (1, 300)), _random_shapes())
        )
        return sample(grid, 8 if cpu else 80) + sample(rest, 4 if cpu else 40)

    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Check the three tests, in the order of the file."""
        p = problem(case, device, normal(3.0), layout="bnhd")
        first = run(kernel, p, backward=False)
        out = first["out"]
        require(not out.isnan().any().item(), "out has NaN")
        padded = replace(p, q=_nan_behind(p.q), k=_nan_behind(p.k), v=_nan_behind(p.v))
        again = run(kernel, padded, backward=False)["out"]
        require(not again.isnan().any().item(), "out has NaN: reads what lies behind the tensors")
        require(torch.equal(out, again), "out depends on what lies behind the tensors")
        _check("out", out.float(), plain(p, p.q.float(), p.k.float(), p.v.float()), _FORWARD[case.dtype])
        if kernel.capabilities.lse:
            _check("lse", first["lse"], _logsumexp(p), _LSE)
        self._judge_backward(kernel, case, device)

    def _judge_backward(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        if case.head_dim < 32:
            case = replace(case, sm_scale=(1 / 32) ** 0.5)
        layout = "qkvpacked" if case.seqlen_q == case.seqlen_k else "bnhd"
        p = problem(case, device, normal(3.0), dout=normal(), layout=layout)
        if case.variant == "expanded":
            # xformers expands one element in every dimension; the contract needs rows of stride 1.
            p = replace(p, dout=torch.ones_like(p.dout[:1, :1, :1]).expand_as(p.dout))
        actual = run(kernel, p)
        expected = differentiate(
            lambda q, k, v: plain(p, q.float(), k.float(), v.float()), p, case.torch_dtype
        )
        _check("out", actual["out"].float(), expected["out"], _FORWARD[case.dtype])
        for name in ("dq", "dk", "dv"):
            _check(name, actual[name], expected[name], _BACKWARD[case.dtype])


def _grid(batches: Sequence[int]) -> Iterator[Shape]:
    """Yield ``generate_test_shapes_B_Mq_Mkv_H_K_Kv`` for an op with head_dims 32 and 128, up to 256."""
    for batch in batches:
        for seqlen_q in (32, 256):
            for seqlen_k in (32, 64, 256, 1024):
                yield from ((batch, seqlen_q, seqlen_k, 1, head_dim) for head_dim in (32, 128))
        for length in _ODD_LENGTHS:
            yield batch, length, 128, 1, 32
            yield batch, 256, length, 1, 32
        yield from ((batch, 256, 128, 1, head_dim) for head_dim in _HEAD_DIMS)
        for head_dim in (32, 128):
            yield batch, 16, 1024, 1, head_dim
            yield batch, 1024, 16, 1, head_dim
        yield from ((max(1, batch // heads), 256, 128, heads, 128) for heads in (3, 5, 12))


def _random_shapes() -> Iterator[Shape]:
    """Yield the 200 shapes that it adds for some ops."""
    r = random.Random(0)
    for _ in range(200):
        batch, seqlen_q, seqlen_k = r.randint(1, 400), r.randint(1, 500), r.randint(1, 500)
        heads = r.randint(2, 11)
        head_dim = r.choice(range(8, 256, 8))
        r.choice(range(8, 256, 8))  # of V, which an op without different widths ignores
        yield max(batch // heads, 1), seqlen_q, seqlen_k, heads, head_dim


def _case(shape: Shape, dtype: str, *, causal: bool, cpu: bool) -> RuleCase:
    batch, seqlen_q, seqlen_k, heads, head_dim = shape
    if cpu:
        batch, heads = 1, min(heads, 2)
        seqlen_q, seqlen_k = min(seqlen_q, _LONGEST_ON_CPU), min(seqlen_k, _LONGEST_ON_CPU)
    if causal:
        seqlen_k = max(seqlen_q, seqlen_k)
    # xformers runs both variants of each shape; here the shapes take them in turn.
    variant = "expanded" if (seqlen_q + seqlen_k) % 2 else "random"
    seed = batch * seqlen_q + seqlen_k * head_dim + head_dim
    sizes = (batch, heads, heads, seqlen_q, seqlen_k, head_dim)
    return RuleCase(*sizes, dtype=dtype, causal=causal, seed=seed, variant=variant)


def _nan_behind(x: Tensor) -> Tensor:
    """Return the tensor in storage whose sequences continue with NaN, as ``nanify_oob_seqlen`` does."""
    length = x.shape[2]
    if length % _ALIGN == 0:
        return x
    padding = (0, 0, 0, 0, 0, _ALIGN - length % _ALIGN)
    return torch.nn.functional.pad(x.transpose(1, 2), padding, value=math.nan)[:, :length].transpose(1, 2)


def _logsumexp(p: Problem) -> Tensor:
    scores = (p.q.float() * p.sm_scale) @ p.k.float().mT
    return scores.masked_fill(hidden(p), -math.inf).logsumexp(-1)


def _check(name: str, actual: Tensor, expected: Tensor, tolerance: tuple[float, float]) -> None:
    atol, rtol = tolerance
    close = torch.allclose(actual, expected, atol=atol, rtol=rtol)
    require(close, f"{name}: off by {max_error(actual, expected)}, atol {atol}, rtol {rtol}")
