"""Models of the one operator ``Attention`` of ONNX, run by ONNX Runtime's provider for CPUs."""

from functools import cache
from typing import Any

import torch
from onnx import helper
from onnxruntime import InferenceSession
from torch import Tensor


@cache
def _session(types: tuple[Any, ...], **attributes: Any) -> Any:
    names = [f"x{i}" if dtype else "" for i, dtype in enumerate(types)]
    inputs = [helper.make_tensor_value_info(x, y, None) for x, y in zip(names, types, strict=True) if x]
    out = helper.make_tensor_value_info("out", types[0], None)
    graph = helper.make_graph(
        [helper.make_node("Attention", names, ["out"], **attributes)], "a", inputs, [out]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    return InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def attention(*inputs: Tensor | None, **attributes: float) -> tuple[Tensor, None]:
    """Return (out, None) of the operator; an input that is None is left out."""
    arrays = [None if x is None else x.contiguous().numpy() for x in inputs]
    types = (None if x is None else helper.np_dtype_to_tensor_dtype(x.dtype) for x in arrays)
    given = {f"x{i}": x for i, x in enumerate(arrays) if x is not None}
    return torch.from_numpy(_session(tuple(types), **attributes).run(None, given)[0]), None
