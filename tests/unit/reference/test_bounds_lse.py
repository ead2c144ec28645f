"""Gradients through lse and of sinks: expected ones are those of autograd in float64, and float32 keeps the bounds."""

import pytest
import torch
from torch import Tensor

from kernels.contract import flash_arithmetic
from reference.bounds import backward_bounds, exact, forward_bounds
from reference.heads import fold, unfold
from reference.score_rule import ScoreRule

HEADS_KV, SCALE = 2, 0.3
RULE = ScoreRule(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), softcap=3.0)
ARITHMETIC = flash_arithmetic("float32", "cpu", {})


def problem() -> tuple[Tensor, ...]:
    """Return q, k, v, dout and dlse, float32; some rows see no key under a causal mask."""
    chance = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 9, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 4, 9, 8), (2, 4, 9)]
    q, k, v, dout, dlse = (torch.randn(shape, generator=chance) for shape in shapes)
    dlse[:, :, :2] = 0.0
    return q, k, v, dout, dlse


def by_autograd(dtype: torch.dtype, dlse: Tensor | None) -> dict[str, Tensor]:
    """Return the gradients of q, k, v and the sinks by autograd, in a dtype."""
    q, k, v, dout, _ = problem()
    assert RULE.sinks is not None
    leaves = {
        name: x.to(dtype, copy=True).requires_grad_()
        for name, x in zip(("q", "k", "v", "sinks"), (q, k, v, RULE.sinks), strict=True)
    }
    keys, values = (leaves[name].repeat_interleave(2, 1) for name in ("k", "v"))
    scores = 3.0 * torch.tanh(leaves["q"] @ keys.mT * SCALE / 3.0)
    hidden = torch.arange(7) > torch.arange(9)[:, None] - 2
    whole = torch.cat([scores, leaves["sinks"].view(1, -1, 1, 1).expand(2, 4, 9, 1)], -1)
    whole = whole.masked_fill(
        torch.cat([hidden, hidden.all(-1, keepdim=True)], -1), -1e300 if dtype == torch.float64 else -1e30
    )
    p = torch.softmax(whole, -1)[..., :7].masked_fill(hidden, 0.0)
    ends = (p @ values * dout).sum()
    if dlse is not None:
        ends = ends + (torch.logsumexp(whole, -1) * dlse).sum()
    return dict(zip(leaves, torch.autograd.grad(ends, [*leaves.values()]), strict=True))


@pytest.mark.parametrize("has_dlse", [False, True])
def test_expected_gradients_are_those_of_autograd_and_float32_is_within_the_bounds(has_dlse: bool) -> None:
    q, k, v, dout, dlse = problem()
    given = dlse if has_dlse else None
    e = exact(q, k, v, causal=True, sm_scale=SCALE, alignment="bottom_right", rule=RULE)
    b = backward_bounds(
        e,
        fold(dout, HEADS_KV).double(),
        ARITHMETIC,
        out=e.out,
        lse=e.lse,
        dlse=None if given is None else fold(given, HEADS_KV).double(),
        of_sinks=True,
    )
    assert b.dsinks is not None
    assert b.dsinks_bound is not None
    expected = {"q": unfold(b.dq, 4), "k": b.dk, "v": b.dv, "sinks": b.dsinks}
    bounds = {"q": unfold(b.dq_bound, 4), "k": b.dk_bound, "v": b.dv_bound, "sinks": b.dsinks_bound}
    truth, rounded = by_autograd(torch.float64, given), by_autograd(torch.float32, given)
    for name, x in expected.items():
        torch.testing.assert_close(x, truth[name], rtol=1e-9, atol=1e-12)
        assert ((rounded[name].double() - x).abs() <= bounds[name]).all()
        assert (bounds[name] < 1e-3 * x.abs().amax()).all()


def test_the_gradient_of_no_sinks_is_refused() -> None:
    q, k, v, dout, _ = problem()
    e = exact(q, k, v, causal=True, sm_scale=SCALE, alignment="bottom_right")
    with pytest.raises(ValueError, match="expected a call with sinks"):
        backward_bounds(
            e, fold(dout, HEADS_KV).double(), ARITHMETIC, forward=forward_bounds(e, ARITHMETIC), of_sinks=True
        )
