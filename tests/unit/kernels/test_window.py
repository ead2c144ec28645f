"""What a row sees: references and bounds leave out the keys beyond masks and windows, and so does the kernel."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.algorithms.flash_v2 import KERNEL, backward, forward
from reference.bounds.exact import exact
from reference.bounds.forward import hull
from reference.mask_pattern import MaskPattern
from reference.masks import visible
from strategies.case import Case
from tests.unit.support.calling import DEVICE, make, uphold

LENGTHS = [(5, 5), (3, 6), (6, 3), (4, 0), (0, 4), (1, 9)]


def expected(
    seqlen_q: int, seqlen_k: int, window: int, *, causal: bool, alignment: str = "bottom_right"
) -> Tensor:
    """(seqlen_q, seqlen_k) bool, entry by entry from the definition."""
    offset = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
    seen = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
        seen[i, j] = i + offset - j < window and (j <= i + offset or not causal)
    return seen


@pytest.mark.parametrize("rows", [slice(None), slice(2, 4), slice(0, 0)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_visible(seqlen_q: int, seqlen_k: int, alignment: str, causal: bool, rows: slice) -> None:
    for window, group in itertools.product((0, 1, 2, 4, 100), (1, 3)):
        seen = expected(seqlen_q, seqlen_k, window or 100, causal=causal, alignment=alignment)[rows]
        found = visible(
            seqlen_q, seqlen_k, causal, alignment, "cpu", rows, group, pattern=MaskPattern(window=window)
        )
        if found is None:
            assert not window
            assert seen.all()
        else:
            assert causal or window
            assert torch.equal(found.flatten(0, -2), torch.cat([seen] * group))


def test_the_window_is_hidden_beside_padded_keys() -> None:
    mask = torch.tensor([[True, False, True], [True, True, True]])
    found = visible(3, 3, True, "bottom_right", "cpu", key_padding_mask=mask, pattern=MaskPattern(window=2))
    assert found is not None
    assert torch.equal(found[:, 0], expected(3, 3, 2, causal=True) & mask[:, None])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [0, 1, 2, 3, 7, 8, 100])
def test_the_hull_is_that_of_the_keys_that_a_row_sees(window: int, padded: bool, causal: bool) -> None:
    q, k, v, _ = make(11, 17, 8, batch=3, heads_kv=2, seed=window)
    mask = torch.rand(3, 17, generator=torch.Generator().manual_seed(window)).to(DEVICE) < 0.6
    mask[1, 4:12], mask[2] = False, False
    given = mask if padded else torch.ones_like(mask)
    e = exact(
        q,
        k,
        v,
        causal=causal,
        sm_scale=0.3,
        pattern=MaskPattern(window=window),
        key_padding_mask=mask if padded else None,
    )
    seen = expected(11, 17, window or 100, causal=causal).to(DEVICE) & given[:, None, None]
    values, seen = v.double()[:, :, None], seen[..., None]
    rows = seen.any(-2)
    for found, value, extreme in zip(
        hull(e), (torch.inf, -torch.inf), (Tensor.amin, Tensor.amax), strict=True
    ):
        wanted = extreme(torch.where(seen, values, value), -2)
        assert torch.equal(torch.where(rows, found, 0.0), torch.where(rows, wanted, 0.0))
    sums = e.sum_seen(v.double()).expand(e.out.shape)
    torch.testing.assert_close(sums, torch.where(seen, values, 0.0).sum(-2))


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 128), (200, 97), (128, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_shows_the_window_in_both_passes(
    seqlen_q: int, seqlen_k: int, causal: bool, block_m: int
) -> None:
    """With q = 0 and v = 1 in one column for each key, out shows the mask; with dout likewise, dk and dv do."""
    q = torch.zeros(1, 1, seqlen_q, 128, device=DEVICE)
    k = torch.eye(seqlen_k, 128, device=DEVICE)[None, None]
    for window in (1, 33, 64, 1000):
        options: dict[str, Any] = {"causal": causal, "sm_scale": 1.0, "window": window, "block_m": block_m}
        seen = expected(seqlen_q, seqlen_k, window, causal=causal).to(DEVICE)
        out, lse = forward(q, k, k, **options)
        assert torch.equal(out[0, 0, :, :seqlen_k] != 0, seen)
        some = slice(None, 128)
        dout = torch.zeros_like(q)
        dout[0, 0, some] = torch.eye(min(seqlen_q, 128), 128, device=DEVICE)
        _, _, dv = backward(dout, q, k, k, out, lse, **options)
        assert torch.equal(dv[0, 0, :, : min(seqlen_q, 128)] != 0, seen[some].mT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 20, 100])
def test_gradients_are_those_of_the_reference(causal: bool, window: int) -> None:
    case = Case(batch=2, heads_kv=2, group=2, seqlen_q=90, seqlen_k=130, sm_scale=0.3)
    uphold("backward", KERNEL, replace(case, causal=causal, window=window))
