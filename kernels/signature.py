"""How a plain function is called, and what is said of one that cannot be called like that."""

import inspect
from collections.abc import Callable
from typing import Any

from kernels.contract import Capabilities

POSITIONAL = ("q", "k", "v")
"""What every function is given by position."""

REQUIRED = ("causal", "sm_scale")
"""What every function is given by keyword."""

_RAGGED = {
    "": (),
    "cache": ("cache_seqlens",),
    "packed": ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
}
"""The further keywords of sequences of different lengths, by the claim ``ragged``."""

MOST_CHARACTERS = 200
"""The longest signature that is quoted whole in a message."""


def keywords(capabilities: Capabilities) -> tuple[str, ...]:
    """The names of all keywords that a function with these claims may be called with."""
    padding = ("key_padding_mask",) if capabilities.key_padding else ()
    dropout = ("dropout_p", "dropout_seed") if any(capabilities.dropout) else ()
    return (*REQUIRED, *padding, *dropout, *_RAGGED[capabilities.ragged])


def expected(names: tuple[str, ...] = REQUIRED) -> str:
    """The signature that a plain function has to have, as it is written in Python."""
    return f"f({', '.join(POSITIONAL)}, *, {', '.join(names)})"


def mismatch(function: Callable[..., Any], names: tuple[str, ...]) -> str | None:
    """What the function is instead, in words, where it cannot be called with q, k, v and the keywords ``names``.

    None where it can be called, and where its signature is not known: so for functions that are written in C.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isclass(function):
        return f"the class {name}"
    if type(function).__module__.partition(".")[0] == "triton":
        return f"{name}, a Triton kernel without the function that launches it"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*POSITIONAL, **dict.fromkeys(names))
    except TypeError as error:
        return f"{name}{_shortened(signature)}: {error}"
    return None


def rejects_keyword(error: TypeError, names: tuple[str, ...]) -> bool:
    """Whether a TypeError says that one of the keywords is not known, to the function or to one that it wraps."""
    return any(f"unexpected keyword argument '{name}'" in str(error) for name in names)


def _shortened(signature: inspect.Signature) -> str:
    """The signature in one line, without annotations."""
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = " ".join(str(inspect.Signature(plain)).split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}...)"
