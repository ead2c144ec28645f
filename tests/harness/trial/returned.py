"""Checks that a kernel returned what a forward or a backward returns, in the form that the contract demands."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.harness.trial.lse_form import shape_of_lse


class WrongKind(TypeError):
    """A kernel returned another kind of object than the contract says; the message says which and what was expected."""


def out_and_lse(returned: Any) -> tuple[Tensor, Tensor | None]:
    """Return ``out`` or ``(out, lse)`` as a pair whose lse may be None. Raises WrongKind for anything else."""
    pair = returned if isinstance(returned, tuple) else (returned, None)
    if len(pair) != 2 or not isinstance(pair[0], Tensor) or not isinstance(pair[1], Tensor | None):
        raise WrongKind(f"returned {described(returned)}, expected out or (out, lse)")
    return pair


def gradients_of(returned: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return by name what a kernel's own backward returned: one value for each of the ``names``, in their order.

    Raises WrongKind for anything else.
    """
    expected = f"from its backward, expected ({', '.join(names)})"
    if not isinstance(returned, tuple | list):
        raise WrongKind(f"returned {described(returned)} {expected}")
    if len(returned) != len(names):
        raise WrongKind(f"returned {len(returned)} values {expected}")
    return dict(zip(names, returned, strict=True))


def described(returned: Any) -> str:
    """Say in a few words what kind of object it is."""
    if isinstance(returned, tuple) and len(returned) != 2:
        return f"a tuple of {len(returned)}"
    if isinstance(returned, tuple) and returned[1] is not None:
        return f"({', '.join(map(type_name, returned))})"
    value = returned[0] if isinstance(returned, tuple) else returned
    return "None" if value is None else f"a {type_name(value)}"


def type_name(value: Any) -> str:
    """Return the name of a type with its package, but without it for None and for Python's own types."""
    if value is None:
        return "None"
    package = type(value).__module__.partition(".")[0]
    return type(value).__name__ if package == "builtins" else f"{package}.{type(value).__name__}"


def departures(
    returned: Mapping[str, Tensor], q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse_layout: str
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield what of shape, dtype and device is not as the contract says: the tensor's name, what, is, should be.

    ``lse_layout`` is the kernel's claim of that name, and lse is as the kernel returned it. If q has 8-bit numbers, out
    is bfloat16.
    """
    of_q = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    shapes = {
        "out": (*q.shape[:3], v.shape[3]),
        "lse": shape_of_lse(q.shape, lse_layout),
        "dq": q.shape,
        "dk": k.shape,
        "dv": v.shape,
        "dbias": () if bias is None else bias.shape,
    }
    for name, x in returned.items():
        dtype = torch.float32 if name == "lse" else of_q
        found = {"shape": tuple(x.shape), "dtype": x.dtype, "device": x.device.type}
        expected = {"shape": tuple(shapes[name]), "dtype": dtype, "device": q.device.type}
        yield from (
            (name, what, found[what], expected[what]) for what in found if found[what] != expected[what]
        )
