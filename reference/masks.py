"""Blocks of the score matrix, and which of their entries count. Heads are folded: ``reference.heads``."""

from collections.abc import Iterator

import torch
from torch import Tensor

ALIGNMENTS = ("bottom_right", "top_left")

LOWEST = torch.finfo(torch.float64).min
"""Stands for a row maximum of -inf, which would give -inf - (-inf) = NaN; exp(-inf - LOWEST) is 0."""


def blocks(length: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``length``, the last one shorter. ValueError for a size below 1."""
    if size < 1:
        raise ValueError(f"block or chunk size: got {size}, expected 1 or more")
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def visible(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    alignment: str,
    device: torch.device | str,
    rows: slice = slice(None),
    group: int = 1,
) -> Tensor | None:
    """Which keys the queries ``rows`` see: (group * rows, seqlen_k) bool, or None where they see every key.

    Causal, query i sees key j when ``j <= i + seqlen_k - seqlen_q`` (``bottom_right``) or ``j <= i``
    (``top_left``). The mask is repeated for the ``group`` heads folded into rows. Raises ValueError for
    another alignment.
    """
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment: got {alignment!r}, expected one of {ALIGNMENTS}")
    start, stop, _ = rows.indices(seqlen_q)
    last_key_of_first_row = start + (seqlen_k - seqlen_q if alignment == "bottom_right" else 0)
    if not causal or last_key_of_first_row >= seqlen_k - 1:
        return None
    seen = torch.ones(stop - start, seqlen_k, dtype=torch.bool, device=device).tril_(last_key_of_first_row)
    return seen if group == 1 else seen.repeat(group, 1)


def hide(x: Tensor, seen: Tensor | None, value: float = 0.0) -> Tensor:
    """``x`` (..., rows, keys) with ``value`` wherever a row does not see a key."""
    return x if seen is None else torch.where(seen, x, value)


def contract(a: Tensor, b: Tensor, seen: Tensor | None) -> Tensor:
    """``a @ b`` without the terms that are not seen, even where 0 * NaN or 0 * inf would make them NaN.

    a is (..., R, N), and 0 where not seen; b (..., N, D); seen (R, N) bool, or None for every term.
    """
    product = a @ b
    if seen is None:
        return product
    spoiled = b.isfinite().logical_not().flatten(0, -2).any(0)
    for column in spoiled.nonzero().flatten().tolist():
        product[..., column] = hide(a * b[..., None, :, column], seen).sum(-1)
    return product
