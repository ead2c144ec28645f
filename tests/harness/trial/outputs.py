"""What a kernel returns: its form as the contract demands it, and the forms of lse."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.contract import Capabilities

PLAIN = (Tensor, torch.nn.Parameter)
"""The classes of tensors that hold numbers, and do nothing else as they are read."""


QUOTED = 160
"""The most characters of an exception or a warning that a note has."""


class WrongKind(TypeError):
    """A kernel returned another kind of object than the contract says; the message says which and what was expected."""


def out_and_lse(returned: Any) -> tuple[Tensor, Tensor | None]:
    """Return ``out`` or ``(out, lse)`` as a pair whose lse may be None. Raises WrongKind for anything else."""
    pair = returned if isinstance(returned, tuple) else (returned, None)
    if len(pair) != 2 or not isinstance(pair[0], Tensor) or not isinstance(pair[1], Tensor | None):
        raise WrongKind(f"returned {described(returned)}, expected out or (out, lse)")
    for x in pair:
        if x is not None and type(x) not in PLAIN:
            raise WrongKind(
                f"returned a {type_name(x)}, expected no other class of tensors than torch.Tensor"
            )
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
        "dsinks": q.shape[1:2],
    }
    for name, x in returned.items():
        dtype = torch.float32 if name in ("lse", "dsinks") else of_q
        found = {"shape": tuple(x.shape), "dtype": x.dtype, "device": x.device.type}
        expected = {"shape": tuple(shapes[name]), "dtype": dtype, "device": q.device.type}
        yield from (
            (name, what, found[what], expected[what]) for what in found if found[what] != expected[what]
        )


def form_of(claims: Capabilities) -> tuple[str, str, str]:
    """Return the form of lse that is claimed: its base, its layout, and its value in rows that see no key."""
    return claims.lse_base, claims.lse_layout, claims.lse_of_no_keys


def in_contract_form(lse: Tensor, base: str, layout: str, of_no_keys: str) -> Tensor:
    """Return an lse in the contract's form: the natural logarithm, (batch, heads_q, seqlen_q), -inf where no key is.

    ``lse`` (batch, heads_q, seqlen_q), or (batch, seqlen_q, heads_q) if ``layout`` is "bnh", is a logarithm to
    ``base``, "e" or "2". In base 2 the result is float64, so that the conversion adds no rounding that matters. In base
    e the result has the dtype of ``lse``. If ``of_no_keys`` is "inf", infinities change their sign, wherever they are:
    the other infinity is then as wrong in a row that sees no key as any infinity is in another row.
    """
    if layout == "bnh":
        lse = lse.transpose(1, 2).contiguous()
    if of_no_keys == "inf":
        lse = torch.where(lse.isinf(), -lse, lse)
    return lse.double() * math.log(2.0) if base == "2" else lse


def in_claimed_form(lse: Tensor, base: str, layout: str, of_no_keys: str) -> Tensor:
    """Return a natural lse (batch, heads_q, seqlen_q) as a kernel with these claims returns it, in its own dtype."""
    if base == "2":
        lse = lse / math.log(2.0)
    if of_no_keys == "inf":
        lse = torch.where(lse.isinf(), -lse, lse)
    return lse.transpose(1, 2).contiguous() if layout == "bnh" else lse


def shape_of_lse(shape_of_q: Sequence[int], layout: str) -> tuple[int, ...]:
    """Return the shape in which lse is returned for q (batch, heads_q, seqlen_q, head_dim), by the layout claimed."""
    batch, heads_q, seqlen_q = shape_of_q[:3]
    return (batch, seqlen_q, heads_q) if layout == "bnh" else (batch, heads_q, seqlen_q)


def quoted(words: str) -> str:
    """Return the words of an exception or a warning as a note may have them: in one short line, without braces."""
    return " ".join(words.replace("{", "(").replace("}", ")").split())[:QUOTED]
