"""Attention under the masks that models use: windows to both sides, chunks, first keys always seen, and prefixes."""

import torch
from torch import Tensor

from tests.panel.eager import blank_empty_rows, lse_of, masked
from tests.panel.heads import finite_shift, for_each_query_head, not_zero

CLAIMS = (
    "window=0,1,8,33,100",
    "window_right=0,1,9,40",
    "chunk=0,16,48",
    "first_keys=0,1,4,70",
    "prefix=0,5,70",
    "nonfinite=strict",
)
"""The claims of the functions of this module."""

ROWS, KEYS = 64, 32
"""The size of the tiles of ``tiled``."""


def seen_keys(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int,
    window_right: int,
    chunk: int,
    first_keys: int,
    prefix: int,
) -> Tensor:
    """Return which keys each query sees, (seqlen_q, seqlen_k) bool; the mask is aligned at the bottom right."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    rows, keys = torch.arange(seqlen_q, device=q.device)[:, None], torch.arange(seqlen_k, device=q.device)
    here = rows + (seqlen_k - seqlen_q)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if window:
        seen &= here - keys < window
    if window_right:
        seen &= keys - here < window_right
    if chunk:
        seen &= here // chunk == keys // chunk
    seen |= keys < first_keys
    if causal:
        seen &= keys <= here
    return seen | (keys < prefix)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    window: int = 0,
    window_right: int = 0,
    chunk: int = 0,
    first_keys: int = 0,
    prefix: int = 0,
) -> tuple[Tensor, Tensor]:
    """A mask for all scores, as model files make it, and a softmax over whole rows in float32."""
    seen = seen_keys(q, k, causal, window, window_right, chunk, first_keys, prefix)
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    s = q.float() @ k.mT * sm_scale
    p = torch.softmax(masked(s, seen), -1)
    return blank_empty_rows(p @ v, seen).to(q.dtype), lse_of(s, seen)


def key_tiles(
    first_row: int,
    last_row: int,
    seqlen_k: int,
    causal: bool,
    window: int,
    window_right: int,
    chunk: int,
    first_keys: int,
    prefix: int,
) -> list[slice]:
    """Return the tiles of keys that a tile of rows has to visit, where rows are told by the key on their diagonal."""
    start, stop = 0, seqlen_k
    if window:
        start = max(start, first_row - window + 1)
    if window_right:
        stop = min(stop, last_row + window_right)
    if chunk:
        start = max(start, first_row // chunk * chunk)
        stop = min(stop, (last_row // chunk + 1) * chunk)
    if causal:
        stop = min(stop, last_row + 1)
    always = max(min(first_keys, last_row + 1) if causal else first_keys, prefix)
    return [
        slice(at, min(at + KEYS, seqlen_k))
        for at in range(0, seqlen_k, KEYS)
        if (start < at + KEYS and at < stop) or at < always
    ]


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    window: int = 0,
    window_right: int = 0,
    chunk: int = 0,
    first_keys: int = 0,
    prefix: int = 0,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2's loops over tiles, of which those that no row sees are left out; gradients by autograd."""
    pattern = (causal, window, window_right, chunk, first_keys, prefix)
    seen, offset = seen_keys(q, k, *pattern), k.shape[2] - q.shape[2]
    # One cast of each tensor: autograd would round the gradient of each cast to the inputs' dtype before their sum.
    queries, keys, values = q.float(), *(for_each_query_head(x.float(), q) for x in (k, v))
    outs, lses = [queries[:, :, :0]], [queries[:, :, :0, 0].detach()]
    for at in range(0, q.shape[2], ROWS):
        rows = slice(at, min(at + ROWS, q.shape[2]))
        acc = torch.zeros_like(queries[:, :, rows])
        m = torch.full_like(acc[..., :1], -torch.inf)
        l = torch.zeros_like(m)
        for tile in key_tiles(rows.start + offset, rows.stop - 1 + offset, k.shape[2], *pattern):
            s = queries[:, :, rows] @ keys[:, :, tile].mT * sm_scale
            s = s.masked_fill(~seen[rows, tile], -torch.inf)
            m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            p, alpha = torch.exp(s - finite_shift(m_new)), torch.exp(m - finite_shift(m_new))
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ values[:, :, tile]
            m = m_new
        outs.append(acc / not_zero(l))
        lses.append((m + l.log())[..., 0].detach())
    return torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)
