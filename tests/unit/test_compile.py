"""The compile tests: which items they compile, and what they report."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from kernels import registry
from tests.compile.items import Item, items, launches_triton, pairs
from tests.compile.limits import SPILLS, UNCLAIMED, declared, limits
from tests.compile.targets import TARGETS
from tests.harness.running.child import Child

AXES = {"a": (1, 2, 3), "b": "xy", "c": (True, False), "d": range(4)}


def meetings(rows: list[dict[str, Any]]) -> set[Any]:
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def test_every_pair_meets() -> None:
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    rows = pairs(AXES, AXES)
    assert meetings(rows) == meetings(every)
    assert 3 * 4 <= len(rows) < len(every) / 2


def test_pairs_of_what_is_new() -> None:
    rows = pairs(AXES, "b")
    every = {(name, value, other) for name in "acd" for value in AXES[name] for other in "xy"}
    assert {(name, row[name], row["b"]) for row in rows for name in "acd"} == every
    assert len(rows) == 2 * 4


def test_items_of_a_kernel() -> None:
    capabilities = registry.load("flash_v2").capabilities
    some, every = (items("flash_v2", capabilities, every=x) for x in (False, True))
    assert set(some) < set(every)
    assert len(set(some)) == len(some) < 50
    assert {(item.target, item.masked) for item in some} == set(itertools.product(TARGETS, (False, True)))
    for name, values in capabilities.launch.items():
        met = {(item.target, dict(item.launch)[name]) for item in some if item.launch}
        assert met == set(itertools.product(TARGETS, values))


def test_which_kernels_are_triton_s() -> None:
    assert [
        spec for spec in ("flash_v2", "ring", "sdpa_flash", "flex_attention") if launches_triton(spec)
    ] == [
        "flash_v2",
        "ring",
    ]


def test_what_a_table_declares() -> None:
    words = Item("k", "sm_90", "float16", 64, True, False, (("block_m", 64),)).words
    assert declared({"sm_90 block_m=64": 1, "sm_90": 2}, words) == 1
    assert declared({"sm_90 default": 1, "causal unaligned": 2}, words) == 2
    assert declared({"sm_8": 1}, words) is None


def test_limits_are_those_of_kernels_that_there_are() -> None:
    assert {*SPILLS, *UNCLAIMED} <= registry.REGISTERED.keys()


@pytest.mark.parametrize(
    ("table", "kernel", "listed_as"),
    [
        (UNCLAIMED, "varlen", "flash_v2"),
        (SPILLS, "varlen", "varlen"),
        (UNCLAIMED, "flash_v2_persistent", "flash_v2_persistent"),
        (UNCLAIMED, "flash_v1", None),
    ],
)
def test_what_is_made_of_flash_v2_has_its_limits(
    table: Mapping[str, Mapping[str, object]], kernel: str, listed_as: str | None
) -> None:
    assert limits(table, kernel) == (table[listed_as] if listed_as else {})


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
