"""FlashAttention-2 (Dao 2023, arXiv 2307.08691) in float64: the outer loop takes queries, and divides once at the end.

These are Algorithms 1 and 2, with sm_scale, the causal mask and dropout, which the paper leaves out of them. Comments
give the line of the algorithm. Heads of a group are folded into rows (``reference.heads``), so a query block may hold
rows of two heads. Non-finite inputs are treated as in ``reference.safe_softmax``.
"""

import math

import torch
from torch import Tensor

from reference.dropout import factors
from reference.heads import fold, group_size, unfold
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.masks import LOWEST, blocks, contract, hide, visible
from reference.score_rule import PLAIN, ScoreRule


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    alignment: str = "bottom_right",
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    pattern: MaskPattern = NO_PATTERN,
    rule: ScoreRule = PLAIN,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, Tensor]:
    """Return out like q and lse (batch, heads_q, seqlen_q), float64, by Algorithm 1.

    q is (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_kv, seqlen_k, head_dim), any float dtype;
    v and out may have another head_dim; block_q and block_k are the paper's B_r and B_c; dropout is that of
    ``reference.dropout``, pattern that of ``masks.visible``, rule that of ``reference.score_rule``.

    Raises ValueError for head counts, an alignment or block sizes that make no sense.
    """
    heads_q, group = q.shape[1], group_size(q, k)
    seen = visible(q.shape[2], k.shape[2], causal, alignment, q.device, group=group, pattern=pattern)
    z = factors(q, k, dropout_p=dropout_p, seed=dropout_seed)
    bias, sink = rule.added(q, k, alignment), rule.sink(q, k)
    q, k, v = fold(q.double(), k.shape[1]), k.double(), v.double()
    out = q.new_empty(*q.shape[:-1], v.shape[-1])  # line 2
    lse = q.new_empty(q.shape[:-1])  # line 2
    for i in blocks(q.shape[2], block_q):  # lines 1, 3
        q_i = q[:, :, i]  # line 4
        acc = torch.zeros_like(out[:, :, i])  # line 5
        m = sink[:, :, i].expand(*q_i.shape[:-1], 1)  # line 5
        l = (m > -math.inf).double()  # line 5
        for j in blocks(k.shape[2], block_k):  # lines 1, 6
            k_j, v_j = k[:, :, j], v[:, :, j]  # line 7
            seen_ij = None if seen is None else seen[..., i, j]
            s_ij = rule.applied(sm_scale * (q_i @ k_j.mT), bias[:, :, i, j])  # line 8
            s_ij = hide(s_ij, seen_ij, -math.inf)
            m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))  # line 9
            p_ij = torch.exp(s_ij - m_new.clamp_min(LOWEST))  # line 9
            alpha = torch.exp(m - m_new.clamp_min(LOWEST))  # line 9
            l = alpha * l + p_ij.sum(-1, keepdim=True)  # line 9
            dropped_ij = p_ij * z[:, :, i, j]
            acc = alpha * acc + contract(
                dropped_ij, v_j, seen_ij
            )  # line 10; the paper's exponent -1 is a misprint
            m = m_new
        out[:, :, i] = acc / l.clamp_min(1.0)  # lines 12, 14; l is below 1 only where it is 0
        lse[:, :, i] = (m + l.log()).squeeze(-1)  # lines 13, 15
    return unfold(out, heads_q), unfold(lse, heads_q)  # line 17


@torch.no_grad()
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    alignment: str = "bottom_right",
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    pattern: MaskPattern = NO_PATTERN,
    rule: ScoreRule = PLAIN,
    bias_gradient: bool = False,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, ...]:
    """Return dq like q, dk and dv like k and v, float64, by Algorithm 2 from what ``forward`` was given and returned.

    With ``bias_gradient``, dbias is the fourth: dS, summed to the shape of the rule's bias. The paper has no bias.

    Raises ValueError for head counts, an alignment or block sizes that make no sense.
    """
    heads_q, heads_kv, group = q.shape[1], k.shape[1], group_size(q, k)
    seen = visible(q.shape[2], k.shape[2], causal, alignment, q.device, group=group, pattern=pattern)
    z = factors(q, k, dropout_p=dropout_p, seed=dropout_seed)
    bias = rule.added(q, k, alignment)
    q, dout, out, lse = (fold(x.double(), heads_kv) for x in (q, dout, out, lse))
    k, v, lse = k.double(), v.double(), lse[..., None].clamp_min(LOWEST)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)  # line 3
    grad_s = torch.zeros_like(q[..., :1]).repeat(1, 1, 1, k.shape[2])
    delta = (dout * out).sum(-1, keepdim=True)  # line 4
    for j in blocks(k.shape[2], block_k):  # lines 1, 5
        k_j, v_j = k[:, :, j], v[:, :, j]  # line 6
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)  # line 7
        for i in blocks(q.shape[2], block_q):  # lines 2, 8
            q_i, dout_i, lse_i, delta_i = (x[:, :, i] for x in (q, dout, lse, delta))  # line 9
            seen_ij = None if seen is None else seen[..., i, j]
            seen_ji = None if seen_ij is None else seen_ij.mT
            s_ij = rule.applied(sm_scale * (q_i @ k_j.mT), bias[:, :, i, j])  # line 10
            p_ij = hide(torch.exp(s_ij - lse_i), seen_ij)  # line 11
            z_ij = z[:, :, i, j]
            dv_j += contract((p_ij * z_ij).mT, dout_i, seen_ji)  # line 12
            dp_ij = dout_i @ v_j.mT * z_ij  # line 13
            grad_s[:, :, i, j] = hide(p_ij * (dp_ij - delta_i), seen_ij)  # line 14
            ds_ij = rule.undone(grad_s[:, :, i, j], s_ij, bias[:, :, i, j])
            ds_ij = hide(ds_ij, seen_ij)
            dq[:, :, i] += sm_scale * contract(ds_ij, k_j, seen_ij)  # line 15
            dk_j += sm_scale * contract(ds_ij.mT, q_i, seen_ji)  # line 16
        dk[:, :, j], dv[:, :, j] = dk_j, dv_j  # line 18
    dbias = (rule.summed(grad_s, heads_q),) if bias_gradient else ()
    return unfold(dq, heads_q), dk, dv, *dbias  # line 20
