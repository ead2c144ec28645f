"""Blocks of the score matrix, and which of its entries count. Heads are folded as in ``reference.heads``."""

from collections.abc import Iterator

import torch
from torch import Tensor

from reference.mask_pattern import NO_PATTERN, MaskPattern

ALIGNMENTS = ("bottom_right", "top_left")

LOWEST = torch.finfo(torch.float64).min
"""Replaces a row maximum of -inf, which would give -inf - (-inf) = NaN; exp(-inf - LOWEST) is 0."""


def blocks(length: int, size: int) -> Iterator[slice]:
    """Return slices of ``size`` that cover ``length``; the last may be shorter. Raises ValueError for a size of 0."""
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
    key_padding_mask: Tensor | None = None,
    pattern: MaskPattern = NO_PATTERN,
    diagonals: Tensor | None = None,
) -> Tensor | None:
    """Which keys the queries ``rows`` see: (group * rows, seqlen_k) bool, or None where they see every key.

    The last key on query i's diagonal is ``i + seqlen_k - seqlen_q`` (``bottom_right``) or ``i`` (``top_left``). A
    causal mask hides the keys after it. ``pattern`` says what else hides keys by their places, or lets them be seen.
    The mask is repeated for the ``group`` heads folded into rows. With a ``key_padding_mask`` (batch, seqlen_k) bool,
    sequence b sees only those keys where it is True. With a pattern or a key padding mask, the result is
    (batch or 1, 1, group * rows or 1, seqlen_k). If the queries are some of a longer sequence, ``diagonals``
    (seqlen_q,) int64 are the last keys on their diagonals there. Raises ValueError for another alignment.
    """
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment: got {alignment!r}, expected one of {ALIGNMENTS}")
    attended = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    first = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
    if not pattern and not (
        causal and (diagonals is not None or rows.indices(seqlen_q)[0] + first < seqlen_k - 1)
    ):
        return attended
    if diagonals is None:
        diagonals = torch.arange(first, first + seqlen_q, device=device)
    diagonals, keys = diagonals[rows, None], torch.arange(seqlen_k, device=device)
    seen = (
        keys <= diagonals if causal else torch.ones(len(diagonals), seqlen_k, dtype=torch.bool, device=device)
    )
    if pattern:
        seen = _with_pattern(seen, pattern, diagonals, keys)
    seen = seen if group == 1 else seen.repeat(group, 1)
    seen = seen[None, None] if pattern else seen
    return seen if attended is None else seen & attended


def _with_pattern(seen: Tensor, pattern: MaskPattern, diagonals: Tensor, keys: Tensor) -> Tensor:
    """Return what rows with their ``diagonals`` (rows, 1) see of ``keys`` (seqlen_k,), after a causal mask."""
    near = torch.ones_like(seen)
    if pattern.window:
        near &= keys > diagonals - pattern.window
    if pattern.window_right:
        near &= keys < diagonals + pattern.window_right
    if pattern.chunk:
        near &= keys // pattern.chunk == diagonals // pattern.chunk
    return seen & (near | (keys < pattern.first_keys)) | (keys < pattern.prefix)


def blank(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Keys or values (batch, heads_kv, seqlen_k, head_dim) with 0 for masked keys, which may hold anything."""
    return x if key_padding_mask is None else x.masked_fill(~key_padding_mask[:, None, :, None], 0.0)


def hide(x: Tensor, seen: Tensor | None, value: float = 0.0) -> Tensor:
    """``x`` (..., rows, keys) with ``value`` wherever a row does not see a key."""
    return x if seen is None else torch.where(seen, x, value)


def contract(a: Tensor, b: Tensor, seen: Tensor | None) -> Tensor:
    """``a @ b`` without the terms that are not seen, even where 0 * NaN or 0 * inf would make them NaN.

    a is (..., R, N), and 0 where not seen; b (..., N, D); seen (..., R, N) bool, or None for every term.
    """
    product = a @ b
    if seen is None:
        return product
    spoiled = b.isfinite().logical_not().flatten(0, -2).any(0)
    for column in spoiled.nonzero().flatten().tolist():
        product[..., column] = hide(a * b[..., None, :, column], seen).sum(-1)
    return product
