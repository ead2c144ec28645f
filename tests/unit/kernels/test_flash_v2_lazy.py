"""``flash_v2_lazy``: when a row's reference moves. The laws judge its numbers."""

import math

import pytest
import torch

from kernels.algorithms import flash_v2
from kernels.algorithms.flash_v2_lazy import LAG, forward
from tests.unit.support.calling import DEVICE

BLOCK = 32


def tiles(*scores: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Make q of one row, and k with a tile of keys for each score, in base 2."""
    k = torch.tensor(scores).repeat_interleave(BLOCK)[None, None, :, None].expand(1, 1, -1, 16) / 16
    return torch.ones(1, 1, 1, 16, device=DEVICE), k.to(DEVICE)


@pytest.mark.parametrize(
    ("scores", "overflows"),
    [
        ((0.0, LAG.value), True),
        ((0.0, LAG.value + 0.25), False),
        ((0.0, LAG.value, LAG.value + 0.25), True),
        ((-5.0, 0.0, LAG.value), False),
        ((-100.0, LAG.value - 100.0), True),
    ],
)
def test_the_reference_stays_until_a_score_exceeds_it_by_more_than_the_lag(
    scores: tuple[float, ...], overflows: bool
) -> None:
    """Where v is near float32's largest number, a weight above 1 shows: the accumulator overflows."""
    q, k = tiles(*scores)
    v = torch.full_like(k, 2.0**117)
    out, lse = forward(q, k, v, causal=False, sm_scale=math.log(2), block_n=BLOCK)
    assert out.isinf().all() == overflows
    assert out.isfinite().all() != overflows
    # lse has no such limit.
    torch.testing.assert_close(
        lse, flash_v2.forward(q, k, v, causal=False, sm_scale=math.log(2), block_n=BLOCK)[1]
    )
