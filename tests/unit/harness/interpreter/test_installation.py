"""Triton kernels on the CPU: what runs, what is skipped with a reason, and the script of a failure."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton

from kernels.registry import module_of
from strategies.case import Case
from tests.harness.run import Run
from tests.harness.verdict import Verdict
from tests.harness.worker.main import Worker
from tests.harness.worker.repro import uses_triton
from tests.unit.support import triton_toys

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in this process, interpreted")

TOYS = Path(triton_toys.__file__)
CASE = Case(batch=1, heads_kv=2, seqlen_q=33, seqlen_k=33, head_dim=16, dtype="bfloat16", seed=3)


def verdict_of(spec: str) -> Verdict:
    """Return the verdict of a child on the CPU."""
    return Worker("cpu").attempt(Run(spec, (), "forward", CASE))[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("assembly", "Triton's interpreter can't run inline assembly (tl.inline_asm_elementwise)"),
        ("library", "Triton's interpreter can't run libdevice.erfcx, a function of a device library"),
        ("of_gluon", "Triton's interpreter can't run a Gluon kernel"),
        ("asks_for_a_gpu", "the kernel asks for a GPU, and there is none"),
    ],
)
def test_what_the_interpreter_cannot_run_is_no_bug(name: str, reason: str) -> None:
    verdict = verdict_of(f"{TOYS}:{name}")
    assert (verdict.status, verdict.finding) == ("skipped", None)
    assert verdict.reason.startswith(reason)
    assert verdict.reason.endswith("; verify this kernel on a GPU")
    assert "\n" not in verdict.reason


def test_a_mistake_of_the_kernel_is_one() -> None:
    verdict = verdict_of(f"{TOYS}:wrong")
    assert verdict.finding is not None
    assert verdict.finding.kind == "exception"


def test_a_plain_kernel_in_bfloat16_is_right_but_for_its_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = f"{TOYS}:attention"
    verdict = verdict_of(spec)
    assert verdict.finding is not None
    assert verdict.finding.index[2] == 0
    monkeypatch.setattr(module_of(spec), "MENDED", True)
    assert verdict_of(spec).status == "held"


@pytest.mark.parametrize(
    ("module", "uses"),
    [
        ("kernels.algorithms.flash_v2", True),
        ("kernels.algorithms.ring", True),
        ("kernels.adapters.pytorch.sdpa", False),
        ("tests.unit.support.toys", False),
    ],
)
def test_only_scripts_of_triton_carry_the_repair(module: str, uses: bool) -> None:
    assert uses_triton(importlib.import_module(module)) == uses


def test_a_module_uses_triton_that_has_a_method_of_a_class_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """``flash_attn_func = FlashAttnFunc.apply`` is such a method, and names a module of torch as its own."""
    of_kernel, adapter = ModuleType("of_kernel"), ModuleType("adapter")
    made: Any = type("Attention", (torch.autograd.Function,), {"__module__": "of_kernel"})
    vars(of_kernel)["tl"], vars(adapter)["attention"] = triton.language, made.apply
    monkeypatch.setitem(sys.modules, "of_kernel", of_kernel)
    assert uses_triton(adapter)
