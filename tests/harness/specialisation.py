"""What Triton compiles a kernel for: the classes of its arguments' values, or, while a bug is looked into, any values.

By default each integer that is 1 or a multiple of 16, and each pointer to aligned memory, makes a variant of the
kernel. A case has about 20 sizes and strides, so nearly each change of a field has to be compiled, for seconds.
"""

import gc
import inspect
from typing import Any

GENERAL = "general"
"""The argument of a process in which kernels are compiled for any values."""
NOT_OF_USERS = ("triton.", "torch.")
"""How the names of modules begin whose kernels no user has written."""
GENERATED = "torchinductor"
"""What the path of a kernel has in it that ``torch.compile`` has written, with the classes of its arguments."""


def compile_for_any_values() -> None:
    """From now on, have Triton compile one variant of a kernel for all values that are no compile-time constants."""
    from triton.runtime.jit import KernelParam

    KernelParam.do_not_specialize = property(lambda self: not self.is_constexpr, lambda self, value: None)


def has_kernels_of_users() -> bool:
    """Whether a module that was imported in this process has a Triton kernel that somebody wrote."""
    from triton.runtime.jit import JITFunction

    return any(is_of_user(x.fn) for x in gc.get_objects() if type(x) is JITFunction)


def is_of_user(function: Any) -> bool:
    """Whether a function was neither generated nor is part of Triton or PyTorch."""
    generated = GENERATED in (inspect.getsourcefile(function) or "")
    return not generated and not function.__module__.startswith(NOT_OF_USERS)
