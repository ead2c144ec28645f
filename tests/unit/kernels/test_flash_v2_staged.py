"""``flash_v2_staged``: what it refuses, and that it takes every length that its tiles divide."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.algorithms import flash_v2
from kernels.algorithms.flash_v2_staged import KERNEL, forward
from tests.unit.support.calling import make


@pytest.mark.parametrize(
    ("tensors", "launch", "message"),
    [
        (make(127, 128, dtype=torch.float16), {}, "q: got seqlen_q 127, expected a multiple of 64, the rows"),
        (
            make(64, 64, dtype=torch.float16),
            {"block_m": 128},
            "q: got seqlen_q 64, expected a multiple of 128, the rows",
        ),
        (make(128, 96, dtype=torch.float16), {}, "k: got seqlen_k 96, expected a multiple of 64, the rows"),
        (make(128, 256), {"causal": True}, "k: got seqlen_k 256, expected q's 128 under a causal mask"),
        (make(128, 128, 24), {}, r"q: got head_dim 24, expected one of \(16, 32, 64, 128, 256\)"),
    ],
)
def test_refuses(tensors: tuple[Tensor, ...], launch: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        forward(*tensors[:3], **{"causal": False, "sm_scale": 1.0, **launch})


@pytest.mark.parametrize(("block_m", "block_n"), [(64, 32), (64, 64), (128, 32), (128, 64)])
def test_lengths_that_the_tiles_divide_are_taken(block_m: int, block_n: int) -> None:
    tensors = make(3 * block_m, 3 * block_n)[:3]
    options: dict[str, Any] = {"causal": False, "sm_scale": 0.3, "block_m": block_m, "block_n": block_n}
    for actual, expected in zip(
        forward(*tensors, **options), flash_v2.forward(*tensors, **options), strict=True
    ):
        assert torch.equal(actual, expected)


def test_claimed_lengths_fit_every_launch_setting() -> None:
    claimed = KERNEL.capabilities
    assert all(
        claimed.seqlen_multiple % block == 0
        for name in ("block_m", "block_n")
        for block in claimed.launch[name]
    )
