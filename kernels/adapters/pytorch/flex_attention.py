"""PyTorch's ``flex_attention``: compiled to Triton on CUDA; eager on the CPU, where it has no backward.

Causal masks, the patterns of ``reference.mask_pattern``, key padding, packed sequences and documents are block masks,
aligned bottom-right; lse comes from ``return_aux`` and is a natural logarithm.

What is done to scores is a ``score_mod``, which is given them scaled (Dong et al. 2024, arXiv 2412.05496), in the order
of ``reference.score_rule``: soft-cap, ALiBi, bias. Sinks are the scores of one more key, whose value is 0. Models also
multiply out by sigmoid(lse - sink) after the call, but that rounds out once more, and dout before it meets v.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)
from torch.nn.functional import pad

from kernels.adapters.pytorch import known_failures
from kernels.adapters.pytorch.masks import PATTERNS, blank, sees
from kernels.contract import BIASES, AttentionKernel, Capabilities, Launch, flash_arithmetic
from reference.arithmetic import Arithmetic
from reference.family import ALL_KEYS
from reference.mask_pattern import MaskPattern

_COMPILATIONS = 1024
"""The limit of compilations that Dynamo is given. Even with dynamic shapes a new dtype, head count or head_dim
compiles again, and past its own limit of 8 Dynamo raises an error or runs flex_attention uncompiled.
"""


@cache
def _attention(device_type: str) -> Callable[..., Any]:
    if device_type == "cpu":  # compiling needs a C++ compiler there; PyTorch itself warns that this is eager
        return flex_attention
    return torch.compile(flex_attention, dynamic=True)


@dataclass(frozen=True)
class _Places:
    """Where rows and keys lie in their sequences, of which a batch element may have several: integer tensors.

    They are (batch, length), where batch is 1 if all batch elements have the same sequences. A key for the sinks, if
    there is one, comes after all others, in a sequence that has no rows.

    Attributes:
        diagonal: for each row, the place of the last key that a causal mask lets it see.
        place: the place of each key.
        of_row: the number of each row's sequence.
        of_key: the number of each key's sequence.
    """

    diagonal: Tensor
    place: Tensor
    of_row: Tensor
    of_key: Tensor

    @classmethod
    def of(cls, starts_q: Tensor, starts_k: Tensor, seqlen_q: int, keys: int) -> "_Places":
        """Return the places in sequences that begin at ``starts_q`` and ``starts_k``, (batch, sequences + 1)."""
        row, key = (
            torch.arange(n, device=starts_q.device).repeat(len(starts_q), 1) for n in (seqlen_q, keys)
        )
        ends_q, ends_k = (starts[:, 1:].contiguous() for starts in (starts_q, starts_k))
        of_row, of_key = (
            torch.searchsorted(ends, at, right=True) for ends, at in ((ends_q, row), (ends_k, key))
        )
        diagonal = row - ends_q.gather(1, of_row) + starts_k.diff().gather(1, of_row)
        return cls(diagonal, key - starts_k.gather(1, of_key), of_row, of_key)

    def of_each(self, batch: int) -> "_Places":
        """Return copies with a row for each of the batch elements, whether these have the same sequences or not.

        So a function that reads them is compiled once for both.
        """
        return _Places(*(getattr(self, x.name).repeat(batch // len(self.place), 1) for x in fields(self)))


def _starts(document_ids: Tensor) -> Tensor:
    """Return where the documents of each batch element begin, in order; all other entries are its length.

    For ids (batch, seqlen) it is (batch, seqlen + 1), because there may be as many documents as rows.
    """
    seqlen = document_ids.shape[1]
    row = torch.arange(seqlen, device=document_ids.device)
    goes_on = pad(document_ids[:, 1:] == document_ids[:, :-1], (1, 0))
    return pad(torch.where(goes_on, seqlen, row).sort(-1).values, (0, 1), value=seqlen)


def _causal_mask(seqlen_q: int, seqlen_k: int, device: torch.device) -> BlockMask:
    # The offset is a tensor, because a captured integer would be a constant: another one would compile anew.
    offset = torch.tensor(seqlen_k - seqlen_q, device=device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + offset

    return create_block_mask(visible, None, None, seqlen_q, seqlen_k, device=device)


def _mask(
    places: _Places,
    batch: int,
    seqlen_k: int,
    causal: bool,
    pattern: MaskPattern,
    key_padding_mask: Tensor | None,
) -> BlockMask:
    """Return any mask of ``seqlen_k`` keys; a key after these, which is for the sinks, is seen by every row."""
    each = places.of_each(batch)
    diagonal, place, of_row, of_key = (getattr(each, x.name) for x in fields(each))
    seqlen_q, keys, device = diagonal.shape[1], place.shape[1], place.device
    is_seen, end = sees(causal, pattern, seqlen_q + keys, device), torch.tensor(seqlen_k, device=device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_own = of_row[batch, query] == of_key[batch, key]
        return (is_own & is_seen(diagonal[batch, query], place[batch, key])) | (key >= end)

    if key_padding_mask is None:
        masks = batch if len(places.place) > 1 else None
        return create_block_mask(visible, masks, None, seqlen_q, keys, device=device)
    attended = pad(key_padding_mask, (0, keys - seqlen_k), value=True)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return attended[batch, key]

    return create_block_mask(and_masks(visible, attends), batch, None, seqlen_q, keys, device=device)


def _score_mod(
    places: _Places,
    size: tuple[int, int, int, int],
    *,
    softcap: float,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> Callable[..., Tensor]:
    """Return any change of scores of ``size`` (batch, heads_q, seqlen_q, seqlen_k), as one function.

    It is compiled once, since what is not asked for has no effect: scores are multiplied by 0 and 0 is added. The bias
    is read by its strides, which are 0 along dimensions that it does not have.
    """
    # No tensor stands for two, in a mask and here: Dynamo guards on that too, and raised AttributeError as it did.
    copies = places.of_each(size[0])
    diagonal, place = copies.diagonal, copies.place
    end, limit, is_capped = (
        torch.tensor(x, device=place.device) for x in (size[3], softcap or 1.0, softcap > 0)
    )
    # Dynamo compiles anew for a length of 1.
    nothing = place.new_zeros((3, max(2, size[1])), dtype=torch.float32)
    given = (alibi_slopes, None if bias is None else bias.flatten(), sinks)
    slopes, addends, logits = (
        zeros if x is None else x for zeros, x in zip(nothing.unbind(), given, strict=True)
    )
    strides = (0, 0, 0, 0) if bias is None else bias.expand(size).stride()
    of_batch, of_head, of_query, of_key = (torch.tensor(x, device=place.device) for x in strides)

    def change(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        capped = torch.where(is_capped, limit * torch.tanh(score / limit), score)
        distance = (diagonal[batch, query] - place[batch, key]).abs()
        at = batch * of_batch + head * of_head + query * of_query + torch.minimum(key, end - 1) * of_key
        return torch.where(key < end, capped - slopes[head] * distance + addends[at], logits[head])

    return change


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    key_padding_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    document_ids: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **pattern: int,
) -> tuple[Tensor, Tensor]:
    (batch, heads_q, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    if document_ids is None:
        starts_q, starts_k = (
            torch.tensor([[0, length]], device=q.device) if given is None else given.long()[None]
            for given, length in ((cu_seqlens_q, seqlen_q), (cu_seqlens_k, seqlen_k))
        )
    else:
        starts_q = starts_k = _starts(document_ids)
    k, v = blank(k, key_padding_mask), blank(v, key_padding_mask)
    if sinks is not None:
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    mask = _causal_mask(seqlen_q, seqlen_k, q.device) if causal else None
    change = None
    masks = pattern or any(x is not None for x in (key_padding_mask, cu_seqlens_q, document_ids, sinks))
    changes_scores = softcap or any(x is not None for x in (alibi_slopes, bias, sinks))
    if masks or changes_scores:
        places = _Places.of(starts_q, starts_k, seqlen_q, k.shape[2])
    if masks:
        mask = _mask(places, batch, seqlen_k, causal, MaskPattern(**pattern), key_padding_mask)
    if changes_scores:
        size = (batch, heads_q, seqlen_q, seqlen_k)
        change = _score_mod(places, size, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, sinks=sinks)
    with torch._dynamo.config.patch(recompile_limit=_COMPILATIONS, accumulated_recompile_limit=_COMPILATIONS):
        out, aux = _attention(q.device.type)(
            q,
            k,
            v,
            score_mod=change,
            block_mask=mask,
            scale=sm_scale,
            enable_gqa=heads_q != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    return out, aux.lse


def _arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    """FlashAttention-2's arithmetic on CUDA, where few queries against many keys are split over these.

    On the CPU the code is eager: it takes the softmax of whole rows in float32 and casts the result to the inputs'
    dtype before the product with v. PyTorch's casts round to nearest on both devices.
    """
    arithmetic = flash_arithmetic(dtype, "cuda", launch)
    if device == "cpu":
        return replace(arithmetic, normalised_first=True, tile_min=ALL_KEYS, tile_max=ALL_KEYS)
    return replace(arithmetic, partial_results=True)


KERNEL = AttentionKernel(
    name="flex_attention",
    forward=_forward,
    known_failures=known_failures.FLEX_ATTENTION,
    capabilities=Capabilities(
        # On CUDA: "embedding dimension of the query, key, and value must be at least 16". All larger ones are
        # taken, but each is a compilation of its own, so only a few are claimed.
        head_dims=(64, 128),
        # "value (Tensor): Value tensor; shape (B, Hkv, S, Ev)", beside a query and a key of (..., E).
        v_head_dim=(0, 64, 128),
        # Not documented: max() over no key raises before any kernel runs.
        min_seqlen=1,
        # Not documented: without a batch element, lse is None.
        empty_batch=False,
        key_padding=True,
        softcap=(0.0, 1.5, 20.0, 50.0),
        alibi_slopes=True,
        bias=BIASES,
        sinks=True,
        ragged=("packed", "document"),
        rows_behind="none",
        # Claimed nowhere.
        deterministic=(),
        validates=False,
        arithmetic=_arithmetic,
        **PATTERNS,
    ),
)

UNAVAILABLE: Mapping[tuple[str, str], str] = {
    (
        KERNEL.name,
        "cpu",
    ): "FlexAttention does not support backward on CPU (forward alone: --kernel "
    "kernels.adapters.pytorch.flex_attention:KERNEL --claims backward=false)",
}
