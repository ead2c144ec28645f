"""Functions of 8-bit inputs that break the contract in other ways than by wrong numbers."""

from typing import Any

from torch import Tensor

from tests.panel import eight_bit_inputs as panel


def overwriting(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """A sound answer, after which k is 0."""
    found = panel.dequantised(q, k, v, **options)
    if "k_scale" in options:
        k.zero_()
    return found


def of_the_dtype_of_q(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """A sound answer, but for the dtype of out."""
    out, lse = panel.dequantised(q, k, v, **options)
    return out.to(q.dtype), lse
