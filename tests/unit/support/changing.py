"""Sound kernels that leave their process changed, one for each piece of its state, named as ``spelled`` says."""

import os
import random
import re
import warnings

import numpy as np
import torch

from tests.unit.support.toys import sound

CHANGES = {
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float16),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "PyTorch's random generator": lambda: torch.rand(3, dtype=torch.float32, device="cpu"),
    "Python's random generator": random.random,
    "NumPy's random generator": np.random.rand,
    "the precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "the precision of 16-bit products": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "the flags of cuDNN": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "the kernels that SDPA may use": lambda: torch.backends.cuda.enable_math_sdp(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.set_autocast_cache_enabled(False),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "the flushing of denormals": lambda: torch.set_flush_denormal(True),
    "the filters of warnings": lambda: warnings.simplefilter("ignore"),
    "environment variables": lambda: os.environ.update(FLASHPROOF_LEFT="1"),
    "the current folder": lambda: os.chdir("/"),
}
"""How each piece of state is changed."""


def spelled(piece: str) -> str:
    """Return the name of the kernel that changes a piece of state."""
    return re.sub(r"\W+", "_", piece).lower()


def leaving(change):
    """Return a sound kernel that makes a change at the end of each call."""

    def kernel(q, k, v, *, causal, sm_scale):
        returned = sound(q, k, v, causal=causal, sm_scale=sm_scale)
        change()
        return returned

    return kernel


globals().update({spelled(piece): leaving(change) for piece, change in CHANGES.items()})


LOGSUMEXP = torch.logsumexp


def replacing(q, k, v, *, causal, sm_scale):
    """Replaces a function of PyTorch by one that is wrong, as soon as it has called it itself."""
    torch.logsumexp = LOGSUMEXP
    returned = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    torch.logsumexp = lambda scores, dim: LOGSUMEXP(scores, dim) + 1.0  # type: ignore[assignment, misc]
    return returned
