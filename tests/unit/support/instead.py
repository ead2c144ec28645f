"""A plain function with a backward of its own, in which one line is wrong, and what it computes instead.

The function folds no heads, keeps lse for its backward, and works in float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

TILE = 32
RARE, CUT, FEW, BY_HEAD_DIM = "fifth_sequence", "cut", "few_unmasked", "tail_by_head_dim"
AT_INFERENCE = "top_left_at_inference"
"""Wrong lines that a certificate can't tell, or only from several calls of a kind.

dq of sequences from the fifth on is twice what it should be; weights are cut to 16 bits, not rounded; two to four
queries are not masked; keys past the last whole tile are dropped, whose size depends on head_dim; the causal mask is
aligned top-left in calls without gradients.
"""


def _seen(q: Tensor, k: Tensor, causal: bool, bugs: frozenset[str], *, backward: bool) -> Tensor:
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    shift: Any = 0 if "top_left" in bugs else k.shape[2] - q.shape[2]
    shift += "one_ahead" in bugs and backward
    shift += (-k.shape[2] % TILE) * ("keys_filled_up" in bugs)
    if "row_in_tile" in bugs:
        rows = rows % TILE
    if "mask_of_split" in bugs:
        shift = (k.shape[2] - keys // TILE * TILE).clamp_max(TILE) - q.shape[2]
        keys = keys % TILE
    causal = causal and not ("few_unmasked" in bugs and 1 < q.shape[2] <= 4)
    if "rounded_places" in bugs:
        rows, keys = rows.to(q.dtype), keys.to(q.dtype)
    seen = keys <= rows + shift if causal and "no_mask" not in bugs else torch.ones(len(rows), len(keys)) > 0
    if causal and "first_key_seen" in bugs:
        seen = seen | (keys == 0)
    if causal and "top_left_where_seen" in bugs:
        seen = (keys <= rows) & (rows + shift >= 0)
    if causal and "unmasked_by_number" in bugs:
        seen = seen | (keys < rows // TILE * TILE)
    if "power_of_two" in bugs:
        seen = seen & (keys < TILE << (-(-len(keys) // TILE)).bit_length() - 1)
    if BY_HEAD_DIM in bugs:
        seen = seen & (keys < len(keys) // (tile := TILE if q.shape[-1] <= 32 else TILE // 2) * tile)
    if "tail_of_keys" in bugs or ("causal_tail" in bugs and causal):
        seen = seen & (keys < len(keys) // TILE * TILE)
    return seen


def _heads(x: Tensor, q: Tensor, bugs: frozenset[str]) -> Tensor:
    group = q.shape[1] // x.shape[1]
    if "by_power_of_two" in bugs:
        return x[:, torch.arange(q.shape[1]) >> (group - 1).bit_length()]
    return x.repeat(1, group, 1, 1) if "interleaved" in bugs else x.repeat_interleave(group, 1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bugs: frozenset[str], q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float
    ) -> Any:
        scale = q.shape[-1] ** -0.5 if "default_scale" in bugs else sm_scale
        kk, vv = (_heads(x.float(), q, bugs) for x in (k, v))
        s = q.float() @ kk.mT * scale
        seen = _seen(q, k, causal, bugs, backward=False)
        s = s.masked_fill(~seen, -1e9 if "sentinel" in bugs else -math.inf)
        top = s.amax(-1, keepdim=True) if k.shape[2] else s.new_full((*s.shape[:-1], 1), -math.inf)
        empty = top == -math.inf
        top = top.masked_fill(empty, 0.0)
        p = (s - top).exp() if "other_base" not in bugs else (s - top).exp2()
        if "cut" in bugs:
            p = (p.to(q.dtype).view(torch.int16) - (p.to(q.dtype) > p).short()).view(q.dtype).float()
        total = p.sum(-1, keepdim=True)
        out = p @ vv / total.masked_fill(empty, 1.0)
        lse = (top + total.log()).masked_fill(empty, -math.inf)[..., 0]
        if "few_rows" in bugs:
            out[:, :, 16:], lse[:, :, 16:] = 0.0, -math.inf
        if "tail_of_out" in bugs:
            out[:, :, out.shape[2] // TILE * TILE :] = 0.0
        lse = lse.to(q.dtype).float() if "rounded_lse" in bugs else lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = bugs, causal, sm_scale
        told = lse / math.log(2.0) if "base_2" in bugs else lse - top[..., 0] if "no_maximum" in bugs else lse
        ctx.mark_non_differentiable(told)
        return out.to(q.dtype), told

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        bugs, causal, sm_scale = ctx.options
        dout, group = grads[0].float(), q.shape[1] // k.shape[1]
        kk, vv = (_heads(x.float(), q, bugs) for x in (k, v))
        seen = _seen(q, k, causal, bugs, backward=True)
        s = (q.float() @ kk.mT * sm_scale).masked_fill(~seen, -math.inf)
        s = s.masked_fill((lse == -math.inf)[..., None], -math.inf)  # rows that saw no key in the forward
        p = (s - lse.masked_fill(lse == -math.inf, 0.0)[..., None] + 0.01 * ("lse_too_small" in bugs)).exp()
        delta = (out * dout).sum(-1, keepdim=True) * (
            1.03 if "more_delta" in bugs else "no_delta" not in bugs
        )
        if "delta_padded" in bugs:
            memory = torch.nn.functional.pad(delta[..., 0], (0, -delta.shape[2] % TILE)).flatten()
            delta = memory[: delta.numel()].view(delta.shape)
        if "delta_of_tiles" in bugs:
            delta[:, :, delta.shape[2] // TILE * TILE :] = 0.0
        if "delta_of_rows" in bugs:
            flat = out.transpose(1, 2).reshape(-1, out.shape[-1])
            delta = (flat * dout.reshape(flat.shape)).sum(-1).view(delta.shape)
        ds = p * (dout @ vv.mT - delta)
        if "splits_detached" in bugs:
            size = -(-p.shape[-1] // max(1, -(-p.shape[-1] // TILE)))
            for start in range(0, p.shape[-1], size):
                part = p[..., start : start + size]
                dp = (dout @ vv.mT)[..., start : start + size]
                own = (part * dp).sum(-1, keepdim=True) / part.sum(-1, keepdim=True).clamp_min(1e-30)
                ds[..., start : start + size] = part * (dp - own)
        rows = torch.arange(q.shape[2])[:, None]
        kept = (
            (rows < q.shape[2] // TILE * TILE).float() if "tail_of_rows" in bugs else torch.ones(len(rows), 1)
        )
        dq = ds @ kk * (1.0 if "dq_unscaled" in bugs else sm_scale)
        if RARE in bugs:
            dq[4:] *= 2.0
        dk, dv = ds.mT @ (q.float() * kept) * sm_scale, p.mT @ (dout * kept)
        order = (group, k.shape[1]) if "interleaved" in bugs else (k.shape[1], group)
        if "summed_in_turns" in bugs:
            order = (group, k.shape[1])
        of_group = 1 if {"interleaved", "summed_in_turns"} & bugs else 2
        read = torch.arange(q.shape[1]) >> (group - 1).bit_length()
        dk, dv = (
            torch.zeros_like(x[:, : k.shape[1]]).index_add(1, read, x)
            if "by_power_of_two" in bugs
            else x.unflatten(1, order).sum(of_group)
            for x in (dk, dv)
        )
        if "copied_columns" in bugs:
            dv = dv[..., torch.arange(dv.shape[-1]) % 16]
        if "first_of_group" in bugs:
            dv = (p.mT @ dout).unflatten(1, order)[:, :, 0]
        if "exchanged" in bugs:
            dk, dv = dv, dk
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def __getattr__(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function whose wrong lines the name has, joined by ``_and_``; ``sound`` has none."""
    bugs = name.split("_and_")
    if name != "sound" and not {*bugs} <= {*INSTEAD, RARE, CUT, FEW, BY_HEAD_DIM, AT_INFERENCE}:
        raise AttributeError(name)
    return kernel(*bugs)


def kernel(*bugs: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function with these lines wrong."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
        lines = {*bugs, "top_left"} if AT_INFERENCE in bugs and not q.requires_grad else {*bugs}
        result: tuple[Tensor, Tensor] = _Attention.apply(frozenset(lines), q, k, v, causal, sm_scale)
        return result

    return attention


INSTEAD: Mapping[str, tuple[str, ...]] = {
    "top_left": ("the causal mask is aligned top-left",),
    "no_mask": ("the causal mask is left out",),
    "one_ahead": ("in the backward, each row sees +1 keys under the causal mask",),
    "tail_of_keys": ("keys past the last whole tile of 32 are dropped",),
    "causal_tail": ("keys past the last whole tile of 32 are dropped, only under the causal mask",),
    "interleaved": ("grouped heads are read interleaved: query head h reads key head h mod heads_kv",),
    "default_scale": (
        "in the forward alone, the scale of the scores is the default 1 / sqrt(head_dim), whatever is given",
    ),
    "base_2": ("lse is in base 2",),
    "other_base": ("in the forward alone, weights are 2 to the power of the score less its maximum",),
    "exchanged": ("dk and dv are exchanged",),
    "no_maximum": ("lse is the logarithm of the sum without the maximum",),
    "tail_of_out": ("rows of out past the last whole tile of 32 are 0",),
    "no_delta": ("delta is left out of dq and dk",),
    "more_delta": ("delta is multiplied by 1.03 in dq and dk",),
    "lse_too_small": ("P is computed again from an lse that is 0.01 too small, in dq and dk and dv",),
    "tail_of_rows": ("query rows past the last whole tile of 32 are lost in dk and dv",),
    "dq_unscaled": ("the scale that multiplies dq is left out",),
    "first_of_group": ("only the first query head of each group is summed in dv",),
    "keys_filled_up": ("the causal mask is aligned as if the keys were filled up to a multiple of 32",),
    "row_in_tile": ("under the causal mask, the number of a row is that within its tile of 32",),
    "mask_of_split": (
        "the causal mask of a split of 32 keys is aligned as if the call had these keys alone",
    ),
    "by_power_of_two": (
        "query head h reads k and v of key head h >> n, where 2^n is the size of a group, rounded up to a power of two",
    ),
    "few_rows": ("query rows past 16 are not computed",),
    "delta_padded": (
        "delta is stored in rows that are filled up with zeros to a multiple of 32, and read as if they were not, "
        "in dq and dk",
    ),
    "delta_of_rows": (
        "delta is the sum of products of out in (batch, row, head) order and of dout in (batch, head, row) order, "
        "in dq and dk",
    ),
    "splits_detached": (
        "weights of splits of equal numbers of keys, up to 32 have no gradient in dq and dk",
    ),
    "delta_of_tiles": ("delta of the rows past the last whole tile of 32 is 0 in dq and dk",),
    "first_key_seen": ("rows that see no key under the causal mask see the first one",),
    "top_left_where_seen": ("the causal mask is aligned top-left in rows that see a key",),
    "unmasked_by_number": (
        "under the causal mask, whole tiles of 32 keys before a row's own number are not masked",
    ),
    "power_of_two": (
        "of the splits of 32 keys, as many are merged as the largest power of two that they reach, the others dropped",
    ),
    "summed_in_turns": (
        "the parts of query heads in dk and dv of key head h are those of the query heads that are h modulo heads_kv",
    ),
    "rounded_lse": ("lse is rounded to the dtype of the inputs",),
    "rounded_places": ("places under the causal mask are rounded to the dtype of the inputs",),
    "copied_columns": ("columns of dv from 16 on are a copy of the first ones",),
}
"""What the function computes with each wrong line."""
OF_FEW_BITS = ("rounded_lse", "rounded_places")
"""The wrong lines that show in bfloat16 alone."""
