"""Running programs: their module, their arguments, and the bits that they leave in their outputs."""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.unit.support.programs.drawing import Program
from tests.unit.support.programs.spans import is_float
from tests.unit.support.programs.values import Numbers

Array = np.ndarray[Any, Any]

HEADER = '''"""Random programs."""

import triton
import triton.language as tl


'''

TORCH = {"int1": "bool", "float8e4nv": "float8_e4m3fn", "float8e5": "float8_e5m2"}
"""Types that PyTorch has by another name than Triton."""

PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def module_of(programs: Iterable[Program], path: Path) -> ModuleType:
    """Write a module with these programs, import it and return it."""
    path.write_text(HEADER + "\n\n".join(x.source for x in programs))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Triton looks for the module of a kernel
    spec.loader.exec_module(module)
    return module


def tensor_of(numbers: Numbers, device: str) -> Tensor:
    """Return a tensor with these numbers."""
    dtype: torch.dtype = getattr(torch, TORCH.get(numbers.dtype, numbers.dtype))
    # This generator of NumPy's stays as it is from release to release.
    drawn = np.random.RandomState(numbers.seed)
    count, width = numbers.count, dtype.itemsize
    if numbers.kind == "filled" and dtype != torch.bool:
        values = torch.full((count * width,), 0x55, dtype=torch.uint8).view(dtype)
    elif numbers.kind == "bits" and dtype != torch.bool:
        values = torch.from_numpy(np.frombuffer(drawn.bytes(count * width), np.uint8).copy()).view(dtype)
    elif numbers.kind == "normal":
        sizes = np.clip(np.abs(drawn.standard_normal(count)) * numbers.high / 4, 2.0**-6, numbers.high)
        values = (
            torch.from_numpy(np.where(drawn.randint(0, 2, count) == 1, sizes, -sizes))
            .to(torch.float32)
            .to(dtype)
        )
    else:
        whole = drawn.randint(numbers.low, numbers.high + 1, count)
        values = (
            torch.from_numpy(whole).to(dtype) if dtype != torch.bool else torch.from_numpy(whole % 2 == 1)
        )
    return values.to(device)


def run(program: Program, kernel: Any, device: str = "cpu") -> dict[str, Array]:
    """Launch a program and return the bits of its outputs, by their names; each NaN has the same bits."""
    given: list[Any] = []
    constants: dict[str, Any] = {}
    outputs: dict[str, tuple[Numbers, Tensor]] = {}
    for argument in program.arguments:
        value: Any = argument.given
        if isinstance(value, Numbers):
            value = tensor_of(value, device)
        elif isinstance(value, tuple):
            value = tuple(tensor_of(x, device) if isinstance(x, Numbers) else x for x in value)
        if argument.is_output:
            assert isinstance(argument.given, Numbers)
            outputs[argument.name] = (argument.given, value)
        if argument.annotation:
            constants[argument.name] = value
        else:
            given.append((argument.name, value))
    options = {"num_warps": program.num_warps} | ({"enable_fp_fusion": False} if device == "cuda" else {})
    kernel[program.grid](**dict(given), **constants, **options)
    return {name: bits_of(numbers.dtype, tensor) for name, (numbers, tensor) in outputs.items()}


def bits_of(dtype: str, tensor: Tensor) -> Array:
    """Return the patterns of a tensor's numbers; each NaN has the same."""
    tensor = tensor.cpu()
    patterns = tensor.view(PATTERNS[tensor.dtype.itemsize]).clone()
    if is_float(dtype):
        patterns[tensor.double().isnan()] = 0x7F
    return patterns.numpy()
