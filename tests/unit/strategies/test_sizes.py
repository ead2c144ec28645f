"""The cases of one law in a default run have the sizes and options at which kernels of models are wrong."""

from collections.abc import Iterator
from itertools import islice

import pytest

from kernels.contract import AttentionKernel, Capabilities
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from strategies.cases import Space, without_huge_strides
from strategies.design import Design
from tests.harness.trial.trial import LawBroken, Trial
from tests.properties.test_forward import forward
from tests.unit.support import sizes
from tests.unit.support.drawing import sample

CLAIMS = without_huge_strides(Capabilities(backward=False, lse=False))
"""Without gigabytes that a failing trial may hold for a while, since other tests of the process need memory."""
NUMBER = 200
"""A default run has as many examples of a law at a dtype."""


def cases(seed: int) -> Iterator[Case]:
    spaces = [Space(capabilities=CLAIMS, dtype=dtype, **forward.draws) for dtype in CLAIMS.dtypes]
    design = Design(spaces, seed=seed)
    drawn = [sample(space.strategy(), NUMBER) for space in spaces]
    for place in range(NUMBER):
        for of_dtype in drawn:
            yield design.steered(place, of_dtype[place])


def is_broken(kernel: AttentionKernel, case: Case) -> bool:
    try:
        forward(Trial(kernel, case, "cpu", SAFETY))
    except LawBroken:
        return True
    return False


def function(name: str) -> AttentionKernel:
    return load(f"{sizes.__file__}:{name}", ("backward=false",))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["batch_of_four", "parts_of_keys", "group_by_shift", "fast_path"])
def test_is_found_within_a_default_run(name: str, seed: int) -> None:
    kernel = function(name)
    assert any(is_broken(kernel, case) for case in cases(seed))


@pytest.mark.parametrize("seed", range(3))
def test_rows_past_1024_are_tried_under_a_causal_mask(seed: int) -> None:
    kernel = function("positions_of_10_bits")
    assert any(case.causal and case.seqlen_q > sizes.FEW and is_broken(kernel, case) for case in cases(seed))


def test_a_sound_function_holds_in_all_of_them() -> None:
    kernel = function("sound")
    assert not any(is_broken(kernel, case) for case in islice(cases(0), 300))
