"""Sound functions that answer a part of the contract, and refuse the rest as most kernels do: by an exception."""

from typing import Any

import torch
from torch import Tensor

from tests.panel import packed, paged
from tests.panel.eager import float32, of_filled_parts

DEFAULT_SCALE = ("sm_scale=default",)
TWO_SCALES = ("sm_scale=0.125,1.0",)
ONE_QUERY = ("max_seqlen_q=1", "min_seqlen=1")
FEW_QUERIES = ("max_seqlen_q=8",)
PREFILL = ("seqlens=q_at_most_k",)
MANY_KEYS = ("min_seqlen_k=40",)
CAUSAL_GRADIENTS = ("backward=causal",)
PAGES_ALONE = ("ragged=paged", "dense=false")
PACKED_ALONE = ("ragged=packed", "dense=false", "key_padding=true", "window=0,1,8,33,100")
CACHE_ALONE = ("ragged=cache", "dense=false")
ROWS_FIRST = ("layouts=bnhd",)
WIDE_TILES = ("min_seqlen=512", "seqlen_multiple=128", "backward=false")


def refuse(unless: bool, what: str) -> None:
    """Raise NotImplementedError with these words unless a condition holds."""
    if not unless:
        raise NotImplementedError(what)


def scale_built_in(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """A kernel with 1 / sqrt(head_dim) built in."""
    built_in = q.shape[-1] ** -0.5
    refuse(sm_scale == built_in, f"sm_scale: got {sm_scale}, expected 1 / sqrt(head_dim)")
    return float32(q, k, v, causal=causal, sm_scale=built_in)


def two_scales(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """A kernel that is compiled for the scales 1/8 and 1."""
    compiled = {0.125: 0.125, 1.0: 1.0}
    refuse(sm_scale in compiled, f"sm_scale: got {sm_scale}, expected 0.125 or 1.0")
    return float32(q, k, v, causal=causal, sm_scale=compiled[sm_scale])


def one_query(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """A decode kernel: one query sees every key, with a causal mask or without."""
    refuse(q.shape[2] == 1, f"q: got {q.shape[2]} queries, expected one")
    keys = slice(0, k.shape[2])
    return float32(q, k[:, :, keys], v[:, :, keys], causal=False, sm_scale=sm_scale)


def few_queries(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """A kernel for speculative decoding, which takes up to eight queries in one tile."""
    refuse(q.shape[2] <= 8, f"q: got {q.shape[2]} queries, expected at most 8")
    tile = torch.nn.functional.pad(q, (0, 0, 8 - q.shape[2], 0))
    out, lse = float32(tile, k, v, causal=causal, sm_scale=sm_scale)
    rows = slice(8 - q.shape[2], None)
    return out[:, :, rows], lse[:, :, rows]


def prefill(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """A prefill that continues a sequence, whose causal mask begins behind the keys that are there already."""
    before = k.shape[2] - q.shape[2]
    refuse(before >= 0, f"q: got {q.shape[2]} queries, expected at most {k.shape[2]}, as there are keys")
    rows = torch.nn.functional.pad(q, (0, 0, before, 0)) if causal else q
    out, lse = float32(rows, k, v, causal=causal, sm_scale=sm_scale)
    return (out[:, :, before:], lse[:, :, before:]) if causal else (out, lse)


def many_keys(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """A kernel that reads a whole tile of 40 keys before its loop."""
    refuse(k.shape[2] >= 40, f"k: got {k.shape[2]} keys, expected at least 40")
    k, v = (torch.cat((x[:, :, :40], x[:, :, 40:]), 2) for x in (k, v))
    return float32(q, k, v, causal=causal, sm_scale=sm_scale)


class _GradientsIfCausal(torch.autograd.Function):
    """Gradients of causal calls alone, from the steps of the forward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.causal, ctx.sm_scale = causal, sm_scale
        return float32(q, k, v, causal=causal, sm_scale=sm_scale)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        refuse(ctx.causal, "gradients: got causal=False, expected a causal mask")
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out, _ = float32(*leaves, causal=True, sm_scale=ctx.sm_scale)
        return *torch.autograd.grad(out, leaves, dout), None, None


def causal_gradients(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """A kernel for training language models, whose backward has a causal mask built in."""
    out, lse = _GradientsIfCausal.apply(q, k, v, causal, sm_scale)
    return out, lse


def pages_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A kernel of a server, whose keys are in pages."""
    refuse(block_table is not None, "block_table: got None, expected pages")
    tables: dict[str, Any] = {"cache_seqlens": cache_seqlens, "block_table": block_table}
    return paged.eager(q, k, v, causal=causal, sm_scale=sm_scale, **tables)


def packed_alone(
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
    key_padding_mask: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """A kernel for training on documents that are packed end to end."""
    refuse(cu_seqlens_q is not None, "cu_seqlens_q: got None, expected packed sequences")
    cuts: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "window": window}
    return packed.eager(q, k, v, causal=causal, sm_scale=sm_scale, **cuts, **masks)


def cache_alone(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, cache_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A kernel whose keys are the first ones of a cache."""
    refuse(cache_seqlens is not None, "cache_seqlens: got None, expected lengths")
    assert cache_seqlens is not None
    return of_filled_parts(q, k, v, cache_seqlens, causal=causal, sm_scale=sm_scale)


def at_its_address(x: Tensor) -> Tensor:
    """Return the tensor that begins where x does, with memory (batch, seqlen, heads, head_dim), whatever x has."""
    _, heads, rows, head_dim = x.shape
    strides = (rows * heads * head_dim, head_dim, heads * head_dim, 1)
    return torch.as_strided(x, x.shape, strides, x.storage_offset())


def rows_first(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """A kernel that is passed no strides, as most in CUDA: it finds entries by their addresses."""
    q, k, v = (at_its_address(x) for x in (q, k, v))
    return float32(q, k, v, causal=causal, sm_scale=sm_scale)


def wide_tiles(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """A kernel that begins with four tiles of 128 rows and keys."""
    refuse(q.shape[2] >= 512 <= k.shape[2], "seqlen: expected at least 512")
    refuse(q.shape[2] % 128 == 0 == k.shape[2] % 128, "seqlen: expected whole tiles of 128")
    return float32(q, k, v, causal=causal, sm_scale=sm_scale)


SOUND = {
    f"{__name__}:{function.__name__}": claims
    for function, claims in (
        (scale_built_in, DEFAULT_SCALE),
        (two_scales, TWO_SCALES),
        (one_query, ONE_QUERY),
        (few_queries, FEW_QUERIES),
        (prefill, PREFILL),
        (many_keys, MANY_KEYS),
        (causal_gradients, CAUSAL_GRADIENTS),
        (pages_alone, PAGES_ALONE),
        (packed_alone, PACKED_ALONE),
        (cache_alone, CACHE_ALONE),
        (rows_first, ROWS_FIRST),
        (wide_tiles, WIDE_TILES),
    )
}
"""The functions of this module, with the claims that each needs."""
