"""Gradients through a kernel that has a backward of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.contract import AttentionKernel


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: AttentionKernel, options: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q, k, v, **options)
        ctx.kernel, ctx.options = kernel, options
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # The backward of ``out.sum()`` hands down one element that is expanded with strides of 0.
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        return (None, None, *ctx.kernel.backward(dout, *ctx.saved_tensors, **ctx.options))


def attention(kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Return what ``kernel.forward`` returns, (out, lse), with out differentiable in q, k and v, and lse not.

    ``options`` are those of the kernel: causal, sm_scale and launch settings. A kernel without a backward of its own
    is called as it is; one that claims no gradients refuses tensors that require them with NotImplementedError.
    """
    if not kernel.capabilities.backward and torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.requires_grad:
                raise NotImplementedError(
                    f"{name}: it requires grad, and {kernel.name} has no backward: call it under torch.no_grad()"
                )
    if kernel.backward is None:
        return kernel.forward(q, k, v, **options)
    return _Attention.apply(kernel, options, q, k, v)
