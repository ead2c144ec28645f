"""Few of the drawn cases are idle: in an idle case, an answer of 0 would hold for a tensor."""

from collections import Counter
from dataclasses import replace

import pytest

from kernels.contract import Capabilities, flash_arithmetic
from kernels.registry import load
from strategies.cases import cases
from tests.harness.trial.judge import judge
from tests.harness.trial.trial import Trial
from tests.unit.support.drawing import sample

MOST_IDLE = 0.15
"""The largest share of idle cases among few. Of a thousand cases, less than a tenth are idle in dq, fewer in others."""
CASES = 80


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_few_cases_test_nothing(dtype: str) -> None:
    plain = load("tests.panel.flash:v2")
    declared = replace(plain.capabilities, designs=None, arithmetic=flash_arithmetic)
    kernel = replace(plain, capabilities=declared)
    idle: Counter[str] = Counter()
    for case in sample(cases(Capabilities(), dtype=dtype), CASES):
        trial = Trial(kernel, case, "cpu", 4.0)
        judge(trial, trial.problem, trial.gradients())
        idle.update(name for name, nothing in trial.idle.items() if nothing)
    assert {name for name, count in idle.items() if count > MOST_IDLE * CASES} == set()
