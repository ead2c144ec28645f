"""FlashAttention-2 in Triton as its tuners have it: configurations, heuristics, pruning, hooks, and sums by atomics.

``attention`` has two tuners, for the forward and for a backward in one kernel that adds dq. ``hooked`` has that
backward with hooks in each configuration in place of ``reset_to_zero``. ``split`` splits the keys of a row among the
programs of a tuned kernel, and merges the parts in another tuned kernel, whose parts follow from the configuration of
the first. ``divided`` divides out by the sums of its rows in a kernel of its own, in place.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


def left_by_pruning(configs: list[Any], named_args: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Leave out configurations with more rows than there are, but for those with the fewest."""
    rows = max(16, named_args["seqlen_q"])
    return [config for config in configs if config.kwargs["BLOCK_M"] <= rows]


def keys_are_even(args: dict[str, Any]) -> bool:
    """Whether the keys fill whole tiles."""
    return args["seqlen_k"] % args["BLOCK_N"] == 0


def rows_are_even(args: dict[str, Any]) -> bool:
    """Whether the rows fill whole tiles."""
    return args["seqlen_q"] % args["BLOCK_M"] == 0


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "STAGES": s}, num_warps=4, num_stages=s)
        for m in (16, 32, 64)
        for n in (16, 32)
        for s in (2, 3)
    ],
    key=["seqlen_q", "seqlen_k"],
    prune_configs_by={"early_config_prune": left_by_pruning},
)
@triton.heuristics({"EVEN_N": keys_are_even})
@triton.jit
def _forward(
    Q,
    K,
    V,
    Out,
    Lse,
    sm_scale,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    start = tl.program_id(1) * BLOCK_M
    head = tl.program_id(0).to(tl.int64)
    rows = start + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, HEAD_DIM)
    keys = tl.arange(0, BLOCK_N)
    of_rows = head * seqlen_q * HEAD_DIM + rows[:, None] * HEAD_DIM + cols[None, :]
    of_keys = (head // heads * (heads // group) + head % heads // group) * seqlen_k * HEAD_DIM
    q = tl.load(Q + of_rows, mask=rows[:, None] < seqlen_q, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(seqlen_k, tl.maximum(0, start + BLOCK_M + seqlen_k - seqlen_q))
    for start_n in range(0, end, BLOCK_N):
        n = start_n + keys
        at = of_keys + n[:, None] * HEAD_DIM + cols[None, :]
        if EVEN_N:
            k = tl.load(K + at)
            v = tl.load(V + at)
        else:
            k = tl.load(K + at, mask=n[:, None] < seqlen_k, other=0.0)
            v = tl.load(V + at, mask=n[:, None] < seqlen_k, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (sm_scale * 1.4426950408889634)
        if CAUSAL:
            s = tl.where(n[None, :] <= rows[:, None] + seqlen_k - seqlen_q, s, float("-inf"))
        if not EVEN_N:
            s = tl.where(n[None, :] < seqlen_k, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - shift[:, None])
        alpha = tl.exp2(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(Out + of_rows, out.to(Out.dtype.element_ty), mask=rows[:, None] < seqlen_q)
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453
    tl.store(Lse + head * seqlen_q + rows, lse, mask=rows < seqlen_q)


@triton.jit
def _gradients(
    Q,
    K,
    V,
    Dout,
    Lse,
    Delta,
    Dq,
    Dk,
    Dv,
    sm_scale,
    seqlen_q,
    seqlen_k,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_M: tl.constexpr,
):
    start_n = tl.program_id(1) * BLOCK_N
    head = tl.program_id(0).to(tl.int64)
    n = start_n + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, HEAD_DIM)
    of_keys = head * seqlen_k * HEAD_DIM + n[:, None] * HEAD_DIM + cols[None, :]
    k = tl.load(K + of_keys, mask=n[:, None] < seqlen_k, other=0.0)
    v = tl.load(V + of_keys, mask=n[:, None] < seqlen_k, other=0.0)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(0, start_n + seqlen_q - seqlen_k) // BLOCK_M * BLOCK_M
    for start in range(first, seqlen_q, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        of_rows = head * seqlen_q * HEAD_DIM + rows[:, None] * HEAD_DIM + cols[None, :]
        inside = rows < seqlen_q
        if EVEN_M:
            q = tl.load(Q + of_rows)
            dout = tl.load(Dout + of_rows)
        else:
            q = tl.load(Q + of_rows, mask=inside[:, None], other=0.0)
            dout = tl.load(Dout + of_rows, mask=inside[:, None], other=0.0)
        lse = tl.load(Lse + head * seqlen_q + rows, mask=inside, other=0.0)
        delta = tl.load(Delta + head * seqlen_q + rows, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        seen = n[None, :] < seqlen_k
        if CAUSAL:
            seen = seen & (n[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(p.to(q.dtype)), dout, input_precision="ieee")
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
        dq = tl.dot(ds, k, input_precision="ieee") * sm_scale
        tl.atomic_add(Dq + of_rows, dq, mask=inside[:, None])
    tl.store(Dk + of_keys, dk * sm_scale, mask=n[:, None] < seqlen_k)
    tl.store(Dv + of_keys, dv, mask=n[:, None] < seqlen_k)


def zero_dq(named_args: dict[str, Any]) -> None:
    """Set what a configuration adds to."""
    named_args["Dq"].zero_()


def tuned_by_reset() -> Any:
    """Return a tuner of the backward, below its heuristics."""
    configs = [triton.Config({"BLOCK_M": m, "BLOCK_N": n}) for m in (16, 32) for n in (16, 32)]
    tuner = triton.autotune(configs, key=["seqlen_q", "seqlen_k"], reset_to_zero=["Dq"])
    return tuner(triton.heuristics({"EVEN_M": rows_are_even})(_gradients))


def tuned_by_hooks() -> Any:
    """Return a tuner of the backward, above its heuristics: these do not know the configuration."""
    configs = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, pre_hook=zero_dq) for m in (16, 32) for n in (16, 32)
    ]
    tuner = triton.autotune(configs, key=["seqlen_q", "seqlen_k"])
    return triton.heuristics({"EVEN_M": lambda args: args["seqlen_q"] % 32 == 0})(tuner(_gradients))


_backward, _hooked_backward = tuned_by_reset(), tuned_by_hooks()


class _Attention(torch.autograd.Function):
    """Attention with the kernels above; ``backward_kernel`` is a tuner of the second."""

    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, backward_kernel):
        """Return out (batch, heads, seqlen_q, head_dim) and lse (batch, heads, seqlen_q)."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        batch, heads, seqlen_q, head_dim = q.shape
        group, seqlen_k = heads // k.shape[1], k.shape[2]
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        if out.numel():
            sizes = (heads, group, seqlen_q, seqlen_k, causal, head_dim)
            _forward[lambda meta: (batch * heads, triton.cdiv(seqlen_q, meta["BLOCK_M"]))](
                q, k, v, out, lse, sm_scale, *sizes
            )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = causal, sm_scale, group, backward_kernel
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        """Return the gradients of q, k and v, in their dtypes."""
        q, k, v, out, lse = ctx.saved_tensors
        causal, sm_scale, group, kernel = ctx.options
        batch, heads, seqlen_q, head_dim = q.shape
        seqlen_k, dout = k.shape[2], dout.contiguous()
        repeated = [x.repeat_interleave(group, 1).contiguous() for x in (k, v)]
        delta = (dout.float() * out.float()).sum(-1)
        dq = (torch.zeros if kernel is _backward else torch.empty)(
            q.shape, dtype=torch.float32, device=q.device
        )
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in repeated)
        if not dk.numel():
            dq.zero_()
        elif dq.numel():
            kernel[lambda meta: (batch * heads, triton.cdiv(seqlen_k, meta["BLOCK_N"]))](
                q, *repeated, dout, lse, delta, dq, dk, dv, sm_scale, seqlen_q, seqlen_k, causal, head_dim
            )
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return attention, whose dq is reset to zero by the tuner of the backward."""
    return _Attention.apply(q, k, v, causal, sm_scale, _backward)


def hooked(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return attention, whose dq is reset to zero by a hook of each configuration."""
    return _Attention.apply(q, k, v, causal, sm_scale, _hooked_backward)


@triton.autotune([triton.Config({"PART": n}) for n in (32, 64, 128)], key=["seqlen_k"])
@triton.jit
def _part(Q, K, V, Out, Sums, sm_scale, seqlen_k, parts, PART: tl.constexpr, HEAD_DIM: tl.constexpr):
    part, row = tl.program_id(1), tl.program_id(0).to(tl.int64)
    n = part * PART + tl.arange(0, PART)
    cols = tl.arange(0, HEAD_DIM)
    q = tl.load(Q + row * HEAD_DIM + cols).to(tl.float32)
    at = row * seqlen_k * HEAD_DIM + n[:, None] * HEAD_DIM + cols[None, :]
    k = tl.load(K + at, mask=n[:, None] < seqlen_k, other=0.0).to(tl.float32)
    v = tl.load(V + at, mask=n[:, None] < seqlen_k, other=0.0).to(tl.float32)
    s = tl.where(n < seqlen_k, tl.sum(q[None, :] * k, 1) * sm_scale, float("-inf"))
    largest = tl.max(s, 0)
    p = tl.exp(s - largest)
    tl.store(Out + (row * parts + part) * HEAD_DIM + cols, tl.sum(p[:, None] * v, 0))
    tl.store(Sums + (row * parts + part) * 2, largest)
    tl.store(Sums + (row * parts + part) * 2 + 1, tl.sum(p, 0))


@triton.autotune([triton.Config({"AT_ONCE": n}) for n in (1, 2, 4)], key=["parts"])
@triton.jit
def _merge(Parts, Sums, Out, parts, used, AT_ONCE: tl.constexpr, HEAD_DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, HEAD_DIM)
    largest, total = -float("inf"), 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(0, used, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        of_part = row * parts + part
        m = tl.load(Sums + of_part * 2, mask=part < used, other=-float("inf"))
        each = tl.load(Sums + of_part * 2 + 1, mask=part < used, other=0.0)
        new = tl.maximum(largest, tl.max(m, 0))
        weight, kept = tl.exp(m - new), tl.exp(largest - new)
        at = of_part[:, None] * HEAD_DIM + cols[None, :]
        of = tl.load(Parts + at, mask=part[:, None] < used, other=0.0)
        acc = acc * kept + tl.sum(of * weight[:, None], 0)
        total = total * kept + tl.sum(each * weight, 0)
        largest = new
    tl.store(Out + row * HEAD_DIM + cols, (acc / total).to(Out.dtype.element_ty))


def split(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Return attention of single queries, without a mask, by parts of their keys."""
    if causal or q.shape[2] != 1 or not k.shape[2]:
        raise NotImplementedError("expected one query, some keys and no causal mask")
    batch, heads, _, head_dim = q.shape
    seqlen_k = k.shape[2]
    k, v = (x.repeat_interleave(heads // k.shape[1], 1).contiguous() for x in (k, v))
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    rows, parts = batch * heads, triton.cdiv(seqlen_k, 16)
    partial = torch.empty(rows, parts, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(rows, parts, 2, dtype=torch.float32, device=q.device)
    _part[lambda meta: (rows, triton.cdiv(seqlen_k, meta["PART"]))](
        q, k, v, partial, sums, sm_scale, seqlen_k, parts, HEAD_DIM=head_dim
    )
    used = triton.cdiv(seqlen_k, _part.best_config.kwargs["PART"])
    _merge[(rows,)](partial, sums, out, parts, used, HEAD_DIM=head_dim)
    return out


def tuned_in_place(kernel: Any) -> Any:
    """Return a tuner of a kernel that writes what it reads."""
    configs = [triton.Config({"BLOCK": n}) for n in (64, 256)]
    return triton.autotune(configs, key=["size"], restore_value=["Out"])(kernel)


@tuned_in_place
@triton.jit
def _divide(Out, Sums, size, head_dim, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(Sums + at // head_dim, mask=at < size, other=1.0)
    tl.store(Out + at, tl.load(Out + at, mask=at < size, other=0.0) / total, mask=at < size)


def divided(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Return attention, whose weights are divided by their sums in the end, in place and by a tuned kernel."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    s = q.float() @ k.mT * sm_scale
    if causal:
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(k.shape[2] - q.shape[2]), -math.inf)
    largest = s.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min) if s.shape[3] else 0.0
    p = (s - largest).exp()
    out, sums = (p @ v).contiguous(), p.sum(-1)
    sums = torch.where(sums == 0, 1.0, sums).contiguous()
    size = out.numel()
    if size:
        _divide[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](out, sums, size, out.shape[3])
    return out.to(q.dtype)
