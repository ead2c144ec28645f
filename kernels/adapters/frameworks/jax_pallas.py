"""JAX's Pallas kernel for GPUs, ``pallas.ops.gpu.attention.mha``. It has run on a GPU, and interpreted on a CPU."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
from torch import Tensor

from kernels.adapters.bridge import COPIED, foreign
from kernels.contract import AttentionKernel

_BLOCK = 32
_BLOCKS = BlockSizes(**{x.name: _BLOCK for x in fields(BlockSizes)})


@partial(jax.jit, static_argnames=("causal", "sm_scale"))
def _attention(*arrays: Any, causal: bool, sm_scale: float) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in arrays)
    is_interpreted = jax.default_backend() == "cpu"
    return mha(q, k, v, None, sm_scale, causal, _BLOCKS, interpret=is_interpreted).swapaxes(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    answer = partial(_attention, causal=causal, sm_scale=sm_scale)
    return foreign(partial(jax.vjp, answer), jax.dlpack.from_dlpack, q, k, v), None


# Lengths are multiples of a block, and "q_seq_len and kv_seq_len must be divided into the same number of blocks for the
# fused backward pass". Its tests have these head dims.
_CLAIMS = replace(COPIED, head_dims=(32, 64, 128), seqlen_multiple=_BLOCK, unequal_lengths=False)
KERNEL = AttentionKernel(
    name="jax_pallas", forward=_forward, capabilities=replace(_CLAIMS, grouped_heads=False)
)
