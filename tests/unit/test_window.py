"""A sliding window: references and bounds leave out the keys beyond it, and the kernel sees exactly the others."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.flash_v2 import KERNEL, backward, forward
from reference import safe_softmax
from reference.bounds.exact import exact
from reference.bounds.forward import hull
from reference.masks import visible

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_visible(seqlen_q: int, seqlen_k: int, alignment: str, causal: bool) -> None:
    for window, rows in itertools.product((1, 2, 4, 100), (slice(None), slice(2, 4))):
        seen = expected(seqlen_q, seqlen_k, window, causal=causal, alignment=alignment)[rows]
        found = visible(seqlen_q, seqlen_k, causal, alignment, "cpu", rows, 2, window=window)
        assert found is not None
        assert torch.equal(found[0, 0], torch.cat([seen] * 2))


def test_the_window_is_hidden_beside_padded_keys() -> None:
    mask = torch.tensor([[True, False, True], [True, True, True]])
    found = visible(3, 3, True, "bottom_right", "cpu", key_padding_mask=mask, window=2)
    assert found is not None
    assert torch.equal(found[:, 0], expected(3, 3, 2, causal=True) & mask[:, None])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 100])
def test_the_hull_is_that_of_the_keys_that_a_row_sees(window: int, padded: bool) -> None:
    generator = torch.Generator().manual_seed(window)
    q, k, v = (torch.randn(2, 2, n, 8, generator=generator) for n in (11, 17, 17))
    mask = torch.rand(2, 17, generator=generator) < 0.6 if padded else None
    e = exact(q, k, v, causal=True, sm_scale=0.3, window=window, key_padding_mask=mask)
    seen = expected(11, 17, window, causal=True).expand(2, 1, 11, 17)
    seen = (seen if mask is None else seen & mask[:, None, None])[..., None]
    values = v.double()[:, :, None]
    rows = seen.any(-2)
    for found, value, extreme in zip(
        hull(e), (torch.inf, -torch.inf), (Tensor.amin, Tensor.amax), strict=True
    ):
        wanted = extreme(torch.where(seen, values, value), -2)
        assert torch.equal(torch.where(rows, found, 0.0), torch.where(rows, wanted, 0.0))


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
    generator = torch.Generator().manual_seed(window)
    q, k, v, dout = (
        torch.randn(2, heads, n, 16, generator=generator).to(DEVICE)
        for heads, n in ((4, 90), (2, 130), (2, 130), (4, 90))
    )
    options: dict[str, Any] = {"causal": causal, "sm_scale": 0.3, "window": window}
    out, lse = forward(q, k, v, **options)
    found = (out, lse, *backward(dout, q, k, v, out, lse, **options))
    wanted = (*safe_softmax.forward(q, k, v, **options), *safe_softmax.backward(dout, q, k, v, **options))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("window", "error"), [(-1, ValueError), (1.0, TypeError), (None, TypeError)])
def test_another_window_is_refused(window: Any, error: type[Exception]) -> None:
    q = torch.zeros(1, 1, 3, 16, device=DEVICE)
    with pytest.raises(error, match="window: got"):
        KERNEL.forward(q, q, q, causal=True, sm_scale=1.0, window=window)
