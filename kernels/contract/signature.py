"""The signature that a plain function must have, and the message about one that cannot be called that way."""

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

from kernels.contract.capabilities import CLAIMS, Capabilities

POSITIONAL = ("q", "k", "v")
"""The parameters that every function is given by position."""

REQUIRED = ("causal", "sm_scale")
"""The parameters that every function is given by keyword."""

MOST_CHARACTERS = 200
"""The longest signature that is quoted whole in a message."""


def keywords(capabilities: Capabilities) -> tuple[str, ...]:
    """Return the names of all keywords that a function with these claims may be called with, each once."""
    further = (claim.keywords(getattr(capabilities, name)) for name, claim in CLAIMS.items())
    return tuple(dict.fromkeys((*REQUIRED, *chain.from_iterable(further))))


def expected(names: tuple[str, ...] = REQUIRED) -> str:
    """Return the signature that a plain function has to have, as it is written in Python."""
    return f"f({', '.join(POSITIONAL)}, *, {', '.join(names)})"


def mismatch(function: Callable[..., Any], names: tuple[str, ...]) -> str | None:
    """Describe a function that cannot be called with q, k, v and the keywords ``names``.

    Returns None if it can be called, and if its signature is not known, as for functions written in C.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isclass(function):
        return f"the class {name}"
    if any(kind.__module__.partition(".")[0] == "triton" for kind in type(function).__mro__):
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
    """Whether a TypeError says that one of the keywords is unknown, to the function or to one that it calls."""
    return any(f"unexpected keyword argument '{name}'" in str(error) for name in names)


def _shortened(signature: inspect.Signature) -> str:
    """Return the signature in one line, without annotations."""
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = " ".join(str(inspect.Signature(plain)).split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}...)"
