"""PyTorch's ``scaled_dot_product_attention``, one kernel for each of its backends.

Only the public interface is used: lse is not claimed, and gradients come from autograd. Biases, key padding and the
patterns of ``reference.mask_pattern`` are said by ``attn_mask``. The claims are those of PyTorch's documentation (2.9
to 2.13), quoted beside each restriction; where the docstring is silent, the warning that PyTorch gives as it refuses
is quoted. A claim that differs between devices is reduced to what holds on both: the CPU's flash kernel is asked for
less than it takes, which is float32, masks, and causal masks on unequal lengths too.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.adapters.pytorch import known_failures
from kernels.adapters.pytorch.masks import PATTERNS, blank, sees
from kernels.contract import BIASES, LAYOUTS, AttentionKernel, Capabilities, Launch, flash_arithmetic
from reference.arithmetic import FLOAT32, FP32_ROUNDOFF, Arithmetic
from reference.family import ALL_KEYS, Family, full_precision, in_tf32x3
from reference.mask_pattern import MaskPattern

_REFUSALS = ("No available kernel", "No viable backend", "overflows")
"""What the RuntimeError says if the one backend that is enabled does not take the inputs or strides."""


def _attn_mask(
    seqlen_q: int, k: Tensor, causal: bool, pattern: MaskPattern, attended: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Return an ``attn_mask`` for all masks and the bias of a call: a bool tensor or, with a bias, a float one.

    PyTorch raises an error if both attn_mask and is_causal are set, so the causal mask is part of this one. Returns
    None if there is no mask but a causal one, and no bias.
    """
    if attended is None and bias is None and not pattern:
        return None
    if bias is not None and attended is None and not causal and not pattern:
        return bias
    seqlen_k = k.shape[2]
    rows, keys = (torch.arange(n, device=k.device) for n in (seqlen_q, seqlen_k))
    seen = sees(causal, pattern, seqlen_q + seqlen_k, k.device)(rows[:, None], keys)
    seen = seen if attended is None else seen & attended[:, None, None, :]
    return seen if bias is None else bias.masked_fill(~seen, -torch.inf)


def _forward(
    backend: SDPBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    **pattern: int,
) -> tuple[Tensor, None]:
    mask = _attn_mask(q.shape[2], k, causal, MaskPattern(**pattern), key_padding_mask, bias)
    try:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q,
                blank(k, key_padding_mask),
                blank(v, key_padding_mask),
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=sm_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
    except RuntimeError as error:
        if not any(refusal in str(error) for refusal in _REFUSALS):
            raise
        raise NotImplementedError(f"{backend.name}: {error}") from error
    return out, None


def _rounding_to_nearest(dtype: str, device: str, launch: Launch) -> Arithmetic:
    """FlashAttention-2's arithmetic with PyTorch's casts, which round to nearest on the CPU as well."""
    return flash_arithmetic(dtype, "cuda", launch)


def _math_arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    """Float32 arithmetic throughout: a softmax over whole rows, whose derivative uses the probabilities it saved.

    "For math backend, all intermediates are kept in torch.float if inputs are in torch.half or
    torch.bfloat16."
    """
    return replace(
        _rounding_to_nearest(dtype, device, launch),
        weights=FLOAT32,
        # q and k are each multiplied by sqrt(|sm_scale|), rounded, and the product is rounded again.
        operand_rounding=2 * FP32_ROUNDOFF,
        normalised_first=True,
        tile_min=ALL_KEYS,
        tile_max=ALL_KEYS,
        delta="probabilities",
    )


_CPU_EXP_ERROR = 2.0**-13
"""Relative error of exp in the CPU's flash kernel for 16-bit inputs, rounded up from 1.07e-4.

That is the largest error over one octave of the cubic in ATen's ``Vectorized<float>::fexp_u20``, after
Malossi et al., "Fast Exponential Computation on SIMD Architectures" (2015).
"""


def _flash_arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    # Heads are repeated before the kernel runs, and gradients of the copies are summed after it.
    # Few queries against many keys are split over the keys.
    arithmetic = replace(
        _rounding_to_nearest(dtype, device, launch), dk_dv_per_head=True, partial_results=True
    )
    if device == "cpu":
        if dtype == "bfloat16":
            # Its products take subnormal operands as 0, as VDPBF16PS and AMX do whatever MXCSR says (Intel,
            # Architecture Instruction Set Extensions). That is far below any other error where operands are normal.
            arithmetic = replace(arithmetic, operand_rounding=FP32_ROUNDOFF)
        # The backward stores dk and dv after every 32 to 256 query rows, and dq after every 512 keys.
        return replace(arithmetic, exp_error=_CPU_EXP_ERROR, tile_max=512, dk_dv_rows=32, dq_keys=512)
    return arithmetic


def _efficient_arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    # Outputs wider than its tile are rescaled from block to block. The backward reads P back from the 16 bits that it
    # stored it in ("tmp [RF] <- (accum [RF] - Di [smem]) * attn_T.T [smem]"), and scales dS before its cast.
    arithmetic = replace(
        _rounding_to_nearest(dtype, device, launch),
        partial_results=True,
        ds_from_rounded_p=True,
        ds_scaled=True,
    )
    return in_tf32x3(arithmetic) if dtype == "float32" else arithmetic


@cache
def _closed_source(dtype: str) -> Family:
    return full_precision(_rounding_to_nearest(dtype, "cuda", {}))


def _cudnn_designs(dtype: str, device: str, launch: Launch) -> Family:
    """Any design of full precision: cuDNN's source is not public."""
    return _closed_source(dtype)


_PUBLIC = Capabilities(
    head_dims=tuple(range(1, 257)),
    # "The attention masking has the form of the upper left causal bias due to the alignment [...] when the
    # mask is a non-square matrix."
    causal_alignment="top_left",
    lse=False,
    # Claimed nowhere; with cuDNN, "this operator may select a nondeterministic algorithm".
    deterministic=(),
    # "If a fused implementation is not available, a warning will be raised with the reasons why": and an
    # error, where only that backend is enabled.
    may_refuse=True,
)

_MASKED: Mapping[str, Any] = {"key_padding": True, "bias": BIASES, **PATTERNS, "nonfinite": "seen"}
"""Claims of what ``attn_mask`` says, which is added to scores (https://github.com/pytorch/pytorch/issues/101967).

"A boolean mask where a value of True indicates that the element *should* take part in attention. A float mask of the
same type as query, key, value that is added to the attention score"; its shape is "broadcastable to the shape of
attention weights".
"""

_FUSED = replace(
    _PUBLIC,
    # "All fused kernels do not support zero seq_len_q or seq_len_kv."
    min_seqlen=1,
)

MATH = AttentionKernel(
    name="sdpa_math",
    forward=partial(_forward, SDPBackend.MATH),
    known_failures=known_failures.MATH,
    capabilities=replace(
        _PUBLIC,
        # "value (Tensor): Value tensor; shape (N, ..., H, S, Ev)", beside a query and a key of (..., E).
        v_head_dim=tuple(range(257)),
        # It answers more than is claimed here: float64, and any head_dim.
        validates=False,
        arithmetic=_math_arithmetic,
        **_MASKED,
    ),
)

FLASH = AttentionKernel(
    name="sdpa_flash",
    forward=partial(_forward, SDPBackend.FLASH_ATTENTION),
    known_failures=known_failures.FLASH,
    capabilities=replace(
        _FUSED,
        # On CUDA: "Expected query, key and value to all be of dtype: {Half, BFloat16}."
        dtypes=("float16", "bfloat16"),
        # On CUDA: "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k", and "Flash
        # Attention does not support non-null attn_mask."
        causal_unequal_lengths=False,
        arithmetic=_flash_arithmetic,
    ),
)

_MULTIPLES_OF_8 = tuple(range(8, 257, 8))
_UP_TO_128 = tuple(range(8, 129, 8))

# "Grouped Query Attention (GQA) is an experimental feature. It currently works only for Flash_attention and
# math kernel on CUDA tensor."
_UNGROUPED = replace(_FUSED, grouped_heads=False)

EFFICIENT = AttentionKernel(
    name="sdpa_efficient",
    forward=partial(_forward, SDPBackend.EFFICIENT_ATTENTION),
    known_failures=known_failures.EFFICIENT,
    capabilities=replace(
        _UNGROUPED,
        # "Mem efficient attention requires last dimension of inputs to be divisible by 8" (4 for float32).
        head_dims=_MULTIPLES_OF_8,
        v_head_dim=(0, *_MULTIPLES_OF_8),
        # "Mem efficient attention on sm80 or newer requires q, k, and v storage offsets * element_size to be
        # aligned to 16 bytes"; of strides, "query is not correctly aligned (strideM)".
        layouts=tuple(layout for layout in LAYOUTS if layout not in ("gap", "offset")),
        arithmetic=_efficient_arithmetic,
        **_MASKED,
    ),
)

CUDNN = AttentionKernel(
    name="sdpa_cudnn",
    forward=partial(_forward, SDPBackend.CUDNN_ATTENTION),
    known_failures=known_failures.CUDNN,
    capabilities=replace(
        _UNGROUPED,
        # "Expected query, key and value to all be of dtype: {Half, BFloat16}."
        dtypes=("float16", "bfloat16"),
        # "head_dim should be no more than 128", "head_dim should be a multiple of 8"
        head_dims=_UP_TO_128,
        v_head_dim=(0, *_UP_TO_128),
        # "cudnn SDPA does not support key/value sequence length 1."
        min_seqlen=2,
        # Not documented: without a batch element, None is returned.
        empty_batch=False,
        # A bool mask is no claim: what it hides is given -65504, so that a row without keys sees all of them
        # (https://github.com/pytorch/pytorch/issues/177842).
        bias=BIASES,
        designs=_cudnn_designs,
    ),
)

_CUDA_ONLY = "runs on CUDA only"

UNAVAILABLE: Mapping[tuple[str, str], str] = {
    (EFFICIENT.name, "cpu"): _CUDA_ONLY,
    (CUDNN.name, "cpu"): _CUDA_ONLY,
}
