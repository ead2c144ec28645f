"""Attention over whole rows in Triton, by programs that take several blocks of rows each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.panel.eager import softmax_backward
from tests.panel.heads import Heads, attend_by_launch

BLOCK_M = 64
PROGRAMS = 8
MOST_BYTES = 3 * 2**16
"""The most bytes of k and v for one head with the weights of a block of rows, since all of them have to fit on chip."""


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
    blocks,
    seqlen_q,
    seqlen_k,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
):
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    cols = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, KEYS)
    offsets = n.to(tl.int64)
    k_base = K + batch * stride_kb + (head // group) * stride_kh
    v_base = V + batch * stride_vb + (head // group) * stride_vh
    k = tl.load(k_base + offsets[None, :] * stride_kn + cols[:, None], mask=n[None, :] < seqlen_k, other=0.0)
    v = tl.load(v_base + offsets[:, None] * stride_vn + cols[None, :], mask=n[:, None] < seqlen_k, other=0.0)
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        in_q = rows[:, None] < seqlen_q
        q_ptrs = Q + batch * stride_qb + head * stride_qh + rows.to(tl.int64)[:, None] * stride_qm
        q = tl.load(q_ptrs + cols[None, :], mask=in_q, other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * sm_scale
        seen = n[None, :] < seqlen_k
        if CAUSAL:
            seen = seen & (n[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
        s = tl.where(seen, s, float("-inf"))
        m = tl.max(s, 1)
        p = tl.exp(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
        l = tl.sum(p, 1)
        p = p / tl.where(l == 0.0, 1.0, l)[:, None]
        out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        at = tl.program_id(0).to(tl.int64) * seqlen_q + rows
        tl.store(Out + at[:, None] * HEAD_DIM + cols[None, :], out.to(Out.dtype.element_ty), mask=in_q)
        tl.store(Lse + at, m + tl.log(l), mask=rows < seqlen_q)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return out (contiguous) and lse. Raises NotImplementedError for more keys than MOST_BYTES allows."""
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    keys = max(16, triton.next_power_of_2(seqlen_k))
    most_keys = MOST_BYTES // ((2 * head_dim + BLOCK_M) * k.element_size())
    if keys > most_keys:
        raise NotImplementedError(f"k: got {seqlen_k} keys, expected at most {most_keys}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not seqlen_q:
        return out, lse
    blocks = triton.cdiv(seqlen_q, BLOCK_M)
    _forward[(batch * heads, min(blocks, PROGRAMS))](
        *(q, k, v, out, lse, sm_scale),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(heads, heads // k.shape[1], blocks, seqlen_q, seqlen_k),
        CAUSAL=causal,
        HEAD_DIM=head_dim,
        BLOCK_M=BLOCK_M,
        KEYS=keys,
    )
    return out, lse


def _backward(heads: Heads, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return softmax_backward(heads, dout, out, lse, keep_cast=False)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Attention made from Triton's fused softmax tutorial: whole rows, persistent programs, an eager backward.

    Raises NotImplementedError for more keys than MOST_BYTES allows.

    Claims: none
    """
    return attend_by_launch(
        q, k, v, causal=causal, sm_scale=sm_scale, launch=launch_forward, backward=_backward
    )
