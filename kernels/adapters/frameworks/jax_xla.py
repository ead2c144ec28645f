"""``jax.nn.dot_product_attention`` as XLA computes it, with gradients by ``jax.vjp``. It has run on a CPU and a GPU."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from torch import Tensor

from kernels.adapters.bridge import COPIED, foreign
from kernels.adapters.known_failures import JAX_XLA
from kernels.contract import AttentionKernel


@partial(jax.jit, static_argnames=("sm_scale", "causal", "implementation"))
def _attention(q: Any, k: Any, v: Any, *, sm_scale: float, causal: bool, implementation: str) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options = {"is_causal": causal, "implementation": implementation}
    return jax.nn.dot_product_attention(q, k, v, scale=sm_scale, **options).swapaxes(1, 2)


def forward(
    implementation: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, None]:
    """Return (out, None) of one of JAX's implementations."""

    def answer(*arrays: Any) -> Any:
        return _attention(*arrays, sm_scale=sm_scale, causal=causal, implementation=implementation)

    return foreign(partial(jax.vjp, answer), jax.dlpack.from_dlpack, q, k, v), None


KERNEL = AttentionKernel(
    name="jax_xla",
    forward=partial(forward, "xla"),
    known_failures=JAX_XLA,
    # "If true, causal attention will be applied": `_get_causal_mask` is jnp.tril of ones (T, S).
    capabilities=replace(COPIED, causal_alignment="top_left"),
)
