"""FlashAttention-2 in Triton, forward and backward.

Tri Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023),
sections 2.2 and 3.1. For each query i, over the keys j that it sees (all of them, or under a causal mask
those with ``j <= i + seqlen_k - seqlen_q``):

    s_ij = sm_scale * q_i . k_j                  P_ij = exp(s_ij - lse_i)
    lse_i = log sum_j exp(s_ij)                  out_i = sum_j P_ij v_j

and, given dout = dL/d out, with delta_i = sum_j P_ij (dout_i . v_j) = dout_i . out_i:

    dv_j = sum_i P_ij dout_i                     dS_ij = P_ij (dout_i . v_j - delta_i)
    dq_i = sm_scale * sum_j dS_ij k_j            dk_j = sm_scale * sum_i dS_ij q_i

Softmax and all sums are float32; P and dS are cast to the inputs' dtype before they enter a matrix product.
A query that sees no key, or only scores of -inf, has out 0, lse -inf and gradients 0. Exponentials are taken
in base 2, with sm_scale * log2 e in place of sm_scale.

With dropout (the first version's Algorithm 2; ``reference.dropout``) out is the sum of P_ij z_ij v_j, z being 0 or
1 / (1 - dropout_p), and z_ij multiplies dout_i . v_j and the P of dv as well; lse and delta do not change.

With a soft-cap, softcap * tanh(s_ij / softcap) takes the place of s_ij, and dS_ij is multiplied by the derivative
1 - tanh^2. With ALiBi, slope * |i + seqlen_k - seqlen_q - j| is subtracted after that, and a bias is added, whose
gradient is dS_ij before that derivative, summed over all that share an entry of the bias. With sinks, exp(sink) is one
further term of the sum in lse_i: the running maximum begins with the sink, and the running sum with 1.

With a sliding window, query i sees no key j with ``j <= i + seqlen_k - seqlen_q - window``. Tiles without a key that
is seen are skipped, and all others are masked (``tiles.seen_range``).

It is left open whether nan or inf behind the causal mask reaches a row that does not see it: 0 * nan is nan, so
it depends on the tiles. Memory outside of the tensors never reaches a row.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from kernels.algorithms.flash_v2.backward_pass import backward
from kernels.algorithms.flash_v2.forward_pass import forward
from kernels.algorithms.flash_v2.settings import LAUNCH, most_keys_in_a_tile
from kernels.common.autograd import attention
from kernels.common.validation import default_scale
from kernels.contract import BIASES, AttentionKernel, Capabilities, flash_arithmetic
from reference.arithmetic import TF32_TRUNCATED, Arithmetic

# Compile keys: dtype, PRECISION, HEAD_DIM (padded), MASK_COLS (head_dim is not HEAD_DIM), CAUSAL, DROPOUT, WINDOW,
# SOFTCAP, SUM_ROWS, whether alibi_slopes, bias and sinks are given, ALIGNED (every row starts at a multiple of 16
# bytes), whether tiles are loaded through descriptors, the BLOCK_* sizes, num_warps, num_stages and maxnreg. Nothing
# else compiles anew: see ``tiles.kernel``. Strides are declared 64-bit, and so is what they are multiplied with, as
# offsets may exceed 2^31 elements.
#
# A program owns a tile of BLOCK_OWN rows and accumulates its results over tiles of BLOCK_LOOP rows of the
# other side. It loops twice: without a mask over the tiles that are seen as a whole, and with one over those that an
# edge cuts.


def flash_v2(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, sm_scale: float | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call ``forward``, differentiable in q, k, v and bias through ``backward``; lse has no gradient.

    sm_scale is 1 / sqrt(head_dim) unless given; ``options`` are dropout_p, dropout_seed, window, softcap, alibi_slopes,
    bias, sinks and settings of ``LAUNCH``.
    """
    sm_scale = default_scale(q) if sm_scale is None else sm_scale
    out, lse = attention(KERNEL, q, k, v, causal=causal, sm_scale=sm_scale, **options)
    return out, lse


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    """Return FlashAttention-2's arithmetic, with tf32 products of float32 if ``precision`` says so."""
    keys = most_keys_in_a_tile(dtype, device, launch)
    arithmetic = replace(flash_arithmetic(dtype, device, launch), tile_max=keys)
    if dtype == "float32" and launch.get("precision") == "tf32":
        arithmetic = replace(arithmetic, weights=TF32_TRUNCATED, operand_rounding=2.0**-10)
    return arithmetic


KERNEL = AttentionKernel(
    name="flash_v2",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(
        head_dims=tuple(range(1, 257)),
        batch_invariant=True,
        dropout=(0.0, 0.1, 0.5),
        window=(0, 1, 2, 33, 100),
        softcap=(0.0, 2.0, 30.0),
        alibi_slopes=True,
        bias=BIASES,
        bias_gradient=True,
        sinks=True,
        launch=LAUNCH,
        arithmetic=_arithmetic,
    ),
)

WITHOUT_EXTRAS = replace(
    KERNEL.capabilities,
    dropout=(0.0,),
    window=(0,),
    softcap=(0.0,),
    alibi_slopes=False,
    bias=(),
    bias_gradient=False,
    sinks=False,
)
"""What is claimed by designs like this one that have nothing beyond q, k, v, a causal mask and sm_scale."""
