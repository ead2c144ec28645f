"""Kernels that can't be run here are told in one line before any case is drawn, and bugs of kernels are not told so."""

import re
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl

from strategies.case import Case
from tests.harness.device.environments import why_not_here
from tests.harness.run import Run
from tests.harness.verdict import Verdict
from tests.harness.worker.main import Worker
from tests.unit.support import triton_toys
from tests.unit.support.unrunnable_kernels import CANNOT_RUN, GPU, VERSIONS, calling, jitted, written

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in this process, interpreted")

TRITON_TOYS = Path(triton_toys.__file__)
CASE = Case(heads_kv=2, seqlen_q=16, seqlen_k=16)
BUGS = {
    "shape": calling("assert q.shape[2] % 64 == 0, 'seqlen must be a multiple of 64'"),
    "shape on a GPU's path": calling(
        "if not q.is_cuda:", "    assert q.shape[2] % 64 == 0, 'a multiple of 64'"
    ),
    "attribute of a tensor": calling("q.no_such_method()"),
    "attribute of None": calling("None.cuda()"),
    "name": calling("cuda(q)"),
    "keyword": calling("sound(q, k, v, causal=causal, sm_scale=sm_scale, gpu=0)"),
    "index": calling("q[7]"),
    "division": calling("1 // (q.shape[2] - 16)"),
    "sizes": calling("q @ k[:, :, :3]"),
    "a fallback": calling(
        "try:",
        "    import flash_attn_9",
        "except ImportError:",
        "    fallback()",
        before="def fallback(): [][0]",
    ),
    "a number": calling("assert q.sum() > 1e9, f'torch differs by {q.shape[2]} >= 0.5'"),
    "in Triton": jitted("tl.store(x + tl.arange(0, 16), tl.load(x + tl.arange(0, 32)))"),
    "launch without arguments": jitted("tl.store(x, 1.0)").replace("torch.zeros(16)", ""),
}


def told(spec: str) -> str | None:
    """Return what a child on the CPU says of a kernel before any case is drawn."""
    worker, request = Worker("cpu"), {"kernel": spec, "claims": ()}
    return worker.do_describe(request).get("error") or worker.do_probe(request)["told"]


def verdict_of(spec: str) -> Verdict:
    return Worker("cpu").attempt(Run(spec, (), "forward", CASE))[0]


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_what_cannot_be_run_here_is_one_line_with_what_to_do(tmp_path: Path, name: str) -> None:
    source, expected = CANNOT_RUN[name]
    line = told(written(tmp_path, source)) or ""
    assert re.search(f"{expected}$", line), line
    assert "\n" not in line


@pytest.mark.parametrize("name", ["assembly", "library", "of_gluon", "asks_for_a_gpu"])
def test_so_is_what_the_interpreter_lacks(name: str) -> None:
    assert (told(f"{TRITON_TOYS}:{name}") or "").endswith("; verify this kernel on a GPU")


@pytest.mark.skipif(hasattr(tl, "advance"), reason="this Triton has block pointers")
def test_so_is_a_function_that_triton_has_only_to_say_that_it_is_removed(tmp_path: Path) -> None:
    pointer = "tl.make_block_ptr(x, (16,), (1,), (0,), (16,), (0,))"
    line = told(written(tmp_path, jitted(f"tl.load({pointer})"))) or ""
    assert re.fullmatch(rf"triton \S+ has no triton\.language\.make_block_ptr, .*; {VERSIONS}", line), line


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_left_to_the_laws(tmp_path: Path, name: str) -> None:
    spec = written(tmp_path, BUGS[name])
    assert told(spec) is None
    finding = verdict_of(spec).finding
    assert finding is not None
    assert finding.kind == "exception"


def test_the_kernel_s_own_module_is_none_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert told(written(tmp_path, calling("of_mine.attend(q)", before="import of_mine"))) is None
    del sys.modules["of_mine"]


def test_a_refusal_is_one_whatever_its_words(tmp_path: Path) -> None:
    spec = written(tmp_path, calling("if not q.is_cuda:", "    raise NotImplementedError('CUDA only')"))
    assert told(spec) is None
    assert verdict_of(spec).status == "refused"


def test_what_shows_only_later_is_a_case_that_cannot_be_run(tmp_path: Path) -> None:
    spec = written(tmp_path, calling("assert q.shape[2] == 16 or q.is_cuda"))
    assert told(spec) is None
    verdict = Worker("cpu").attempt(Run(spec, (), "forward", Case(seqlen_q=3, seqlen_k=3)))[0]
    assert (verdict.status, verdict.finding) == ("skipped", None)
    assert re.fullmatch(GPU, verdict.reason), verdict.reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device"),
            "for another GPU",
        ),
        (RuntimeError("FlashAttention only supports Ampere GPUs or newer."), "for another GPU"),
        (AssertionError("needs compute capability 9.0"), "for another GPU"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (AssertionError("Tensors must be on CUDA"), None),
        (ModuleNotFoundError("No module named 'cutlass'"), "needs the package cutlass"),
    ],
)
def test_on_a_gpu_another_gpu_is_told_and_a_fault_is_none(error: Exception, expected: str | None) -> None:
    line = why_not_here(error, "cuda")
    assert (line is None) == (expected is None)
    assert (expected or "") in (line or "")
