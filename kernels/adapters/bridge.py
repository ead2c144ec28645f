"""What adapters of public kernels share: claims, calls of other frameworks' functions by DLPack, packed sequences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.adapters.known_failures import PREFILLS
from kernels.adapters.pytorch.sdpa import FLASH
from kernels.contract import AttentionKernel, Launch
from kernels.contract.parsing import PLAIN_FUNCTION, plain_function_designs
from reference.family import Family

CLAIMS = replace(PLAIN_FUNCTION, min_seqlen=1, empty_batch=False, lse=False)
"""Claims of a kernel whose documentation is not quoted: no tensor is empty, and any design may be its own.

An adapter replaces what its package promises otherwise.
"""

COPIED = replace(CLAIMS, layouts=("contiguous",))
"""Claims of an adapter that gives its kernel copies of q, k and v, so that it never sees how they lie in memory."""


def _sdpa_designs(dtype: str, device: str, launch: Launch) -> Family:
    """Return every design of full precision, and on a CPU that of PyTorch's flash kernel, which rounds more often."""
    family = plain_function_designs(dtype, device, launch)
    flash = FLASH.capabilities.arithmetic(dtype, device, launch)
    return replace(family, bases=(*family.bases, flash)) if device == "cpu" else family


SDPA = replace(CLAIMS, designs=_sdpa_designs)
"""Claims of a function that calls PyTorch's ``scaled_dot_product_attention``, whose kernel PyTorch chooses."""

NEEDS_CUDA = "needs a CUDA GPU"


def only_on_cuda(name: str) -> dict[tuple[str, str], str]:
    """Return the ``UNAVAILABLE`` of an adapter whose kernel runs on no CPU."""
    return {(name, "cpu"): NEEDS_CUDA}


def only_on_cpu(name: str) -> dict[tuple[str, str], str]:
    """Return the ``UNAVAILABLE`` of an adapter whose kernel runs on no GPU, as far as the adapter goes."""
    return {(name, "cuda"): "runs on a CPU here"}


class _Foreign(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, vjp: Callable[..., Any], receive: Callable[[Tensor], Any], *tensors: Tensor
    ) -> Tensor:
        out, ctx.pull = vjp(*(receive(_copy(x)) for x in tensors))
        ctx.receive = receive
        return torch.from_dlpack(out).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.pull(ctx.receive(_copy(dout)))
        return (None, None, *(torch.from_dlpack(x).clone() for x in gradients))


def _copy(x: Tensor) -> Tensor:
    """Return a contiguous copy: a framework whose arrays never change may read it late, or again."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def foreign(vjp: Callable[..., Any], receive: Callable[[Tensor], Any], *tensors: Tensor) -> Tensor:
    """Return what another framework's function makes of tensors, as a tensor that can be differentiated.

    Args:
        vjp: returns for arrays (out, pull), where ``pull(dout)`` returns the gradient of each array, as ``jax.vjp``
            does for a function.
        receive: makes an array of a tensor, by DLPack.
        tensors: the arguments, each of which is copied.
    """
    result: Tensor = _Foreign.apply(vjp, receive, *tensors)
    return result


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return q, k and v as rows (tokens, heads, head_dim), and what functions for packed sequences are told besides.

    That is ``cu_seqlens_q``, ``cu_seqlens_k`` and the largest lengths. Where the call has none, each element of the
    batch is a sequence.
    """
    rows = tuple(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if cu_seqlens_q is not None:
        return rows, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    lengths = (q.shape[2], k.shape[2])
    starts = (torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * n for n in lengths)
    return rows, (*starts, *lengths)


def prefill(name: str, attend: Callable[..., object], scale: str) -> AttentionKernel:
    """Return the kernel of a ``context_attention_fwd``, of which several servers of language models have one each.

    Args:
        name: the kernel's name.
        attend: the function, which writes its result to its fourth argument.
        scale: the keyword by which it takes ``sm_scale``.
    """

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, **sequences: Any
    ) -> tuple[Tensor, None]:
        rows, (starts, _, longest, _) = packed(q, k, v, **sequences)
        out = torch.empty_like(rows[0])
        attend(*rows, out, starts[:-1], starts.diff(), longest, causal, **{scale: sm_scale})
        return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2), None

    # "q, k, v: [b * s, head, head_dim]", of which one tensor of lengths and one of starts tell.
    claims = replace(CLAIMS, unequal_lengths=False, ragged=("packed",), backward=False)
    return AttentionKernel(name=name, forward=forward, known_failures=PREFILLS, capabilities=claims)
