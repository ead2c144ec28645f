"""OpenVINO's ``ScaledDotProductAttention`` of opset 13, compiled for the CPU. It has run there."""

from dataclasses import replace
from functools import cache
from typing import Any

import openvino
import torch
from openvino import opset13
from torch import Tensor

from kernels.adapters.bridge import COPIED, only_on_cpu
from kernels.contract import AttentionKernel
from kernels.contract.parsing import parse_claims


@cache
def _model(dtype: torch.dtype, head_dim: int, causal: bool) -> Any:
    of_kind = {torch.float32: openvino.Type.f32, torch.float16: openvino.Type.f16}[dtype]
    q, k, v, scale = (opset13.parameter(size, of_kind) for size in (*[[-1, -1, -1, head_dim]] * 3, []))
    out = opset13.scaled_dot_product_attention(q, k, v, None, scale, causal)
    # Processors that have bfloat16 use it unless told otherwise.
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    return openvino.compile_model(openvino.Model([out], [q, k, v, scale]), "CPU", hint)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    scale = torch.tensor(sm_scale, dtype=q.dtype)
    arrays = [x.contiguous().numpy() for x in (q, k, v, scale)]
    return torch.from_numpy(_model(q.dtype, q.shape[3], causal)(arrays)[0].copy()), None


# "numpy.triu(Broadcast(ConvertLike(-inf, query), [L, S]), k=1)" is added if causal; q, k and v share "[N, ...]".
# The scale has q's type, so that it is rounded to it. numpy has no bfloat16.
_CLAIMS = replace(COPIED, causal_alignment="top_left", dtypes=("float16", "float32"), grouped_heads=False)
_CLAIMS = parse_claims(["float16:operand_rounding=2^-11"], replace(_CLAIMS, backward=False))
KERNEL = AttentionKernel(name="openvino", forward=_forward, capabilities=_CLAIMS)

UNAVAILABLE = only_on_cpu(KERNEL.name)
