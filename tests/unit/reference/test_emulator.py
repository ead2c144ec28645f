"""What the emulator rounds is rounded as its format says."""

import pytest
import torch

from reference.arithmetic import BFLOAT16, FLOAT16, FLOAT32, TF32, TF32_TRUNCATED, Format
from tests.unit.support.emulator import cast


@pytest.mark.parametrize("to", [FLOAT16, BFLOAT16, TF32, TF32_TRUNCATED, FLOAT32])
def test_casts_err_by_up_to_a_roundoff(to: Format) -> None:
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1
    relative = (cast(x, to).double() - x.double()) / x.double()
    # float32 is where x comes from: nothing to round. The others come within a tenth of what they may.
    if to is FLOAT32:
        assert (relative == 0).all()
        return
    assert 0.9 * to.roundoff <= relative.abs().max() <= to.roundoff
    assert (relative <= 0).all() == to.truncates
