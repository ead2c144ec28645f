"""FlashAttention-2's forward in the manner of Triton's tutorial, with a backward in PyTorch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.panel.flash import recomputed
from tests.panel.heads import attend_by_launch

BLOCK_M = 64
BLOCK_N = 32


@triton.jit
def _forward(
    Q,
    K,
    V,
    Out,
    Lse,
    sm_scale,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    start = tl.program_id(1) * BLOCK_M
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    rows = start + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, HEAD_DIM)
    keys = tl.arange(0, BLOCK_N)
    q_ptrs = Q + batch * stride_qb + head * stride_qh + rows.to(tl.int64)[:, None] * stride_qm + cols[None, :]
    q = tl.load(q_ptrs, mask=rows[:, None] < seqlen_q, other=0.0)
    k_base = K + batch * stride_kb + (head // group) * stride_kh
    v_base = V + batch * stride_vb + (head // group) * stride_vh
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    qk_scale = sm_scale * 1.4426950408889634
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(seqlen_k, tl.maximum(0, start + BLOCK_M + seqlen_k - seqlen_q))
    for start_n in range(0, end, BLOCK_N):
        n = start_n + keys
        offsets = n.to(tl.int64)
        k = tl.load(
            k_base + offsets[None, :] * stride_kn + cols[:, None], mask=n[None, :] < seqlen_k, other=0.0
        )
        s = tl.dot(q, k, input_precision="ieee") * qk_scale
        seen = n[None, :] < seqlen_k
        if CAUSAL:
            seen = seen & (n[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - shift[:, None])
        alpha = tl.exp2(m_i - shift)
        v = tl.load(
            v_base + offsets[:, None] * stride_vn + cols[None, :], mask=n[:, None] < seqlen_k, other=0.0
        )
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    at = tl.program_id(0).to(tl.int64) * seqlen_q + rows
    tl.store(
        Out + at[:, None] * HEAD_DIM + cols[None, :],
        out.to(Out.dtype.element_ty),
        mask=rows[:, None] < seqlen_q,
    )
    tl.store(Lse + at, lse, mask=rows < seqlen_q)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return out (contiguous) and lse; one program computes each block of rows."""
    batch, heads, seqlen_q, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not seqlen_q:
        return out, lse
    _forward[(batch * heads, triton.cdiv(seqlen_q, BLOCK_M))](
        *(q, k, v, out, lse, sm_scale),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(heads, heads // k.shape[1], seqlen_q, k.shape[2]),
        CAUSAL=causal,
        HEAD_DIM=head_dim,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )
    return out, lse


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Triton's fused attention tutorial, with plain pointers and exponentials in base 2, and a backward in PyTorch.

    Claims: none
    """
    return attend_by_launch(
        q, k, v, causal=causal, sm_scale=sm_scale, launch=launch_forward, backward=recomputed
    )
