"""FlashAttention-2 in Triton with both passes: one kernel for out, one for dq, one for dk and dv."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.panel.heads import Options, attend_by_launches
from tests.panel.triton_tutorial import launch_forward

BLOCK = 64


@triton.jit
def _tile(base, rows, stride, cols, length):
    return tl.load(
        base + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=rows[:, None] < length, other=0.0
    )


@triton.jit
def _gradients_of_queries(
    Q,
    K,
    V,
    DOut,
    Lse,
    Delta,
    DQ,
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
    stride_db,
    stride_dh,
    stride_dm,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(1) * BLOCK
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    rows = start + tl.arange(0, BLOCK)
    cols = tl.arange(0, HEAD_DIM)
    q = _tile(Q + batch * stride_qb + head * stride_qh, rows, stride_qm, cols, seqlen_q)
    do = _tile(DOut + batch * stride_db + head * stride_dh, rows, stride_dm, cols, seqlen_q)
    at = tl.program_id(0).to(tl.int64) * seqlen_q + rows
    lse = tl.load(Lse + at, mask=rows < seqlen_q, other=0.0)
    delta = tl.load(Delta + at, mask=rows < seqlen_q, other=0.0)
    k_base = K + batch * stride_kb + (head // group) * stride_kh
    v_base = V + batch * stride_vb + (head // group) * stride_vh
    dq = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    for start_n in range(0, seqlen_k, BLOCK):
        n = start_n + tl.arange(0, BLOCK)
        k = _tile(k_base, n, stride_kn, cols, seqlen_k)
        v = _tile(v_base, n, stride_vn, cols, seqlen_k)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        seen = (n[None, :] < seqlen_k) & (rows[:, None] < seqlen_q)
        if CAUSAL:
            seen = seen & (n[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    dq = dq * sm_scale
    tl.store(
        DQ + at[:, None] * HEAD_DIM + cols[None, :], dq.to(DQ.dtype.element_ty), mask=rows[:, None] < seqlen_q
    )


@triton.jit
def _gradients_of_keys(
    Q,
    K,
    V,
    DOut,
    Lse,
    Delta,
    DK,
    DV,
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
    stride_db,
    stride_dh,
    stride_dm,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    heads_kv = heads // group
    batch = (tl.program_id(0) // heads_kv).to(tl.int64)
    head_kv = (tl.program_id(0) % heads_kv).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, HEAD_DIM)
    k = _tile(K + batch * stride_kb + head_kv * stride_kh, n, stride_kn, cols, seqlen_k)
    v = _tile(V + batch * stride_vb + head_kv * stride_vh, n, stride_vn, cols, seqlen_k)
    dk = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    for member in range(group):
        head = head_kv * group + member
        first = (batch * heads + head) * seqlen_q
        for start_m in range(0, seqlen_q, BLOCK):
            rows = start_m + tl.arange(0, BLOCK)
            q = _tile(Q + batch * stride_qb + head * stride_qh, rows, stride_qm, cols, seqlen_q)
            do = _tile(DOut + batch * stride_db + head * stride_dh, rows, stride_dm, cols, seqlen_q)
            lse = tl.load(Lse + first + rows, mask=rows < seqlen_q, other=0.0)
            delta = tl.load(Delta + first + rows, mask=rows < seqlen_q, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
            seen = (n[None, :] < seqlen_k) & (rows[:, None] < seqlen_q)
            if CAUSAL:
                seen = seen & (n[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
            p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
            dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
    at = tl.program_id(0).to(tl.int64) * seqlen_k + n
    in_k = n[:, None] < seqlen_k
    tl.store(DK + at[:, None] * HEAD_DIM + cols[None, :], (dk * sm_scale).to(DK.dtype.element_ty), mask=in_k)
    tl.store(DV + at[:, None] * HEAD_DIM + cols[None, :], dv.to(DV.dtype.element_ty), mask=in_k)


def launch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, contiguous. A dout of autograd may have any strides."""
    dout = dout.contiguous()
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = (dout.float() * out.float()).sum(-1).contiguous()
    arguments = (
        *(q.stride()[:3] + k.stride()[:3] + v.stride()[:3] + dout.stride()[:3]),
        *(heads, heads // heads_kv, seqlen_q, seqlen_k),
    )
    constants = {"CAUSAL": options.causal, "HEAD_DIM": head_dim, "BLOCK": BLOCK}
    if seqlen_q:
        grid = (batch * heads, triton.cdiv(seqlen_q, BLOCK))
        _gradients_of_queries[grid](q, k, v, dout, lse, delta, dq, options.sm_scale, *arguments, **constants)
    if seqlen_k:
        grid = (batch * heads_kv, triton.cdiv(seqlen_k, BLOCK))
        _gradients_of_keys[grid](q, k, v, dout, lse, delta, dk, dv, options.sm_scale, *arguments, **constants)
    return dq, dk, dv


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 in Triton with default specialisation: dq by blocks of rows, dk and dv by blocks of keys.

    Claims: none
    """
    return attend_by_launches(
        q, k, v, causal=causal, sm_scale=sm_scale, launch=launch_forward, gradients=launch_backward
    )
