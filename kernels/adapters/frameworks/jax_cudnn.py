"""``jax.nn.dot_product_attention`` as cuDNN computes it, with gradients by ``jax.vjp``. It has run on a GPU."""

from dataclasses import replace
from functools import partial

from kernels.adapters.bridge import COPIED, only_on_cuda
from kernels.adapters.frameworks.jax_xla import forward
from kernels.adapters.known_failures import JAX_CUDNN
from kernels.contract import AttentionKernel

KERNEL = AttentionKernel(
    name="jax_cudnn",
    forward=partial(forward, "cudnn"),
    known_failures=JAX_CUDNN,
    capabilities=replace(
        COPIED,
        # "`cudnn` supports only a subset of shapes/dtypes, and an exception will be thrown if its not supported":
        # check_is_flash_attention takes multiples of 8, up to 128 on every GPU.
        dtypes=("float16", "bfloat16"),
        head_dims=tuple(range(8, 129, 8)),
        # With gradients, version 0.11 refuses odd lengths: "Unsupported sequence length Q 49, KV 255."
        seqlen_multiple=2,
        # The mask is cuDNN's CAUSAL, for lengths that are equal in all of JAX's tests.
        causal_unequal_lengths=False,
    ),
)

UNAVAILABLE = only_on_cuda(KERNEL.name)
