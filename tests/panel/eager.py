"""Attention with a softmax over whole rows: reference code, model files, and kernels for short sequences."""

from functools import partial

import torch
from torch import Tensor

from tests.panel.flash import recomputed
from tests.panel.heads import Heads, attend, finite_shift, for_each_query_head, not_zero, seen_keys


def masked(s: Tensor, seen: Tensor) -> Tensor:
    """Return scores, -inf where a key is not seen; a row that sees none is 0 throughout, lest its softmax be NaN."""
    live = seen.any(-1, keepdim=True)
    return torch.where(seen, s, torch.where(live, -torch.inf, 0.0).to(s.dtype))


def lse_of(s: Tensor, seen: Tensor) -> Tensor:
    """Log of the sum of exponentials of the scores seen, (batch, heads_q, seqlen_q) float32, without a gradient."""
    return torch.where(seen, s.detach().float(), -torch.inf).logsumexp(-1)


def blank_empty_rows(out: Tensor, seen: Tensor) -> Tensor:
    """Return ``out`` with 0 in rows that see no key."""
    return torch.where(seen.any(-1, keepdim=True), out, 0.0)


def float32(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Reference code of most repositories: everything in float32, gradients through autograd.

    Claims: none
    """
    seen = seen_keys(q, k, causal)
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    s = q.float() @ k.mT * sm_scale
    p = torch.softmax(masked(s, seen), -1)
    return blank_empty_rows(p @ v, seen).to(q.dtype), lse_of(s, seen)


def repeated_heads(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Like ``repeat_kv`` in model files, this repeats k and v in the inputs' dtype, so autograd sums in it as well.

    Claims: none
    """
    k, v = (for_each_query_head(x, q) for x in (k, v))
    return float32(q, k, v, causal=causal, sm_scale=sm_scale)


def scaled_in_product(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Megatron's attention in float32: the scale is the alpha of a product, which BLAS does not compute if it is 0.

    Claims: none
    """
    seen = seen_keys(q, k, causal)
    rows, keys, values = (x.float().flatten(0, 1) for x in (q, *(for_each_query_head(x, q) for x in (k, v))))
    nothing = rows.new_zeros(len(rows), q.shape[2], k.shape[2])
    s = torch.baddbmm(nothing, rows, keys.mT, beta=0.0, alpha=sm_scale).unflatten(0, q.shape[:2])
    p = torch.softmax(masked(s, seen), -1).flatten(0, 1)
    out = torch.bmm(p, values).unflatten(0, q.shape[:2])
    return blank_empty_rows(out, seen).to(q.dtype), lse_of(s, seen)


def whole_rows(heads: Heads) -> tuple[Tensor, Tensor]:
    """Return out and lse by a softmax over whole rows in float32: P is divided by l, then cast."""
    s = heads.scores()
    m = s.amax(-1, keepdim=True) if s.shape[-1] else torch.full_like(heads.q[..., :1], -torch.inf)
    p = torch.exp(s - finite_shift(m))
    l = p.sum(-1, keepdim=True)
    return heads.product(heads.rounded(p / not_zero(l)), heads.v), m + l.log()


def softmax_backward(
    heads: Heads, dout: Tensor, out: Tensor, lse: Tensor, *, keep_cast: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return torch's softmax backward, dS = P (dP - rowsum(P dP)), from P as it was saved: in float32, or cast."""
    weights = torch.exp(heads.scores() - finite_shift(lse))
    p = torch.where(heads.seen, weights, 0.0)
    cast = heads.rounded(p)
    p = cast if keep_cast else p
    dp = heads.product(dout, heads.v.mT)
    ds = heads.rounded(p * (dp - (p * dp).sum(-1, keepdim=True)))
    dq, dk = heads.product(ds, heads.k), heads.product(ds.mT, heads.q)
    return dq * heads.sm_scale, dk * heads.sm_scale, heads.product(cast.mT, dout)


def normalised_weights(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """``softmax(scores, dtype=float32).to(dtype)`` on fused scores: P is divided before its cast, saved in float32.

    Claims: none
    """
    backward = partial(softmax_backward, keep_cast=False)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=whole_rows, backward=backward)


def saved_cast_weights(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """The fused softmax of Megatron-LM and Apex: P is saved in the inputs' dtype, and the backward makes dS of that.

    Claims: none
    """
    backward = partial(softmax_backward, keep_cast=True)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=whole_rows, backward=backward)


def recomputed_from_rows(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """A forward over whole rows, as TensorRT-LLM has it for short sequences, with FlashAttention-2's backward.

    Claims: none
    """
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=whole_rows, backward=recomputed)


CHUNK = 64


def chunks_by_autograd(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Rabe and Staats 2021: each chunk of keys has a maximum and sums of its own, merged at the end, in float32.

    Claims: none
    """
    seen = seen_keys(q, k, causal)
    queries = q.float()
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    values: list[Tensor] = []
    sums: list[Tensor] = []
    tops: list[Tensor] = []
    for start in range(0, max(1, k.shape[2]), CHUNK):
        keys = slice(start, start + CHUNK)
        s = torch.where(seen[:, keys], queries @ k[:, :, keys].mT * sm_scale, -torch.inf)
        top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
        p = torch.exp(s - finite_shift(top))
        values.append(p @ v[:, :, keys])
        sums.append(p.sum(-1, keepdim=True))
        tops.append(top)
    top = torch.stack(tops).amax(0)
    factors = torch.exp(torch.stack(tops) - finite_shift(top))
    l = (torch.stack(sums) * factors).sum(0)
    out = (torch.stack(values) * factors).sum(0) / not_zero(l)
    return out.to(q.dtype), (top + l.detach().log())[..., 0]


def of_filled_parts(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Answer each sequence by itself, by as many of its first keys as ``lengths`` (batch,) says."""
    answers = [
        float32(q[b : b + 1], *(x[b : b + 1, :, :n] for x in (k, v)), causal=causal, sm_scale=sm_scale)
        for b, n in enumerate(lengths.tolist())
    ]
    outs, lses = zip(*answers, strict=True)
    return torch.cat(outs), torch.cat(lses)
