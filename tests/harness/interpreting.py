"""Running Triton kernels in the interpreter: its repair, and what it can't run, which is not the kernel's bug."""

import importlib
import importlib.util
import re

REPAIRED = "tests.harness.interpreter"
"""The module that repairs the interpreter; it imports Triton."""

LIMITS = {
    r"inline_asm not supported": "inline assembly (tl.inline_asm_elementwise)",
    r"(libdevice\.\w+) not supported": "{}, a function of a device library that NumPy does not have",
    r"extern_elementwise not supported": "functions of device libraries (extern_elementwise)",
    r"'InterpreterBuilder' object has no attribute '(?:create_)?(\w+)'": "{}, an operation that it lacks",
    r"Did you forget to add @triton\.jit": "functions imported from triton.language by name, such as load: "
    "it knows them as tl.load",
    r"active drivers \(.*\)\. There should only be one": "a Gluon kernel, or one whose launcher asks what GPU there is",
}
"""What Triton's interpreter can't run, by texts of exceptions, which may contain the name of the function."""

NEEDS_GPU = (
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Torch not compiled with CUDA enabled",
    "No HIP GPUs are available",
)
"""What PyTorch says in an exception to a launcher that needs a GPU."""


def repair_interpreter() -> None:
    """Repair the interpreter of this process, where Triton is installed."""
    if importlib.util.find_spec("triton"):
        importlib.import_module(REPAIRED).repair()


def why_not_here(error: BaseException) -> str | None:
    """Say in one line why a kernel can't be run on the CPU, judging by its exception; None for any other exception."""
    cause: BaseException | None = error
    while cause is not None:
        message = str(cause)
        if any(text in message for text in NEEDS_GPU):
            return "the kernel asks for a GPU, and there is none; verify this kernel on a GPU"
        for pattern, what in LIMITS.items():
            if found := re.search(pattern, message):
                what = what.format(*found.groups())
                return f"Triton's interpreter can't run {what}; verify this kernel on a GPU"
        cause = cause.__cause__
    return None
