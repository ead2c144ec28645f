"""The compile tests: which items they compile, and what they report."""

from dataclasses import asdict
from typing import Any

import pytest

from tests.compile.items import Item
from tests.harness.running.child import Child

KERNEL = """
import torch, triton
import triton.language as tl
from kernels.contract import AttentionKernel, Capabilities

@triton.jit
def product(q, out, N: tl.constexpr, K: tl.constexpr):
    rows, cols = tl.arange(0, N), tl.arange(0, K)
    a = tl.load(q + rows[:, None] * K + cols[None, :])
    tl.store(out + rows[:, None] * N + rows[None, :], tl.dot(a, tl.trans(a)))

def forward(q, k, v, *, causal, sm_scale, size=16):
    if size == 32:
        raise NotImplementedError("size: got 32")
    product[(1,)](q, q, N=size, K=size)
    product[(1,)](q, q, N=size, K=size)
    return q, None

KERNEL = AttentionKernel(name="mine", forward=forward, capabilities=Capabilities(backward=False))
"""


@pytest.fixture(scope="module")
def compiler() -> Any:
    child = Child("none", worker="tests.compile.worker")
    yield child
    child.close()


@pytest.mark.parametrize(
    ("target", "size", "unclaimed", "problem"),
    [
        ("sm_90", 16, "", ""),
        ("gfx942", 16, "", ""),
        ("sm_90", 32, "size: got 32", ""),
        ("sm_80", 16, "not there", ""),
        ("sm_90", 256, "", "shared memory: 262144 bytes, and sm_90 has 232448; spills: "),
        ("sm_100", 256, "", "shared memory: "),
    ],
)
def test_a_kernel_is_compiled(compiler, tmp_path, target, size, unclaimed, problem) -> None:
    file = tmp_path / "mine.py"
    file.write_text(KERNEL)
    item = Item(f"{file}:KERNEL", target, "float32", 64, False, True, (("size", size),))
    limits = {"unclaimed": {"sm_80": "not there"}, "spills": {"sm_100": 10**6}}
    answer = compiler.ask({"do": "compile", "item": asdict(item), **limits})
    assert answer["unclaimed"] == unclaimed
    if unclaimed:
        assert answer["functions"] == []
        return
    (function,) = answer["functions"]
    assert function["name"] == "product"
    assert function["registers"] > 0
    assert function["shared"] > 0
    assert function["problem"].startswith(problem)
    assert bool(function["problem"]) == bool(problem)
    assert ("spills" in function["problem"]) == (function["spills"] > function["spills_declared"])
