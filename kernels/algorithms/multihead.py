"""Multi-head attention as a module, over any registered kernel.

Vaswani et al., *Attention Is All You Need* (2017), section 3.2.2: queries, keys and values are projected for
each head, the heads attend side by side, and their outputs are projected back:

    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O + b^O
    head_i = Attention(Q W_i^Q + b_i^Q, K W_i^K + b_i^K, V W_i^V + b_i^V)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.common.autograd import attention
from kernels.common.validation import check_like
from kernels.registry import load


class KeyValueCache:
    """Projected keys and values of the positions so far, for decoding step by step.

    Memory for ``capacity`` positions is taken when the first ones come in; they decide batch, heads, head_dim,
    dtype and device.
    """

    def __init__(self, capacity: int) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"capacity: got {capacity!r}, expected an integer, 1 or more")
        self.capacity = capacity
        self.length = 0
        self._memory = torch.empty(0)

    def followed_by(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (batch, heads, positions, head_dim) and return all keys and values so far, as views.

        The new ones become part of the cache only when the caller adds them to ``length``.

        Raises ValueError for more positions than the capacity or shapes unlike the first, and RuntimeError for
        tensors that require gradients, because later steps overwrite the memory.
        """
        if k.requires_grad or v.requires_grad:
            raise RuntimeError("cache: it has no gradients, so call the module under torch.no_grad()")
        if k.ndim != 4:
            raise ValueError(f"k: got shape {tuple(k.shape)}, expected (batch, heads, positions, head_dim)")
        if self.length == 0:
            self._memory = k.new_empty((2, *k.shape[:2], self.capacity, k.shape[3]))
        keys, values = self._memory
        shape = (*keys.shape[:2], k.shape[2], keys.shape[3])
        for name, new in (("k", k), ("v", v)):
            check_like(name, new, "cache", keys, shape, keys.dtype)
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"cache: got {end} positions, expected at most its capacity, {self.capacity}")
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]


class MultiHeadAttention(nn.Module):
    """A ``torch.nn.MultiheadAttention`` with ``batch_first=True`` whose attention is one of our kernels.

    The parameters have torch's names, shapes and initial distribution, so either loads the other's state.

    Args:
        embed_dim: width of inputs and outputs, a multiple of num_heads.
        num_heads: heads, each ``embed_dim // num_heads`` wide.
        bias: add biases to the projections.
        kernel: a SPEC, as the registry takes it.
        device, dtype: of the parameters.
        launch: launch settings of the kernel.

    Raises ValueError for sizes that do not divide, TypeError for a bias that is no bool and for anything that is no
    launch setting of the kernel, NotImplementedError for a head_dim that it does not claim, and the errors of
    ``kernels.registry.load``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        *,
        kernel: str = "flash_v2",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **launch: Any,
    ) -> None:
        super().__init__()
        if type(num_heads) is not int or num_heads < 1:
            raise ValueError(f"num_heads: got {num_heads!r}, expected an integer, 1 or more")
        if type(embed_dim) is not int or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: got {embed_dim!r}, expected a positive multiple of num_heads, {num_heads}"
            )
        if not isinstance(bias, bool):  # where torch's module takes dropout
            raise TypeError(f"bias: got {bias!r}, expected True or False")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kernel, self.launch = load(kernel), launch
        if unknown := launch.keys() - self.kernel.capabilities.launch.keys():
            name = min(unknown)
            expected = ", ".join(self.kernel.capabilities.launch) or "no launch settings"
            raise TypeError(f"{name}: got {launch[name]!r}, expected of {kernel}: {expected}")
        if self.head_dim not in self.kernel.capabilities.head_dims:
            raise NotImplementedError(
                f"embed_dim: got {self.head_dim} for each head, which {kernel} doesn't claim"
            )
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, device=device, dtype=dtype))
        self.in_proj_bias = (
            nn.Parameter(torch.zeros(3 * embed_dim, device=device, dtype=dtype)) if bias else None
        )
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        causal: bool = False,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return attention of query (batch, seqlen_q, embed_dim) to key and value (batch, seqlen_k, embed_dim).

        key is query unless given, and value is key. ``causal`` aligns the last query with the last key. With a
        ``cache``, key and value are the positions that follow those in it, and are added to it; the queries see
        them all. Returns (batch, seqlen_q, embed_dim).

        Raises ValueError for shapes that do not fit together, and the errors of the kernel and the cache.
        """
        key = query if key is None else key
        value = key if value is None else value
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.ndim != 3 or tensor.shape[2] != self.embed_dim:
                expected = f"(batch, seqlen, {self.embed_dim})"
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {expected}")
        q, k, v = self._projected(query, key, value)
        if cache is not None:
            k, v = cache.followed_by(k, v)
        if (
            causal
            and q.shape[2] != k.shape[2]
            and self.kernel.capabilities.causal_alignment != "bottom_right"
        ):
            raise NotImplementedError(
                f"causal: got {q.shape[2]} queries and {k.shape[2]} keys, whose last {self.kernel.name} doesn't align"
            )
        out, _ = attention(self.kernel, q, k, v, causal=causal, sm_scale=self.head_dim**-0.5, **self.launch)
        if cache is not None:  # only now: a call that is refused leaves it as it was
            cache.length = k.shape[2]
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        """Return the projected q, k and v, (batch, num_heads, seqlen, head_dim) each."""
        weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = map(functional.linear, inputs, weights, biases)
        return [x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected]
