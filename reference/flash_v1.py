"""FlashAttention (Dao et al. 2022, arXiv 2205.14135) in float64: the outer loop takes keys, the inner one queries.

This is Algorithm 1 with the scaling, the mask and the dropout of Algorithm 2, and Algorithm 4, with masks and changes
of scores that the paper leaves out. Comments give the line of Algorithm 1 or 4. Heads of a group are folded into rows
(``reference.heads``), so a query block may hold rows of two heads. Non-finite inputs are treated as in
``reference.safe_softmax``.
"""

import math

import torch
from torch import Tensor

from reference.dropout import factors
from reference.heads import fold, group_size, unfold
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.masks import LOWEST, blocks, contract, hide, visible
from reference.score_rule import PLAIN, ScoreRule


def logsumexp(m: Tensor, l: Tensor) -> Tensor:
    """Log-sum-exp of a row from its maximum m and its sum l of exp(S - m), all of one shape."""
    return m + l.log()


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out like q, m and l (batch, heads_q, seqlen_q), float64, by Algorithm 1.

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
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])  # line 2
    m = sink.repeat(q.shape[0], 1, 1, 1)  # line 2
    l = (m > -math.inf).double()  # line 2
    for j in blocks(k.shape[2], block_k):  # lines 3, 5
        k_j, v_j = k[:, :, j], v[:, :, j]  # line 6
        for i in blocks(q.shape[2], block_q):  # lines 4, 7
            q_i, out_i, l_i, m_i = q[:, :, i], out[:, :, i], l[:, :, i], m[:, :, i]  # line 8
            seen_ij = None if seen is None else seen[..., i, j]
            s_ij = rule.applied(sm_scale * (q_i @ k_j.mT), bias[:, :, i, j])  # line 9
            s_ij = hide(s_ij, seen_ij, -math.inf)
            m_ij = s_ij.amax(-1, keepdim=True)  # line 10
            p_ij = torch.exp(s_ij - m_ij.clamp_min(LOWEST))  # line 10
            l_ij = p_ij.sum(-1, keepdim=True)  # line 10
            m_new = torch.maximum(m_i, m_ij)  # line 11
            old, new = (torch.exp(x - m_new.clamp_min(LOWEST)) for x in (m_i, m_ij))  # line 11
            l_new = old * l_i + new * l_ij  # line 11
            dropped_ij = p_ij * z[:, :, i, j]  # Algorithm 2, line 14
            scaled = l_i * old * out_i + new * contract(dropped_ij, v_j, seen_ij)  # line 12
            out[:, :, i] = scaled / l_new.clamp_min(1.0)  # line 12; l_new is below 1 only where it is 0
            l[:, :, i], m[:, :, i] = l_new, m_new  # line 13
    return unfold(out, heads_q), unfold(m.squeeze(-1), heads_q), unfold(l.squeeze(-1), heads_q)  # line 16


@torch.no_grad()
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    m: Tensor,
    l: Tensor,
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
    """Return dq like q, dk and dv like k and v, float64, by Algorithm 4 from what ``forward`` was given and returned.

    With ``bias_gradient``, dbias is the fourth: dS, summed to the shape of the rule's bias. The paper has no bias.

    Raises ValueError for head counts, an alignment or block sizes that make no sense.
    """
    heads_q, heads_kv, group = q.shape[1], k.shape[1], group_size(q, k)
    seen = visible(q.shape[2], k.shape[2], causal, alignment, q.device, group=group, pattern=pattern)
    z = factors(q, k, dropout_p=dropout_p, seed=dropout_seed)
    bias = rule.added(q, k, alignment)
    q, dout, out, m, l = (fold(x.double(), heads_kv) for x in (q, dout, out, m, l))
    k, v = k.double(), v.double()
    m, l = m[..., None].clamp_min(LOWEST), l[..., None].clamp_min(1.0)  # rows that see no key
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)  # line 5
    grad_s = torch.zeros_like(q[..., :1]).repeat(1, 1, 1, k.shape[2])
    for j in blocks(k.shape[2], block_k):  # lines 3, 6
        k_j, v_j = k[:, :, j], v[:, :, j]  # line 7
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)  # line 8
        for i in blocks(q.shape[2], block_q):  # lines 4, 9
            q_i, out_i, dout_i, l_i, m_i = (x[:, :, i] for x in (q, out, dout, l, m))  # line 10
            seen_ij = None if seen is None else seen[..., i, j]
            seen_ji = None if seen_ij is None else seen_ij.mT
            s_ij = rule.applied(sm_scale * (q_i @ k_j.mT), bias[:, :, i, j])  # lines 11, 12
            p_ij = hide(torch.exp(s_ij - m_i) / l_i, seen_ij)  # line 13
            z_ij = z[:, :, i, j]  # line 14
            dv_j += contract((p_ij * z_ij).mT, dout_i, seen_ji)  # lines 15, 16
            dp_ij = dout_i @ v_j.mT * z_ij  # lines 17, 18
            delta_i = (dout_i * out_i).sum(-1, keepdim=True)  # line 19
            grad_s[:, :, i, j] = hide(p_ij * (dp_ij - delta_i), seen_ij)  # line 20
            ds_ij = rule.undone(grad_s[:, :, i, j], s_ij, bias[:, :, i, j])
            ds_ij = hide(ds_ij, seen_ij)
            dq[:, :, i] += sm_scale * contract(ds_ij, k_j, seen_ij)  # line 21
            dk_j += sm_scale * contract(ds_ij.mT, q_i, seen_ji)  # line 22
        dk[:, :, j], dv[:, :, j] = dk_j, dv_j  # line 24
    dbias = (rule.summed(grad_s, heads_q),) if bias_gradient else ()
    return unfold(dq, heads_q), dk, dv, *dbias  # line 26
