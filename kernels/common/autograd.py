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
        ctx: Any,
        kernel: AttentionKernel,
        options: Mapping[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q, k, v, **_with(options, bias))
        ctx.kernel, ctx.options = kernel, options
        ctx.save_for_backward(q, k, v, out, lse, bias)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # The backward of ``out.sum()`` hands down one element that is expanded with strides of 0.
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        *stored, bias = ctx.saved_tensors
        found = ctx.kernel.backward(dout, *stored, **_with(ctx.options, bias))
        return (None, None, *found, None) if bias is None else (None, None, *found)


def _with(options: Mapping[str, Any], bias: Tensor | None) -> dict[str, Any]:
    """Return the options with the bias, of which autograd takes note only as an argument of its own."""
    return {**options} if bias is None else {**options, "bias": bias}


def attention(kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Return what ``kernel.forward`` returns, (out, lse), with out differentiable in q, k and v, and lse not.

    ``options`` are those of the kernel: causal, sm_scale and launch settings; with the claim ``bias_gradient``, out is
    differentiable in its ``bias`` too. A kernel without a backward of its own is called as it is; one that claims no
    gradients refuses tensors that require them with NotImplementedError.
    """
    if not kernel.capabilities.backward and torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.requires_grad:
                raise NotImplementedError(
                    f"{name}: it requires grad, and {kernel.name} has no backward: call it under torch.no_grad()"
                )
    if kernel.backward is None:
        return kernel.forward(q, k, v, **options)
    bias = options.pop("bias", None) if kernel.capabilities.bias_gradient else None
    return _Attention.apply(kernel, options, q, k, v, bias)
