"""Every planted bug is caught, with every seed, at the budget of the profile; the kernel itself keeps every law."""

import math

import pytest
from hypothesis import settings

from kernels.mutants import CATALOGUE
from kernels.mutants.mutant import KERNEL
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import LAWS, is_quick
from tests.mutation.shrinking import shrink
from tests.mutation.summary import Planted, Recorder

SEEDS = 5
SAMPLE = 3
"""A quick profile takes every so manieth bug."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All of the catalogue; nothing where another kernel was asked for."""
    names = list(CATALOGUE) if (metafunc.config.getoption("--kernel") or [KERNEL]) == [KERNEL] else []
    metafunc.parametrize("name", names[:: SAMPLE if is_quick() else 1])


def test_planted_bug_is_caught(
    name: str, campaign: Campaign, recorder: Recorder, pytestconfig: pytest.Config
) -> None:
    """Each seed has the examples that a whole run of the properties draws at this profile, in another order."""
    mutant = CATALOGUE[name]
    if mutant.device not in ("", campaign.schedule.device_type):
        pytest.skip(f"{name} shows on {mutant.device} alone")
    limit = settings().max_examples * len(LAWS) * len(campaign.schedule.capabilities.dtypes)
    spec = f"kernels.mutants:{name}"
    missed = []
    for seed in range(pytestconfig.getoption("--seeds") or (1 if is_quick() else SEEDS)):
        attempt = campaign.attempt(spec, seed, limit, raises=mutant.raises)
        shrinking = math.nan
        if attempt.case is None:
            missed.append(seed)
        elif pytestconfig.getoption("--shrink"):
            shrinking = shrink(campaign, spec, attempt.law, attempt.case.dtype, seed)
        recorder.add(
            Planted(
                name=name,
                seed=seed,
                law=attempt.law,
                examples=attempt.examples,
                seconds=attempt.seconds,
                shrink_seconds=shrinking,
            )
        )
    assert not missed, f"{mutant.what}: not caught in {limit} examples with seeds {missed}"
