"""Some rows of a sequence see what they see among all, and sums over them are those of all if dout is 0 elsewhere."""

from dataclasses import replace

import pytest
import torch

from reference.arithmetic import FLOAT16, Arithmetic
from reference.bounds import backward_bounds, exact, forward_bounds
from reference.heads import fold
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.masks import visible

HALF = Arithmetic(weights=FLOAT16, output=FLOAT16)
ROWS = torch.tensor([0, 3, 7, 8])
KEYS = torch.tensor([1, 4, 11])


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("pattern", [NO_PATTERN, MaskPattern(window=3), MaskPattern(chunk=4, first_keys=1)])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_by_their_diagonals_see_what_they_see_among_all(
    causal: bool, pattern: MaskPattern, alignment: str
) -> None:
    seen = visible(9, 12, causal, alignment, "cpu", pattern=pattern)
    diagonals = ROWS + (12 - 9 if alignment == "bottom_right" else 0)
    some = visible(len(ROWS), 12, causal, alignment, "cpu", pattern=pattern, diagonals=diagonals)
    if seen is None:
        assert some is None
    else:
        assert some is not None
        assert torch.equal(some, seen[..., ROWS, :])


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_some_rows_and_keys_are_those_of_all(causal: bool) -> None:
    generator, a = torch.Generator().manual_seed(1), HALF
    q, dout = (torch.randn(1, 2, 9, 16, generator=generator).half() for _ in range(2))
    k, v = (torch.randn(1, 1, 12, 16, generator=generator).half() for _ in range(2))
    others = torch.ones(9, dtype=torch.bool)
    others[ROWS] = False
    dout[:, :, others] = 0.0
    every = exact(q, k, v, causal=causal, sm_scale=0.25)
    part = exact(q[:, :, ROWS], k, v, causal=causal, sm_scale=0.25, diagonals=ROWS + 3)

    def of_all(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (2, 9))[:, :, :, ROWS].flatten(2, 3)

    torch.testing.assert_close(part.out, of_all(every.out))  # products of other sizes may be summed otherwise
    whole, some = (
        backward_bounds(e, fold(x, 1).double(), a, forward=forward_bounds(e, a), keys=keys)
        for e, x, keys in ((every, dout, None), (part, dout[:, :, ROWS], KEYS))
    )
    torch.testing.assert_close(some.dq, of_all(whole.dq))
    for name in ("dk", "dv"):
        torch.testing.assert_close(getattr(some, name), getattr(whole, name)[:, :, KEYS])
        assert (
            getattr(some, f"{name}_bound") <= getattr(whole, f"{name}_bound")[:, :, KEYS] * (1 + 1e-9)
        ).all()


def test_a_part_allows_a_store_after_each_of_its_rows() -> None:
    stored = replace(HALF, dk_dv_rows=16)
    x = torch.randn(1, 1, 4, 16, generator=torch.Generator().manual_seed(2)).half()
    whole, part = (
        backward_bounds(e, x.double(), stored, forward=forward_bounds(e, stored)).dk_bound
        for e in (exact(x, x, x, causal=False, sm_scale=1.0, diagonals=d) for d in (None, ROWS))
    )
    assert (part > whole).all()
