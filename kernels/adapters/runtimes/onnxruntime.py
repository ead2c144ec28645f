"""ONNX Runtime's ``Attention`` of opset 24, as its CPU provider computes it. It has run on a CPU."""

from typing import Any

from torch import Tensor

from kernels.adapters.bridge import COPIED, only_on_cpu
from kernels.adapters.known_failures import ONNXRUNTIME
from kernels.adapters.runtimes.onnx_operator import attention
from kernels.contract import AttentionKernel
from kernels.contract.parsing import parse_claims


def _forward(*qkv: Tensor, causal: bool, sm_scale: float, bias: Any = None, **cap: float) -> Any:
    return attention(*qkv, bias, is_causal=int(causal), scale=sm_scale, **cap)


# "scale `Q`, `K` by `sqrt(scale)` before matmul"; causal "reduces to the lower-triangular (top-left) mask"; in softmax,
# "the same precision as the input of softmax (Q and K) is used"; v's last dimension is "v_head_size".
_CLAIMS = ("rounded_scores=true", "sm_scale=positive", "causal_alignment=top_left", "dtypes=float16,float32")
_INPUTS = ("v_head_dim=0,16,80", "softcap=0,20", "bias=all", "backward=false")
_ALL = parse_claims([*_CLAIMS, *_INPUTS], COPIED)
KERNEL = AttentionKernel(name="onnxruntime", forward=_forward, capabilities=_ALL, known_failures=ONNXRUNTIME)

UNAVAILABLE = only_on_cpu(KERNEL.name)
