"""Sources of kernels that cannot be run here, each with what is told of it."""

from pathlib import Path

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


def written(folder: Path, source: str) -> str:
    """Write a kernel and return its SPEC."""
    path = folder / "mine.py"
    path.write_text(source)
    return f"{path}:f"
