"""The launches of a Triton file are recorded, and mutants of it that compile to the same code are equivalent."""

import json
from dataclasses import asdict

import pytest
import torch

from kernels.mutants.mutant import load_module
from tests.mutation.equivalence import Judgement, RecordedLaunch, judge, recorded_launches
from tests.unit.support.calling import DEVICE

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def helper(x):
    return x * 2

@triton.jit
def unused(x):
    return x * 4

@triton.jit
def copy(x, y, n, wide: tl.int64, scale, N: tl.constexpr, KIND: tl.constexpr, none=None):
    rows = tl.arange(0, N)
    tile = tl.load(x + rows * wide, mask=rows < n).to(KIND)
    if N == 16:
        tile = tl.multiple_of(tile, [16])
    tl.store(y + rows, helper(tile) * scale, mask=rows < n)

def run(x, y):
    copy[(1,)](x, y, 3, 2, 0.5, N=16, KIND=tl.float32, num_warps=4)
"""


@pytest.fixture
def path(tmp_path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(KERNEL)
    return str(file)


def record(path: str) -> list[RecordedLaunch]:
    x = torch.ones(32, dtype=torch.float16, device=DEVICE)
    y = torch.zeros(16, device=DEVICE)
    run = load_module(path, {}).run
    with recorded_launches() as launches:
        run(x, y)
        run(x, y)
    assert y[:4].tolist() == [1, 1, 1, 0], "recorded, it runs all the same"
    return launches


def test_judgements(path) -> None:
    launches = record(path)

    def edit(old: str, new: str) -> dict[str, str]:
        assert old in KERNEL
        return {path: KERNEL.replace(old, new)}

    cases = [
        (edit("rows", "lanes"), "equivalent"),
        (edit("x * 2", "x * 3"), "different"),
        (edit("x * 4", "x * 5"), "equivalent"),
        (edit("rows < n)\n", "rows <= n)\n"), "different"),
        (edit("KIND)", "KIND * 1)"), "invalid"),
        (edit("tl.store(y", "tl.stare(y"), "invalid"),
        (edit("import triton\n", "import nothing_at_all\n"), "invalid"),
        (edit("tile = tl.multiple_of(tile, [16])", "pass"), "equivalent"),  # a hint less
        (edit("[16]", "[32]"), "different"),
        (edit("helper(tile) *", "helper(tile) * 1.0 *"), "equivalent"),
    ]
    judged = judge(path, [mutant for mutant, _ in cases], launches)
    assert [judgement.verdict for judgement in judged] == [verdict for _, verdict in cases]
    assert judged[2].detail == "nothing that is launched uses it"
    assert "stare" in judged[5].detail
    assert "nothing_at_all" in judged[6].detail


def test_recorded_launches(path) -> None:
    (launch,) = record(path)
    types = ["*fp16", "*fp32", "i32", "i64", "fp32", "constexpr", "constexpr", "constexpr"]
    names = ["x", "y", "n", "wide", "scale", "N", "KIND", "none"]
    assert launch.function == "copy"
    assert list(launch.signature.items()) == list(zip(names, types, strict=True))
    assert launch.constants == {"N": 16, "KIND": "triton.language.dtype:fp32", "none": None}
    assert RecordedLaunch(**json.loads(json.dumps(asdict(launch)))) == launch


def test_a_crash_of_the_compiler_is_invalid(path) -> None:
    crash = {path: KERNEL.replace("import triton\n", "import os, signal, triton\nos.kill(os.getpid(), 9)\n")}
    same = {path: KERNEL}
    assert judge(path, [crash, same], record(path)) == [
        Judgement("invalid", "the process ended with signal 9 (Killed)"),
        Judgement("equivalent", "nothing that is launched uses it"),
    ]


def test_nothing_that_compiles(path) -> None:
    with pytest.raises(RuntimeError, match="no function 'g'"):
        judge(path, [{path: KERNEL}], [RecordedLaunch("g", {}, {})])
