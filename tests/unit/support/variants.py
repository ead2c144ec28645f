"""Prints how many variants of a kernel Triton compiles for calls of several sizes, and whether it may compile at all.

The calls are made three times: compiled for their own values, for any values, and for their own values once more.
"""

import torch

from tests.compile.targets import compiling_for
from tests.harness.device.specialisation import compiled, keep_variants_apart, may_compile

SIZES = (64, 65, 1)
"""A multiple of 16, no multiple, and 1: the classes for which Triton compiles."""


def main() -> None:
    """Call a kernel for sizes of each class, with tensors that have no memory."""
    keep_variants_apart()
    print(may_compile())
    from tests.panel.triton_tutorial import attention

    for general in (False, True, False):
        with compiling_for("sm_90") as kernels, compiled(for_any_values=general):
            for size in SIZES:
                q = torch.empty(1, 2, size, 64, dtype=torch.float16, device="meta")
                attention(q, q, q, causal=False, sm_scale=0.5)
        print(len({kernel.hash for kernel in kernels}))
    print(may_compile())


if __name__ == "__main__":
    main()
