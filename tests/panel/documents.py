"""Attention to documents in a batch, as FlexAttention's users write it: rows and keys of one number see each other."""

import torch
from torch import Tensor

from tests.panel import packed

CLAIMS = (
    "ragged=document",
    "key_padding=true",
    "window=0,1,8,33,100",
    "window_right=0,1,9,40",
    "chunk=0,5,16",
)
"""The claims of the function of this module."""


def places(document_ids: Tensor) -> Tensor:
    """Return the place of each row in its document, (batch, seqlen); documents are told by ids of the same shape."""
    rows = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return rows - torch.where(begins, rows, 0).cummax(-1).values


def seen_keys(document_ids: Tensor, causal: bool, window: int, window_right: int, chunk: int) -> Tensor:
    """Return which keys each query sees, (batch, 1, seqlen, seqlen) bool, for ids (batch, seqlen)."""
    own, other = document_ids[:, None, :, None], document_ids[:, None, None, :]
    at = places(document_ids)
    rows, keys = at[:, None, :, None], at[:, None, None, :]
    seen = own == other
    if causal:
        seen &= keys <= rows
    if window:
        seen &= rows - keys < window
    if window_right:
        seen &= keys - rows < window_right
    if chunk:
        seen &= rows // chunk == keys // chunk
    return seen


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int = 0,
    window_right: int = 0,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """A mask for all scores of each batch element, and a softmax over whole rows in float32."""
    if document_ids is None:
        seen = packed.seen_keys(q, k, causal, None, None, window, window_right, chunk)
    else:
        seen = seen_keys(document_ids, causal, window, window_right, chunk)
    if key_padding_mask is not None:
        seen = seen & key_padding_mask[:, None, None, :]
    return packed.attended(q, k, v, seen, sm_scale, key_padding_mask)
