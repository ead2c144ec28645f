"""What a kernel returned: whether it is what a forward or a backward returns, in the form that the contract says."""

from typing import Any

import torch
from torch import Tensor


class WrongKind(TypeError):
    """Something else was returned than the contract says: the message tells what, and what was expected."""


def out_and_lse(returned: Any) -> tuple[Tensor, Tensor | None]:
    """``out`` or ``(out, lse)`` as a pair. Raises WrongKind for anything else; lse may be None."""
    pair = returned if isinstance(returned, tuple) else (returned, None)
    if len(pair) != 2 or not isinstance(pair[0], Tensor) or not isinstance(pair[1], Tensor | None):
        raise WrongKind(f"returned {described(returned)}, expected out or (out, lse)")
    return pair


def three_gradients(returned: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, as a backward of its own returns them. Raises WrongKind for anything else."""
    if not isinstance(returned, tuple | list):
        raise WrongKind(f"returned {described(returned)} from its backward, expected (dq, dk, dv)")
    if len(returned) != 3:
        raise WrongKind(f"returned {len(returned)} values from its backward, expected (dq, dk, dv)")
    dq, dk, dv = returned
    return dq, dk, dv


def described(returned: Any) -> str:
    """What kind of object it is, in a few words."""
    if isinstance(returned, tuple) and len(returned) != 2:
        return f"a tuple of {len(returned)}"
    if isinstance(returned, tuple) and returned[1] is not None:
        return f"({', '.join(map(type_name, returned))})"
    value = returned[0] if isinstance(returned, tuple) else returned
    return "None" if value is None else f"a {type_name(value)}"


def type_name(value: Any) -> str:
    """The name of its type, with the package that it is from; that of None, and of what is Python's own, without."""
    if value is None:
        return "None"
    package = type(value).__module__.partition(".")[0]
    return type(value).__name__ if package == "builtins" else f"{package}.{type(value).__name__}"


def departure(
    tensor: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device_type: str
) -> tuple[str, Any, Any] | None:
    """The first of shape, dtype and device that is not as expected: its name, what it is, what it should be."""
    for what, actual, expected in (
        ("shape", tuple(tensor.shape), tuple(shape)),
        ("dtype", tensor.dtype, dtype),
        ("device", tensor.device.type, device_type),
    ):
        if actual != expected:
            return what, actual, expected
    return None
