"""The kernel contract: what a kernel is called with, what it returns, and what it claims.

Shapes, everywhere: q (batch, heads_q, seqlen_q, head_dim); k (batch, heads_kv, seqlen_k, head_dim); v like k and
out like q, but for a head_dim of their own where that is claimed (``v_head_dim``); lse (batch, heads_q, seqlen_q)
float32, the natural log of the sum of exponentials of the scaled and masked scores, unless another base or order of
lse is claimed. Query head h reads key head ``h // (heads_q // heads_kv)``. Inputs are never written, except by calls
that append keys to a cache, which write to k and v (``ragged``).

Causal masks are aligned bottom-right (query i sees key j when ``j <= i + seqlen_k - seqlen_q``) unless the
kernel declares top-left. A query that sees no key has out 0, lse -inf, unless +inf is claimed, and gradients 0.
"""

from kernels.contract.admission import can_be_ragged, takes_scale
from kernels.contract.arithmetic import ArithmeticOf, FamilyOf, Launch, flash_arithmetic
from kernels.contract.capabilities import CLAIMS, Capabilities
from kernels.contract.kernel import ANY_LAW, AttentionKernel, KnownFailure
from kernels.contract.names import (
    BIASES,
    DTYPES,
    FP8_INPUTS,
    FP8_SCALES,
    GRADIENTS,
    LAYOUTS,
    OF_SINKS,
    OUTPUTS,
    POOLS,
    RAGGED_KEYWORDS,
    ROTARY,
    SMALLEST_NORMAL,
    THROUGH_LSE,
    WITH_GRADIENTS,
    WITH_KEY_PADDING,
    WITH_PACKED_QUERIES,
    WITH_PAGES,
    default_scale,
)

__all__ = [
    "AttentionKernel",
    "KnownFailure",
    "ANY_LAW",
    "Capabilities",
    "CLAIMS",
    "can_be_ragged",
    "takes_scale",
    "Launch",
    "ArithmeticOf",
    "FamilyOf",
    "flash_arithmetic",
    "BIASES",
    "DTYPES",
    "FP8_INPUTS",
    "FP8_SCALES",
    "GRADIENTS",
    "LAYOUTS",
    "OF_SINKS",
    "OUTPUTS",
    "POOLS",
    "RAGGED_KEYWORDS",
    "ROTARY",
    "SMALLEST_NORMAL",
    "THROUGH_LSE",
    "WITH_GRADIENTS",
    "WITH_KEY_PADDING",
    "WITH_PACKED_QUERIES",
    "WITH_PAGES",
    "default_scale",
]
