"""Gradients by autograd, also of what only ``backward`` may differentiate."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.harness.trial.ways import differentiated


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).exp()


@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}, {"use_reentrant": False}])
def test_checkpoints_change_no_gradient(options: dict[str, Any]) -> None:
    """The third leaf has no part in the result, so that it has no gradient."""
    x, y, z = (torch.full((2, 3), value, requires_grad=True) for value in (0.5, 2.0, 1.0))
    out = checkpoint(product, x, y, **options) if options else product(x, y)
    assert isinstance(out, Tensor)
    dout = torch.arange(6.0).reshape(2, 3)
    for again in (True, False):
        dx, dy, dz = differentiated([2 * out], [x, y, z], [dout], again=again)
        expected = 2 * dout * torch.e
        assert dx is not None
        assert dy is not None
        assert torch.allclose(dx, expected * 2.0)
        assert torch.allclose(dy, expected * 0.5)
        assert dz is None
