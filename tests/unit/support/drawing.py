"""What the tests of the strategies share: claims, and functions that draw cases and tensors."""

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.values import fill

CLAIMS = Capabilities(
    head_dims=(1, 8, 16, 32, 40, 64, 72, 96, 128),
    launch={"block_m": (16, 64), "block_n": (32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
)
Shape = tuple[int, int, int, int]
quick = settings(database=None, deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])


def sample(strategy: SearchStrategy[Case], number: int = 500) -> list[Case]:
    """Return the first cases that a strategy draws, the same in every run."""
    found: list[Case] = []

    @seed(0)
    @settings(quick, max_examples=number, phases=[Phase.generate])
    @given(strategy)
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


def drawn(family: str, shape: Shape, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    return fill(family, shape, dtype, torch.Generator().manual_seed(start))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
