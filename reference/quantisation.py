"""Quantised operands in float64: what a kernel that quantises its inputs really multiplies.

Shah et al., *FlashAttention-3* (2024), section 3.3: block quantisation and incoherent processing. The rule is
that of ``arithmetic.Quantisation``; this is its plain definition, one block after another.
"""

import torch
from torch import Tensor

from reference.arithmetic import SMALLEST_SCALE, Format, Quantisation
from reference.masks import blocks

TOP_EXPONENT = 8
"""A block is scaled so that its largest entry lies in [2^7, 2^8): both 8-bit formats hold these numbers, and 2^8."""

SMALLEST_COLUMNS = 32
"""Columns that an 8-bit matrix product needs at least. Narrower heads are padded to it before they are rotated."""


def dequantised(q: Tensor, k: Tensor, v: Tensor, how: Quantisation) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise q, k and v (batch, heads, seqlen, head_dim) of any float dtype and scale them back, in float64.

    Rotated q and k stay rotated, (batch, heads, seqlen, columns), because only their products matter. The rotation
    divides these products by the number of columns, so k is multiplied by it.
    """
    if how.only_v:
        limited = _rounded(v.double().clamp(-how.format.maximum, how.format.maximum), how.format)
        return q.double(), k.double(), torch.where(v.isfinite(), limited, v.double())
    new_v = _dequantised(v, v.isfinite(), how.format, how.block_k)
    if how.rotation is None:
        new_q = _dequantised(q, q.isfinite(), how.format, how.block_q)
        return new_q, _dequantised(k, k.isfinite(), how.format, how.block_k), new_v
    new_q = _dequantised(rotated(q, how.rotation), _finite_rows(q), how.format, how.block_q)
    new_k = _dequantised(rotated(k, how.rotation), _finite_rows(k), how.format, how.block_k)
    return new_q, new_k * new_k.shape[-1], new_v


def block_scales(x: Tensor, block: int | None) -> Tensor:
    """Return the scale of each row's block in dequantised x, or twice that: (batch, heads, seqlen, 1).

    x is (batch, heads, seqlen, columns); None for ``block`` means that all rows of a head share a scale.
    """
    scales = x.nan_to_num(0.0).abs().amax(-1, keepdim=True)
    # A block's largest entry is at least 2^7 times its scale, and 2^8 times where it was rounded up.
    for rows in blocks(x.shape[2], block or max(1, x.shape[2])):
        scales[:, :, rows] = scales[:, :, rows].amax(2, keepdim=True) * 2.0 ** (1 - TOP_EXPONENT)
    # k was multiplied by the number of columns after a rotation, and so was its scale.
    return scales.clamp_min(SMALLEST_SCALE * x.shape[-1])


def _finite_rows(x: Tensor) -> Tensor:
    return x.isfinite().all(-1, keepdim=True)


def rotated(x: Tensor, signs: int) -> Tensor:
    """Return H D x / columns in float32: H is Sylvester's Hadamard matrix, D has ``signs`` on its diagonal.

    The columns of x are padded with zeros to a power of two; entries that are not finite count as 0.
    """
    columns = max(SMALLEST_COLUMNS, 1 << (x.shape[-1] - 1).bit_length())
    x = torch.where(x.isfinite(), x, 0.0).float()
    x = torch.nn.functional.pad(x, (0, columns - x.shape[-1]))
    diagonal = [-1.0 if signs >> j & 1 else 1.0 for j in range(columns)]
    return _hadamard(x * x.new_tensor(diagonal) / columns)


def _hadamard(x: Tensor) -> Tensor:
    """Multiply the last dimension by H.

    H_2n = H_n (x) H_2: the sums and the differences of neighbours are each transformed by H_n.
    """
    if x.shape[-1] == 1:
        return x
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((_hadamard(even + odd), _hadamard(even - odd)), -1).flatten(-2)


def _dequantised(x: Tensor, kept: Tensor, to: Format, block: int | None) -> Tensor:
    """Round x block by block, in float64; entries that are not ``kept`` become NaN."""
    values = torch.where(kept, x.double(), 0.0)
    parts = [
        _rounded_block(values[:, :, rows], to) for rows in blocks(x.shape[2], block or max(1, x.shape[2]))
    ]
    return torch.where(kept, torch.cat(parts, 2) if parts else values, torch.nan)


def _rounded_block(x: Tensor, to: Format) -> Tensor:
    """Divide each head of x (batch, heads, rows, columns) by its scale, round it, and multiply by the scale again."""
    top = torch.frexp(x.abs().amax((2, 3), keepdim=True)).exponent
    scale = _power_of_two(top - TOP_EXPONENT).clamp_min(SMALLEST_SCALE)
    return _rounded(x / scale, to) * scale


def _rounded(x: Tensor, to: Format) -> Tensor:
    """Round x to the nearest number of the format, ties to even. No |x| may exceed the format's largest number."""
    # The distance of neighbours is relative to the power of two below x, but never less than that of subnormals.
    below = _power_of_two(torch.frexp(x).exponent - 1)
    step = (2 * to.roundoff * below).clamp_min(2 * to.underflow)
    return (x / step).round() * step


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64: exactly where that is a normal number, and nearly 0 where it would be smaller."""
    return (exponent.clamp_min(-1022).long() + 1023 << 52).view(torch.float64)
