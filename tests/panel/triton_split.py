"""Split-KV attention in Triton: one kernel attends parts of the keys, another merges them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.panel.flash import recomputed
from tests.panel.heads import attend_by_launch

BLOCK_M = 64
BLOCK_N = 64
SPLITS = 4


@triton.jit
def _part(
    Q,
    K,
    V,
    Part,
    PartLse,
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
    keys_each,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    split = tl.program_id(2)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, HEAD_DIM)
    in_q = rows[:, None] < seqlen_q
    q_ptrs = Q + batch * stride_qb + head * stride_qh + rows.to(tl.int64)[:, None] * stride_qm + cols[None, :]
    q = tl.load(q_ptrs, mask=in_q, other=0.0)
    k_base = K + batch * stride_kb + (head // group) * stride_kh
    v_base = V + batch * stride_vb + (head // group) * stride_vh
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = tl.minimum(seqlen_k, (split + 1) * keys_each)
    for start_n in range(split * keys_each, end, BLOCK_N):
        n = start_n + tl.arange(0, BLOCK_N)
        offsets = n.to(tl.int64)
        k = tl.load(k_base + offsets[:, None] * stride_kn + cols[None, :], mask=n[:, None] < end, other=0.0)
        v = tl.load(v_base + offsets[:, None] * stride_vn + cols[None, :], mask=n[:, None] < end, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        seen = n[None, :] < end
        if CAUSAL:
            seen = seen & (n[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - shift[:, None])
        alpha = tl.exp(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_new
    at = (split * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * seqlen_q + rows
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(Part + at[:, None] * HEAD_DIM + cols[None, :], out, mask=in_q)
    tl.store(PartLse + at, m_i + tl.log(l_i), mask=rows < seqlen_q)


@triton.jit
def _merge(
    Part, PartLse, Out, Lse, rows, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, HEAD_DIM)
    inside = row < rows
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(PartLse + split * rows + row, mask=inside, other=0.0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for split in tl.static_range(SPLITS):
        at = split * rows + row
        weight = tl.exp(tl.load(PartLse + at, mask=inside, other=0.0) - shift)
        part = tl.load(Part + at[:, None] * HEAD_DIM + cols[None, :], mask=inside[:, None], other=0.0)
        out += weight[:, None] * part
        total += weight
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        Out + row[:, None] * HEAD_DIM + cols[None, :], out.to(Out.dtype.element_ty), mask=inside[:, None]
    )
    tl.store(Lse + row, top + tl.log(total), mask=inside)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return out (contiguous) and lse, merged from four parts of the keys in float32."""
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k, rows = k.shape[2], batch * heads * seqlen_q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not seqlen_q:
        return out, lse
    parts = torch.empty((SPLITS, *q.shape), dtype=torch.float32, device=q.device)
    lses = torch.empty((SPLITS, *q.shape[:3]), dtype=torch.float32, device=q.device)
    keys_each = triton.cdiv(triton.cdiv(seqlen_k, SPLITS), BLOCK_N) * BLOCK_N
    _part[(batch * heads, triton.cdiv(seqlen_q, BLOCK_M), SPLITS)](
        *(q, k, v, parts, lses, sm_scale),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(heads, heads // k.shape[1], seqlen_q, seqlen_k, keys_each),
        CAUSAL=causal,
        HEAD_DIM=head_dim,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )
    merge_grid = (triton.cdiv(rows, BLOCK_M),)
    _merge[merge_grid](parts, lses, out, lse, rows, SPLITS=SPLITS, HEAD_DIM=head_dim, BLOCK_M=BLOCK_M)
    return out, lse


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Flash-Decoding in Triton: four splits of whole tiles, in float32, and a kernel that merges them row by row.

    Claims: none
    """
    return attend_by_launch(
        q, k, v, causal=causal, sm_scale=sm_scale, launch=launch_forward, backward=recomputed
    )
