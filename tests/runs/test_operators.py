"""The operator mutants of a Triton file, and which of them compile to the same code as the original."""

import pytest
import torch

from kernels.mutants.mutant import load_module
from tests.mutation.equivalence import RecordedLaunch, judge, recorded_launches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
