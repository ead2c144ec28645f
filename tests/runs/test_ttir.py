"""Kernels run by code made of their IR: what falls back, lines of faults, code on disk, and odd control flow."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.harness.files import ROOT
from tests.harness.interpreter.ttir import launch, store

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU that is here")

SIZE = 16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep code in a folder of the test's own."""
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "code"))
    monkeypatch.setattr(launch, "_fallbacks", {})
    return tmp_path / "code"


@triton.jit
def _doubled(x, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) * 2)


SCRIPT = """
from tests.harness.interpreter.installation import repair_interpreter
repair_interpreter()
import torch
from tests.harness.interpreter.ttir import launch
made = []
launch.ir_of = lambda *args, _made=launch.ir_of, **kwargs: made.append(args) or _made(*args, **kwargs)
from tests.unit.harness.interpreter import test_ttir
x = torch.ones(32)
test_ttir._doubled[(2,)](x, 16)
assert x.eq(2).all()
print(len(made))
"""


def test_a_second_process_makes_nothing(folder: Path) -> None:
    environment: dict[str, Any] = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    made = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    ]
    assert made == ["1\n", "0\n"]
    (source,) = folder.glob("_doubled-*.py")
    assert "store(mv1, programs" in source.read_text()
