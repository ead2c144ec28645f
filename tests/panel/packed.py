"""Attention to sequences packed end to end, as models are trained with it: a mask keeps documents apart."""

from typing import Any

import torch
from torch import Tensor

from reference.masks import blank
from tests.panel.eager import blank_empty_rows, lse_of, masked
from tests.panel.heads import for_each_query_head

CLAIMS = (
    "ragged=packed",
    "key_padding=true",
    "window=0,1,8,33,100",
    "window_right=0,1,9,40",
    "chunk=0,16,48",
)
"""The claims of ``eager``."""
LIKE_FLASH_ATTENTION_2 = (*CLAIMS, "lse_of_no_keys=inf")
"""The claims of ``like_flash_attention_2``."""
OF_ONE_LENGTH = (
    "ragged=packed",
    "unequal_lengths=false",
    "min_seqlen=1",
    "seqlen_multiple=8",
    "rows_behind=none",
)
"""The claims of ``of_one_length``."""


def cuts(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return where the documents of x (batch, heads, total, head_dim) begin, and the end of the last one.

    Rows behind the last document are one more, which may have no rows.
    """
    begins = torch.zeros(1, device=x.device) if cu_seqlens is None else cu_seqlens
    return torch.cat([begins.long(), torch.tensor([x.shape[2]], device=x.device)])


def documents(begins: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of the document that each of the rows of x is in, and its place in that document."""
    rows = torch.arange(x.shape[2], device=x.device)
    document = torch.searchsorted(begins, rows, right=True) - 1
    return document, rows - begins[document]


def seen_keys(
    q: Tensor,
    k: Tensor,
    causal: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    window: int,
    window_right: int,
    chunk: int,
) -> Tensor:
    """Return which keys each query sees, (total_q, total_k) bool; each document is aligned at its bottom right."""
    begins_q, begins_k = cuts(q, cu_seqlens_q), cuts(k, cu_seqlens_k)
    (of_rows, rows), (of_keys, keys) = documents(begins_q, q), documents(begins_k, k)
    offsets = begins_k.diff() - begins_q.diff()
    here = (rows + offsets[of_rows])[:, None]
    seen = of_rows[:, None] == of_keys
    if causal:
        seen &= keys <= here
    if window:
        seen &= here - keys < window
    if window_right:
        seen &= keys - here < window_right
    if chunk:
        seen &= here // chunk == keys // chunk
    return seen


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    key_padding_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    window: int = 0,
    window_right: int = 0,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """A mask for all scores of the packed tensors, and a softmax over whole rows in float32."""
    seen = seen_keys(q, k, causal, cu_seqlens_q, cu_seqlens_k, window, window_right, chunk)
    if key_padding_mask is not None:
        seen = seen & key_padding_mask[:, None, None, :]
    return attended(q, k, v, seen, sm_scale, key_padding_mask)


def like_flash_attention_2(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The lse of FlashAttention-2's forward for packed sequences: +inf in rows that see no key."""
    out, lse = eager(q, k, v, **options)
    return out, torch.where(lse.isneginf(), torch.inf, lse)


def attended(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sm_scale: float, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend to the keys that are seen, by a softmax over whole rows in float32; padded keys may hold anything."""
    k, v = (for_each_query_head(blank(x.float(), key_padding_mask), q) for x in (k, v))
    s = q.float() @ k.mT * sm_scale
    p = torch.softmax(masked(s, seen), -1)
    return blank_empty_rows(p @ v, seen).to(q.dtype), lse_of(s, seen)


def of_one_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """A prefill as engines call it: each document has as many queries as keys, and some, in whole tiles of 8."""
    lengths = (cuts(q, None) if cu_seqlens_q is None else cu_seqlens_q).diff()
    if q.shape[2] != k.shape[2] or bool(((lengths < 1) | (lengths % 8 != 0)).any()):
        raise ValueError(f"got documents of {lengths.tolist()} rows, expected positive multiples of 8")
    return eager(
        q, k, v, causal=causal, sm_scale=sm_scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_q
    )
