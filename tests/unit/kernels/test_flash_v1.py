"""What the property suite leaves out of flash_v1: autograd, refusals, what is claimed and how it is cut down."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from kernels.algorithms import flash_v1 as module
from kernels.algorithms.flash_v1 import KERNEL, backward, flash_v1, forward
from reference.arithmetic import TF32_TRUNCATED
from strategies.case import Case
from tests.unit.support.calling import DEVICE, make, uphold

Q, K, V, DOUT = make(70, 130, heads_kv=2, group=2)
OUT, LSE = torch.zeros_like(Q), torch.zeros(Q.shape[:3], device=DEVICE)


def test_agrees_with_the_reference() -> None:
    case = Case(heads_kv=2, group=2, seqlen_q=70, seqlen_k=130, causal=True, sm_scale=0.3)
    uphold("backward", KERNEL, replace(case, launch=(("block_n", 32),)))


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it() -> None:
    """A block of keys that a row does not see, but others do, must leave the row as it is, without rounding."""
    whole, lse = forward(Q, K[:, :, :70], V[:, :, :70], causal=True, sm_scale=0.3, block_n=32)
    part, part_lse = forward(Q[:, :, :40], K[:, :, :40], V[:, :, :40], causal=True, sm_scale=0.3, block_n=32)
    assert torch.equal(whole[:, :, :40], part)
    assert torch.equal(lse[:, :, :40], part_lse)


def test_a_row_whose_scores_are_all_minus_infinity_has_no_weight() -> None:
    k = K.clone()
    k[..., 0] = -math.inf
    out, lse = forward(Q.abs(), k, V, causal=False, sm_scale=0.3)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_autograd() -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    out, lse = flash_v1(*leaves, causal=True)
    assert not lse.requires_grad
    got = torch.autograd.grad(out, leaves, DOUT)
    expected = backward(DOUT, Q, K, V, out.detach(), lse, causal=True, sm_scale=0.25)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": K[..., :8].contiguous()}, ValueError, r"k: got shape \(1, 2, 130, 8\)"),
        ({"q": Q[:, :3]}, ValueError, "q: got 3 heads, expected a multiple of k's 2"),
        ({"causal": 1}, TypeError, "causal: got 1"),
        ({"sm_scale": math.nan}, ValueError, "sm_scale: got nan"),
        ({"block_m": 48}, ValueError, "block_m: got 48, expected one of"),
        ({"block_n": 128}, ValueError, "block_n: got 128"),
        ({"num_stages": 9}, ValueError, "num_stages: got 9"),
        ({"precision": "tf64"}, ValueError, "precision: got 'tf64'"),
        ({t: torch.zeros(1, 1, 2, 257) for t in "qkv"}, NotImplementedError, "head_dim 257"),
    ],
)
def test_forward_and_backward_refuse(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": V, "causal": False, "sm_scale": 1.0, **change}
    with pytest.raises(error, match=message):
        forward(**arguments)
    with pytest.raises(error, match=message):
        backward(DOUT, out=OUT, lse=LSE, **arguments)


@pytest.mark.parametrize("name", ["dout", "out", "lse"])
def test_backward_refuses(name: str) -> None:
    tensors: dict[str, Any] = {"dout": DOUT, "out": OUT, "lse": LSE}
    tensors[name] = tensors[name][:, :, 1:]
    with pytest.raises(ValueError, match=f"{name}: got shape"):
        backward(q=Q, k=K, v=V, **tensors, causal=False, sm_scale=1.0)


def test_arithmetic() -> None:
    arithmetic = KERNEL.capabilities.arithmetic
    assert arithmetic("float16", "cpu", {"block_n": 32}).tile_min == 32
    assert arithmetic("float16", "cuda", {"block_n": 32}).tile_min == 16
    for device in ("cpu", "cuda"):
        assert arithmetic("float32", device, {"precision": "tf32"}).weights == TF32_TRUNCATED
    assert arithmetic("float32", "cpu", {"precision": "tf32"}).partial_results


def test_tiles_are_cut_down_where_they_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERPRETED", tl.constexpr(False))

    def tile(fn: Any, head_dim: int, dtype: torch.dtype, precision: str) -> tuple[int, int]:
        settings = module.Settings(block_m=128, block_n=64, num_stages=1, precision=precision)
        constants = settings.constants(fn, torch.empty(1, 1, 1, head_dim, dtype=dtype))
        return constants["BLOCK_M"], constants["BLOCK_N"]

    assert tile(module._forward_kernel, 64, torch.float16, "ieee") == (128, 64)
    assert tile(module._forward_kernel, 65, torch.float16, "ieee") == (64, 32)
    assert tile(module._backward_kernel, 64, torch.float16, "ieee") == (64, 32)
    assert tile(module._forward_kernel, 64, torch.float32, "tf32") == (64, 32)
    assert tile(module._forward_kernel, 64, torch.float32, "ieee") == (32, 16)
    assert tile(module._backward_kernel, 128, torch.float32, "ieee") == (16, 16)
