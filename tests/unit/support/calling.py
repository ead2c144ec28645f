"""What the tests of kernels share: the device, random tensors, and laws that are checked in this process."""

from typing import Any

import torch
from torch import Tensor

from kernels.contract import AttentionKernel, Capabilities
from reference import safe_softmax
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.law import law_named
from tests.harness.trial.trial import Trial

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(
    seqlen_q: int = 5,
    seqlen_k: int = 7,
    head_dim: int = 16,
    *,
    batch: int = 1,
    heads_kv: int = 1,
    group: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return standard normal q, k, v and dout, with ``group`` query heads for each of ``heads_kv``."""
    generator = torch.Generator().manual_seed(seed)
    shape_q = (batch, heads_kv * group, seqlen_q, head_dim)
    shape_k = (batch, heads_kv, seqlen_k, head_dim)
    shapes = (shape_q, shape_k, shape_k, shape_q)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes)
    return q, k, v, dout


def reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Return the exact gradients, whatever out and lse are."""
    return safe_softmax.backward(dout, q, k, v, **options)


REFERENCE = AttentionKernel(
    name="reference",
    forward=safe_softmax.forward,
    backward=reference_backward,
    capabilities=Capabilities(),
)
"""The float64 reference as a kernel."""


def uphold(law: str, kernel: AttentionKernel, case: Case) -> None:
    """Check a law on one case. Raises ``tests.harness.trial.trial.LawBroken``."""
    law_named(law)(Trial(kernel, case, DEVICE, SAFETY))
