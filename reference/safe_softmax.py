"""Attention by safe softmax in float64, forward and backward.

Forward: Milakov & Gimelshein 2018 (arXiv 1805.02867), eq. 2. Backward: the closed form of Dao et al. 2022
(arXiv 2205.14135), appendix B.2. These plain definitions are evaluated for a chunk of query rows at a time.

Non-finite inputs follow IEEE arithmetic through these definitions: a NaN reaches all that is computed from
it, a score of +inf makes its row NaN, a score of -inf gives its key no weight. A key that a row does not see
has no part in that row, nor the row in the key's gradients, whatever their values. A row whose scores are all
-inf is treated as one that sees no key: out 0, lse -inf.
"""

import math

import torch
from torch import Tensor

from reference.dropout import factors
from reference.heads import fold, group_size, unfold
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.masks import LOWEST, blank, blocks, contract, hide, visible
from reference.score_rule import PLAIN, ScoreRule

BLOCK_BYTES = 64 * 2**20
"""Size of one float64 matrix over a chunk's scores; the backward holds about five of them at once."""


def default_chunk(batch: int, heads_q: int, seqlen_k: int) -> int:
    """Query rows of each head taken at once: as many as BLOCK_BYTES hold, and 1 at least."""
    row_bytes = torch.float64.itemsize * batch * heads_q * seqlen_k
    return max(1, BLOCK_BYTES // max(1, row_bytes))


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    alignment: str = "bottom_right",
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    pattern: MaskPattern = NO_PATTERN,
    rule: ScoreRule = PLAIN,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out, like q, and lse (batch, heads_q, seqlen_q), the log-sum-exp of each row's scores, in float64.

    q is (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_kv, seqlen_k, head_dim), of any float
    dtype, device and strides; query head h reads key head h // (heads_q // heads_kv). ``alignment`` anchors
    the causal mask (``masks.visible``); ``chunk`` query rows of a head are taken at once (``default_chunk``).
    Where ``key_padding_mask`` (batch, seqlen_k) bool is False, a key is not seen, whatever it and its value are.
    ``dropout_p`` and ``dropout_seed`` drop weights after the softmax (``reference.dropout``). ``pattern`` says
    what else hides keys (``masks.visible``), ``rule`` what is done to scores (``reference.score_rule``).

    Raises ValueError for head counts, an alignment or a chunk that make no sense.
    """
    group = group_size(q, k)
    k, v = (blank(x.double(), key_padding_mask) for x in (k, v))
    leaks = (causal or bool(pattern)) and not _all_finite(v)
    outs, lses = [], []
    for rows in _chunks(q, k, chunk):
        q_rows = fold(q[:, :, rows].double(), k.shape[1])
        seen = visible(
            q.shape[2], k.shape[2], causal, alignment, q.device, rows, group, key_padding_mask, pattern
        )
        scores = rule.applied((q_rows @ k.mT).mul_(sm_scale), rule.added(q, k, alignment, rows))
        weights, row_max, total = _softmax(hide(scores, seen, -math.inf), rule.sink(q, k, rows))
        if dropout_p:
            weights.mul_(factors(q, k, dropout_p=dropout_p, seed=dropout_seed, rows=rows))
        out = contract(weights, v, seen if leaks else None).div_(total.clamp_min(1.0))
        outs.append(unfold(out, q.shape[1]))
        lses.append(unfold((row_max + total.log()).squeeze(-1), q.shape[1]))
    return _join(outs), _join(lses)


@torch.no_grad()
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    alignment: str = "bottom_right",
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    pattern: MaskPattern = NO_PATTERN,
    rule: ScoreRule = PLAIN,
    bias_gradient: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients dq, like q, and dk and dv, like k and v (summed over the heads of a group), in float64.

    dout is (batch, heads_q, seqlen_q, head_dim); q, k, v and the options are those of ``forward``. If a
    kernel's own out and lse are given, shaped as ``forward`` returns them, gradients are *teacher-forced*:
    P = exp(S - lse) and delta = rowsum(dout * out). Otherwise P is the exact softmax and
    delta = rowsum(P * dP), which is the same number for an exact out. With ``bias_gradient``, dbias, like the bias of
    the rule, is the fourth gradient: the sum of dS over the dimensions in which the bias has size 1.

    Raises ValueError as ``forward`` does, where only one of out and lse is given, and for the gradient of no bias.
    """
    if (out is None) != (lse is None):
        missing = "out" if out is None else "lse"
        raise ValueError(f"{missing}: got None, expected out and lse, or neither")
    group = group_size(q, k)
    heads_kv = k.shape[1]
    k, v = (blank(x.double(), key_padding_mask) for x in (k, v))
    leaks = (causal or bool(pattern)) and not _all_finite(q, k, dout)

    def of_rows(rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q_rows, dout_rows = (fold(x[:, :, rows].double(), heads_kv) for x in (q, dout))
        seen = visible(
            q.shape[2], k.shape[2], causal, alignment, q.device, rows, group, key_padding_mask, pattern
        )
        bias = rule.added(q, k, alignment, rows)
        scores = rule.applied((q_rows @ k.mT).mul_(sm_scale), bias)
        dp = dout_rows @ v.mT
        z = factors(q, k, dropout_p=dropout_p, seed=dropout_seed, rows=rows) if dropout_p else None
        dp = dp if z is None else dp.mul_(z)
        # P and dS are hidden again: in a row with a NaN they are NaN even where the row sees no key.
        if out is None or lse is None:
            weights, _, total = _softmax(hide(scores, seen, -math.inf), rule.sink(q, k, rows))
            p = hide(weights.div_(total.clamp_min(1.0)), seen)
            delta = hide(p * dp, seen).sum(-1, keepdim=True)
        else:
            shift = fold(lse[:, :, rows].double(), heads_kv).clamp_min(LOWEST)[..., None]
            p = hide((scores - shift).exp_(), seen)
            delta = (dout_rows * fold(out[:, :, rows].double(), heads_kv)).sum(-1, keepdim=True)
        grad_s = hide(dp.sub_(delta).mul_(p), seen)
        dbias = rule.summed(grad_s, q.shape[1]) if bias_gradient else None
        ds = hide(rule.undone(grad_s, scores, bias), seen) * sm_scale
        seen = seen if leaks else None
        seen_by = None if seen is None else seen.mT
        dq = contract(ds, k, seen)
        p = p if z is None else p.mul_(z)
        dk, dv = contract(ds.mT, q_rows, seen_by), contract(p.mT, dout_rows, seen_by)
        return unfold(dq, q.shape[1]), dk, dv, dbias

    first, *rest = _chunks(q, k, chunk)
    dq, dk, dv, dbias = of_rows(first)
    dqs, of_bias = [dq], [dbias] if dbias is not None else []
    for rows in rest:
        dq, dk_part, dv_part, dbias = of_rows(rows)
        dqs.append(dq)
        of_bias += [dbias] if dbias is not None else []
        dk += dk_part
        dv += dv_part
    return _join(dqs), dk, dv, *_of_bias(of_bias, rule)


def _chunks(q: Tensor, k: Tensor, chunk: int | None) -> list[slice]:
    """Return slices of the query rows to be taken at once; a single empty one if there are no queries."""
    size = default_chunk(q.shape[0], q.shape[1], k.shape[2]) if chunk is None else chunk
    return list(blocks(q.shape[2], size)) or [slice(0, 0)]


def _join(parts: list[Tensor]) -> Tensor:
    """Join the chunks along the query axis; a single one is not copied."""
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _of_bias(parts: list[Tensor], rule: ScoreRule) -> list[Tensor]:
    """Return dbias alone, joined from that of each chunk, or added up if the bias has one row for all; [] of none."""
    if not parts or rule.bias is None:
        return []
    return [_join(parts) if rule.bias.shape[2] > 1 else torch.stack(parts).sum(0)]


def _all_finite(*tensors: Tensor) -> bool:
    """Whether no entry is NaN or inf, by one device synchronisation. False as well where the sum of all overflows."""
    return math.isfinite(sum(x.sum(dtype=torch.float64) for x in tensors))


def _softmax(scores: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(scores - row_max), row_max and the sum over keys and sink: at least 1, or 0 if there are none."""
    row_max = sink.clamp_min(LOWEST).expand(*scores.shape[:-1], 1)
    if scores.shape[-1]:
        row_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
    weights = (scores - row_max).exp_()
    return weights, row_max, weights.sum(-1, keepdim=True) + (sink - row_max).exp_()
