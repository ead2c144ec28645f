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

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in this process, interpreted")

TRITON_TOYS = Path(triton_toys.__file__)
CASE = Case(heads_kv=2, seqlen_q=16, seqlen_k=16)
HEAD = "import torch, triton, triton.language as tl\nfrom tests.unit.support.toys import sound\n"
SOUND = "return sound(q, k, v, causal=causal, sm_scale=sm_scale)"
GPU = r"the kernel asks for a GPU, and there is none \(.+\); verify this kernel on a GPU"
VERSIONS = "install the versions that the kernel is for"


def calling(*lines: str, before: str = "") -> str:
    """Return the source of a kernel that runs these lines before it answers, in a file with some more before it."""
    body = "\n    ".join((*lines, SOUND))
    return f"{HEAD}{before}\ndef f(q, k, v, *, causal, sm_scale):\n    {body}\n"


def jitted(line: str) -> str:
    """Return the source of a kernel that launches a Triton kernel of this line."""
    kernel = f"@triton.jit\ndef _kernel(x):\n    {line}\n"
    return calling("_kernel[(1,)](torch.zeros(16))", before=kernel)


IN_BACKWARD = """
class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale):
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)[0]

    @staticmethod
    def backward(ctx, dout):
        assert dout.is_cuda
        return dout, dout, dout, None, None

def f(q, k, v, *, causal, sm_scale):
    return Attention.apply(q, k, v, causal, sm_scale)
"""
FOR_CUDA_ALONE = """
torch.library.define("for_cuda_alone::attend", "(Tensor q) -> Tensor")
torch.library.impl("for_cuda_alone::attend", "CUDA")(lambda q: q)
"""
TRANSLATED = (
    "try:",
    "    import flash_attn_9",
    "except ImportError:",
    "    raise RuntimeError('no fast attention')",
)
CANNOT_RUN = {
    "asserted": (calling("assert q.is_cuda, 'Tensors must be on CUDA'"), GPU),
    "asserted without words": (calling("assert q.is_cuda and k.is_cuda"), GPU),
    "raised under a condition": (
        calling("if q.device.type != 'cuda':", "    raise ValueError('wrong tensors')"),
        GPU,
    ),
    "raised with words": (calling("raise TypeError('expected tensors on the GPU')"), GPU),
    "architecture": (calling("raise RuntimeError('FlashAttention only supports Ampere or newer')"), GPU),
    "moved": (calling("q = q.cuda()"), GPU),
    "allocated": (calling("torch.empty(1, device='cuda')"), GPU),
    "current device": (calling("torch.cuda.current_device()"), GPU),
    "properties": (calling("torch.cuda.get_device_properties(0)"), GPU),
    "when imported": (calling(before="assert torch.cuda.is_available()"), GPU),
    "operator for CUDA alone": (calling("torch.ops.for_cuda_alone.attend(q)", before=FOR_CUDA_ALONE), GPU),
    "only in the backward": (HEAD + IN_BACKWARD, GPU),
    "only when causal": (calling("assert not causal or q.is_cuda"), GPU),
    "package": (calling(before="import flash_attn_9"), "needs the package flash_attn_9, .*; install it"),
    "package in the call": (
        calling("import flash_attn_9.ops"),
        "needs the package flash_attn_9, .*; install it",
    ),
    "package translated": (calling(*TRANSLATED), "needs the package flash_attn_9, .*; install it"),
    "name of a package": (
        calling("from torch.nn import Attention9"),
        rf"torch \S+ has no torch.nn.Attention9, .*; {VERSIONS}",
    ),
    "function of torch": (
        calling("torch.nn.functional.attend9(q)"),
        rf"torch \S+ has no torch.nn.functional.attend9, .*; {VERSIONS}",
    ),
    "operator of torch": (
        calling("torch.ops.torch.attend9(q)"),
        r"torch has no operation torch.attend9 here; install .*",
    ),
    "function of Triton": (
        jitted("tl.attend9(x)"),
        rf"triton \S+ has no triton.language.attend9, .*; {VERSIONS}",
    ),
    "parameter of Triton": (
        jitted("tl.load(x, attend9=1)"),
        rf"triton \S+ has no triton.language.load with the parameter attend9, .*; {VERSIONS}",
    ),
    "version asserted": (
        calling("assert int(triton.__version__.split('.')[0]) > 98, 'too old'"),
        rf"asks for other versions of packages \(AssertionError: too old\); {VERSIONS}",
    ),
    "version in words": (
        calling("raise RuntimeError('attention needs triton >= 99')"),
        rf"asks for other versions of packages \(RuntimeError: .*\); {VERSIONS}",
    ),
    "library of the system": (
        calling("import ctypes", "ctypes.CDLL('libattention9.so')"),
        r"what this machine lacks \(OSError: .*\); install it",
    ),
    "signature": (HEAD + "def f(q, k, v, mask, scale): pass\n", r"expected a function f\(q, k, v, .*"),
    "return": (
        HEAD + "def f(q, k, v, *, causal, sm_scale): pass\n",
        r"returned None, expected out or \(out, lse\)",
    ),
    "attribute": (HEAD, "no 'f' in .*; it has no public function"),
}
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


def written(folder: Path, source: str) -> str:
    """Write a kernel and return its SPEC."""
    path = folder / "mine.py"
    path.write_text(source)
    return f"{path}:f"


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
