"""Kernels run by code made of their IR: what falls back, lines of faults, code on disk, and odd control flow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.files import ROOT
from tests.harness.interpreter.ttir import store

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU that is here")

SCRIPT = """
from tests.harness.interpreter.installation import repair_interpreter
repair_interpreter()
import torch
from tests.harness.interpreter.ttir import launch
made = []
launch.ir_of = lambda *args, _made=launch.ir_of, **kwargs: made.append(args) or _made(*args, **kwargs)
from tests.unit.support import triton_toys
x = torch.ones(32)
triton_toys._doubled[(2,)](x, 16)
assert x.eq(2).all()
print(len(made))
"""


def test_a_second_process_makes_nothing(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        store.FOLDER: str(tmp_path),
    }
    made = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    ]
    assert made == ["1\n", "0\n"]
    (source,) = tmp_path.glob("_doubled-*.py")
    assert "store(mv1, programs" in source.read_text()
