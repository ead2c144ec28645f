"""Kernels with several planted bugs each: ``tests.several:NAME`` is a SPEC like any other.

``NAME__only__BUG`` has that bug alone, and ``NAME__without__BUG`` has all bugs but that one.
"""

from collections.abc import Callable
from typing import Any

from tests.several.of_torch import TORCH
from tests.several.of_triton import TRITON

KERNELS = {kernel.name: kernel for kernel in (*TORCH, *TRITON)}
"""All kernels with several bugs, by name."""


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the plain function with the bugs that the name asks for."""
    kernel, which, bug = (*name.split("__"), "", "")[:3]
    if kernel not in KERNELS:
        raise AttributeError(f"no kernel with several bugs {name!r}")
    return KERNELS[kernel].load(KERNELS[kernel].chosen(which, bug))
