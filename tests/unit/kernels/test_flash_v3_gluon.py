"""``flash_v3_gluon`` chooses two consumers or three by the number of rows, and no result depends on it."""

import inspect

import pytest
import torch

from kernels.algorithms.flash_v3 import gluon as flash_v3_gluon
from kernels.registry import unavailable_reason
from strategies.lengths import MAX_SEQLEN
from tests.unit.support.calling import DEVICE


@pytest.mark.parametrize(
    ("head_dim", "rows", "consumers"),
    [
        (64, 1, 2),
        (64, 128, 2),
        (64, 129, 3),
        (64, 512, 2),
        (64, 1024, 2),
        (64, 2048, 3),
        (16, 512, 3),
        (24, 512, 2),
        (72, 2048, 2),
    ],
)
def test_consumers(head_dim: int, rows: int, consumers: int) -> None:
    assert flash_v3_gluon._shape(head_dim, rows).consumers == consumers


@pytest.mark.parametrize("head_dim", [32, 64])
def test_the_laws_draw_both(head_dim: int) -> None:
    chosen = [flash_v3_gluon._shape(head_dim, rows).consumers for rows in range(1, MAX_SEQLEN + 1)]
    assert min(chosen.count(2), chosen.count(3)) > len(chosen) / 4


@pytest.mark.skipif(
    unavailable_reason("flash_v3_gluon", DEVICE) is not None, reason="the kernel needs a Hopper GPU"
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [8, 32, 64])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (192, 192), (300, 77), (512, 640), (1030, 1030)])
def test_two_and_three_consumers_give_the_same_bits(
    rows: int, keys: int, head_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(2, 90, rows, head_dim, dtype=torch.bfloat16, device=DEVICE)
    k, v = torch.randn(2, 2, 30, keys, head_dim, dtype=torch.bfloat16, device=DEVICE)
    results = []
    for shape in (flash_v3_gluon._TWO, flash_v3_gluon._THREE):
        monkeypatch.setattr(flash_v3_gluon, "_shape", lambda *_, shape=shape: shape)
        launch = inspect.unwrap(flash_v3_gluon._prepared)(q, k, v, causal, 0.2)
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device=DEVICE)
        launch(lse, q, k, v, out)
        results.append((out, lse))
    for two, three in zip(*results, strict=True):
        assert torch.equal(two, three)
