"""Sound attention in plain PyTorch, in steps that a test can replace to plant a bug.

``Sound`` is a tiled kernel with a backward of its own, which claims all that can be claimed; ``attention`` is
a plain function whose gradients come from autograd.
"""

from itertools import product

import torch
from torch import Tensor

from kernels.contract import AttentionKernel, Capabilities
from kernels.contract.parsing import PLAIN_FUNCTION
from reference.masks import blocks, visible

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
CLAIMS = Capabilities(
    head_dims=(16, 32, 40, 64),
    batch_invariant=True,
    launch={"block_n": (64, 16)},
)


class Sound:
    """FlashAttention-2 for one head at a time (Dao 2023, algorithms 1 and 2), by the kernel contract."""

    def kernel(self) -> AttentionKernel:
        """Return the kernel as the harness takes it, with its claims."""
        return AttentionKernel(
            name=type(self).__name__, forward=self.forward, backward=self.backward, capabilities=CLAIMS
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, block_n: int = 64
    ) -> Pair:
        """Return (out, lse) as in ``kernels.contract``."""
        self.check(q, k, v)
        group = q.shape[1] // k.shape[1]
        out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:3])
        for b, h in product(range(q.shape[0]), range(q.shape[1])):
            q_h, k_h, v_h = fresh(q[b, h]), fresh(k[b, h // group]), fresh(v[b, h // group])
            acc, m, l = self.softmax(q_h, k_h, v_h, q.dtype, causal, sm_scale, block_n)
            out[b, h] = self.normalised(acc, l)
            lse[b, h] = m + l.log()
        return out, lse

    def softmax(
        self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, causal: bool, sm_scale: float, block_n: int
    ) -> Triple:
        """Return, for one head, unnormalised out (seqlen_q, head_dim), maximum and sum (seqlen_q,), all float32."""
        acc = torch.zeros_like(q)
        m, l = torch.full((len(q),), -torch.inf), torch.zeros(len(q))
        for keys in blocks(len(k), block_n):
            s = scores(q, k, keys, causal, sm_scale)
            m_new = torch.maximum(m, s.amax(-1))
            shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
            alpha, p = torch.exp(m - shift), torch.exp(s - shift[:, None])
            l = l * alpha + p.sum(-1)
            acc = acc * alpha[:, None] + self.cast(p, dtype) @ v[keys]
            m = m_new
        return acc, m, l

    def cast(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """Return weights in the format in which they enter the product with v in the forward pass."""
        return p.to(dtype).float()

    def normalised(self, acc: Tensor, l: Tensor) -> Tensor:
        """Return out, divided by the sum of the weights."""
        return acc / l.masked_fill(l == 0.0, 1.0)[:, None]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        sm_scale: float,
        block_n: int = 64,
    ) -> Triple:
        """Return (dq, dk, dv) as in ``kernels.contract``."""
        group, dtype = q.shape[1] // k.shape[1], q.dtype
        dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(k.shape)
        for b, h in product(range(q.shape[0]), range(q.shape[1])):
            h_kv = h // group
            do, q_h, k_h, v_h, o = (
                fresh(x) for x in (dout[b, h], q[b, h], k[b, h_kv], v[b, h_kv], out[b, h])
            )
            delta = (do * o).sum(-1, keepdim=True)
            for keys in blocks(len(k_h), block_n):
                s = scores(q_h, k_h, keys, causal, sm_scale)
                p = torch.exp(s - lse[b, h, :, None]).masked_fill(s == -torch.inf, 0.0)
                ds = (p * (do @ v_h[keys].T - delta)).to(dtype).float()
                dv[b, h_kv, keys] += p.to(dtype).float().T @ do
                dq[b, h] += ds @ k_h[keys]
                dk[b, h_kv, keys] += ds.T @ q_h
        return (dq * sm_scale).to(dtype), (dk * sm_scale).to(dtype), dv.to(dtype)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise an exception for tensors that do not fit together, or are not claimed."""
        batch, heads_q, _, head_dim = q.shape
        if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, head_dim) or heads_q % k.shape[1]:
            raise ValueError(f"q, k, v: got shapes {q.shape}, {k.shape}, {v.shape} that do not fit together")
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"q, k, v: got dtypes {q.dtype}, {k.dtype}, {v.dtype}, expected the same")
        if str(q.dtype).removeprefix("torch.") not in CLAIMS.dtypes or head_dim not in CLAIMS.head_dims:
            raise NotImplementedError(f"q: got {q.dtype} with head_dim {head_dim}, which is not claimed")


def fresh(x: Tensor) -> Tensor:
    """Return a contiguous float32 copy, because for other strides BLAS may add in another order, with other bits."""
    return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def scores(q: Tensor, k: Tensor, keys: slice, causal: bool, sm_scale: float) -> Tensor:
    """Return scores (seqlen_q, keys), float32, -inf where a query does not see a key."""
    s = (q @ k[keys].T) * sm_scale
    seen = visible(len(q), len(k), causal, "bottom_right", q.device)
    return s if seen is None else s.masked_fill(~seen[:, keys], -torch.inf)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Pair:
    """Return (out, lse), computed by a softmax over whole rows."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    s = q.float() @ k.transpose(-1, -2) * sm_scale
    seen = visible(q.shape[2], k.shape[2], causal, "bottom_right", q.device)
    if seen is None:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    live = seen.any(-1, keepdim=True)
    lse = s.masked_fill(~seen, -torch.inf).logsumexp(-1).detach()
    # Rows that see no key are given finite scores, because the softmax of no score is NaN, with NaN gradients.
    p = torch.softmax(s.masked_fill(~seen & live, -torch.inf), -1)
    return torch.where(live, p @ v, 0.0).to(q.dtype), lse


def plain() -> AttentionKernel:
    """Return ``attention`` as a kernel with the claims of a plain function."""
    return AttentionKernel(name="plain", forward=attention, capabilities=PLAIN_FUNCTION)
