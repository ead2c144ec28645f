"""The providers that are timed: our kernels with their own backward, and PyTorch's through autograd."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels import registry
from tests.bench.shapes import Shape


class Calls(NamedTuple):
    """The calls of a provider that are timed at one shape; ``backward`` is None if it has none."""

    forward: Callable[[], Any]
    backward: Callable[[], Any] | None


Provider = Callable[[Shape, Tensor, Tensor, Tensor, Tensor], Calls]
"""A function from shape, q, k, v and dout to the calls. It raises any exception to refuse the shape."""


def ours(spec: str) -> Provider:
    """Return the provider of a kernel of the contract, with its default launch settings."""
    kernel = registry.load(spec)
    c = kernel.capabilities

    def calls(shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Calls:
        if "bfloat16" not in c.dtypes or shape.head_dim not in c.head_dims or shape.causal not in c.causal:
            raise NotImplementedError("not claimed")
        options = {"causal": shape.causal, "sm_scale": shape.head_dim**-0.5}
        forward = partial(kernel.forward, q, k, v, **options)
        if kernel.backward is None:
            return Calls(forward, None)
        return Calls(forward, partial(kernel.backward, dout, q, k, v, *forward(), **options))

    return calls


def through_autograd(attention: Callable[[Shape, Tensor, Tensor, Tensor], Tensor]) -> Provider:
    """Return the provider of a function of PyTorch."""

    def calls(shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Calls:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(shape, *inputs)

        def forward() -> Tensor:
            with torch.no_grad():
                return attention(shape, q, k, v)

        return Calls(forward, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))

    return calls


def _sdpa(backend: SDPBackend, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, enable_gqa=shape.heads_q != shape.heads_kv
        )


@cache
def _block_mask(shape: Shape, device: torch.device) -> Any:
    """Return the causal block mask of a shape, made only once, as in a model."""
    return create_block_mask(
        lambda b, h, i, j: j <= i, None, None, shape.seqlen_q, shape.seqlen_k, device=device
    )


@cache
def _compiled() -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(flex_attention, dynamic=False)


def _flex(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = _block_mask(shape, q.device) if shape.causal else None
    out: Tensor = _compiled()(q, k, v, block_mask=mask, enable_gqa=shape.heads_q != shape.heads_kv)
    return out


OTHERS: dict[str, Provider] = {
    "SDPA cuDNN": through_autograd(partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    "SDPA flash": through_autograd(partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    "SDPA efficient": through_autograd(partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION)),
    "FlexAttention": through_autograd(_flex),
}
"""The providers that ours are compared with, by name."""

SLOW = ("flash_v1", "ring")
"""Kernels of ours that a run times last at each shape."""


def in_order(specs: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the names of the providers, of ours and of others, in the order in which they are timed.

    The others come first, so that the ratio of each kernel of ours is known as soon as it is timed.
    """
    return [*others, *sorted(specs, key=SLOW.__contains__)]


def provider(name: str) -> Provider:
    """Return one of the others, or that of the kernel which ``name`` is the SPEC of. Raises SpecError."""
    return OTHERS[name] if name in OTHERS else ours(name)
