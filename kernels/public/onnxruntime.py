"""ONNX Runtime's ``Attention`` of opset 24, as its CPU provider computes it. It has run on a CPU."""

from functools import cache
from typing import Any

import torch
from onnx import helper
from onnxruntime import InferenceSession
from torch import Tensor

from kernels.claims import parse_claims
from kernels.contract import AttentionKernel
from kernels.public.bridge import COPIED
from kernels.public.known_failures import ONNXRUNTIME


@cache
def _session(dtype: Any, names: str, **attributes: Any) -> Any:
    inputs, (out,) = ([helper.make_tensor_value_info(x, dtype, None) for x in each] for each in (names, "o"))
    graph = helper.make_graph([helper.make_node("Attention", names, "o", **attributes)], "a", inputs, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    return InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def _forward(*qkv: Tensor, causal: bool, sm_scale: float, bias: Any = None, **cap: float) -> Any:
    given = zip("qkv" if bias is None else "qkvb", (*qkv, bias), strict=False)
    arrays = {name: x.contiguous().numpy() for name, x in given}
    dtype = helper.np_dtype_to_tensor_dtype(arrays["q"].dtype)
    session = _session(dtype, "".join(arrays), is_causal=int(causal), scale=sm_scale, **cap)
    return torch.from_numpy(session.run(None, arrays)[0]), None


# "Scale Q, K by sqrt(scale) before matmul"; causal "reduces to the lower-triangular (top-left) mask"; of softmax, "the
# same precision as the input of softmax (Q and K) is used"; "V: (..., kv_sequence_length, v_head_size)".
_CLAIMS = ("rounded_scores=true", "sm_scale=positive", "causal_alignment=top_left", "dtypes=float16,float32")
_INPUTS = ("v_head_dim=0,16,80", "softcap=0,20", "bias=all", "backward=false")
_ALL = parse_claims([*_CLAIMS, *_INPUTS], COPIED)
KERNEL = AttentionKernel(name="onnxruntime", forward=_forward, capabilities=_ALL, known_failures=ONNXRUNTIME)
