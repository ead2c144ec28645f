"""The type of a claim about the arithmetic, and FlashAttention-2's arithmetic, which is claimed by default."""

from collections.abc import Callable, Mapping
from typing import Any

from kernels.contract.names import SMALLEST_NORMAL
from reference.arithmetic import BFLOAT16, FLOAT16, FLOAT32, Arithmetic
from reference.family import Family

Launch = Mapping[str, Any]
ArithmeticOf = Callable[[str, str, Launch], Arithmetic]
"""A function of (dtype, device type, launch settings) that returns what the kernel may round with them."""
FamilyOf = Callable[[str, str, Launch], Family]
"""A function of the same arguments that returns the designs which a kernel of unknown source may have."""


def flash_arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    """Return FlashAttention-2's arithmetic: float32 softmax and sums, P and dS cast to the inputs' dtype.

    On a GPU, products of 16-bit operands are summed by tensor cores, which keep fewer bits of those of a subnormal
    operand (``Arithmetic.smallest_operand``).
    """
    formats = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32}
    return Arithmetic(
        weights=formats[dtype],
        output=formats[dtype],
        smallest_operand=0.0 if device == "cpu" or dtype == "float32" else SMALLEST_NORMAL[dtype],
    )
