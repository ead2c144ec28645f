"""What Triton compiles a kernel for: the classes of its arguments' values, or any values.

By default each integer that is 1 or a multiple of 16, and each pointer to aligned memory, makes a variant of the
kernel. A case has about 20 sizes and strides, so nearly each change of a field has to be compiled, for seconds. One
variant for any values serves all cases of a dtype and head_dim.
"""

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

NOT_OF_USERS = ("triton.", "torch.")
"""How the names of modules begin whose kernels no user has written."""
COMPILERS = ("torch._dynamo", "jax", "numba", "cutlass", "tilelang", "flashinfer")
"""Modules that a process imports before it compiles anything by itself, beside kernels in Triton."""
GENERATED = "torchinductor"
"""What the path of a kernel has in it that ``torch.compile`` has written, with the classes of its arguments."""


class _Process:
    """State that all threads of this process share, because PyTorch computes gradients in a thread of its own."""

    is_general = False
    has_kernels_of_users = False


def is_general() -> bool:
    """Whether kernels are compiled for any values now."""
    return _Process.is_general


@contextmanager
def compiled(*, for_any_values: bool) -> Iterator[None]:
    """Meanwhile, have kernels compiled for any values, or for the classes of their arguments' values."""
    _Process.is_general = for_any_values
    try:
        yield
    finally:
        _Process.is_general = False


def has_kernels_of_users() -> bool:
    """Whether a module has been imported since ``keep_variants_apart`` that has a Triton kernel somebody wrote."""
    return _Process.has_kernels_of_users


def may_compile() -> bool:
    """Whether this process has a compiler, so that a call unlike those before may have to be compiled."""
    return _Process.has_kernels_of_users or not sys.modules.keys().isdisjoint(COMPILERS)


def keep_variants_apart() -> None:
    """Have each kernel keep its variants for any values apart from the others; without this there are none."""
    if find_spec("triton") is None:
        return
    from triton.runtime.jit import JITFunction, KernelParam

    def is_not_specialised(param: Any) -> bool:
        return vars(param)["do_not_specialize"] or (_Process.is_general and not param.is_constexpr)

    def caches(kernel: Any) -> Any:
        kept = vars(kernel)
        if not _Process.is_general:
            return kept["device_caches"]
        if "general_caches" not in kept:
            kept["general_caches"] = defaultdict(kernel.create_binder)
        return kept["general_caches"]

    def keep_caches(kernel: Any, new: Any) -> None:
        vars(kernel)["device_caches"] = new
        _Process.has_kernels_of_users |= is_of_user(kernel.fn)

    def keep_choice(param: Any, is_left_out: bool) -> None:
        vars(param)["do_not_specialize"] = is_left_out

    KernelParam.do_not_specialize = property(is_not_specialised, keep_choice)
    JITFunction.device_caches = property(caches, keep_caches)


def is_of_user(function: Any) -> bool:
    """Whether a function was neither generated nor is part of Triton or PyTorch."""
    generated = GENERATED in (inspect.getsourcefile(function) or "")
    return not generated and not function.__module__.startswith(NOT_OF_USERS)
