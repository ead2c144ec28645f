"""Every planted bug is caught with every seed within a run's examples, and the kernel itself keeps every law."""

import math
from collections.abc import Callable

import pytest
from hypothesis import settings

from kernels.mutants import CATALOGUE
from kernels.mutants.mutant import Mutant
from tests.mutation.campaign import Campaign
from tests.mutation.diagnosis import CAUSES, judged
from tests.mutation.schedule import LAWS, SAMPLE, is_quick
from tests.mutation.score import Planted, Recorder, Sound
from tests.mutation.shrinking import Shrunk, shrink

SEEDS = 2
"""Seeds of a full run: as many as two cores have time for beside the operators."""
ALL_CAUGHT = 300
"""The number of examples within which 95 % of the bugs are caught."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over the bugs of the kernels of --kernel, by default over all, and over the seeds."""
    asked = metafunc.config.getoption("--kernel") or {mutant.kernel for mutant in CATALOGUE.values()}
    mutants = [mutant for mutant in CATALOGUE.values() if mutant.kernel in asked]
    if "mutant" in metafunc.fixturenames:
        sample = mutants[:: SAMPLE if is_quick() else 1]
        metafunc.parametrize("mutant", [pytest.param(m, id=m.name) for m in sample])
    if "kernel" in metafunc.fixturenames:
        metafunc.parametrize("kernel", list(dict.fromkeys(mutant.kernel for mutant in mutants)))
    metafunc.parametrize("seed", seeds(metafunc.config))


def seeds(config: pytest.Config) -> range:
    """Return the seeds asked for, or the default number of them."""
    return range(config.getoption("--seeds") or (1 if is_quick() else SEEDS))


def budget(campaign: Campaign) -> int:
    """Return how many examples one bug may take: those of a run in the default profile, or in this one if it has more.

    A bug that needs three options may take more examples than a quick profile has. A quick run saves time by trying
    fewer bugs; a bug that is caught takes no further examples.
    """
    examples = max(settings().max_examples, settings.get_profile("dev").max_examples)
    return examples * len(LAWS) * len(campaign.info.capabilities.dtypes)


def test_the_kernel_itself_keeps_every_law(
    kernel: str, seed: int, campaigns: Callable[[str], Campaign], record: Recorder
) -> None:
    """Nearly all bugs are caught within these examples, so on them the kernel without a bug must raise no alarm.

    A quick run tries one round, which asks every law: CI runs the laws themselves on the kernel beside it, and a bug
    counts as caught only if the kernel keeps the law on the very case.
    """
    campaign = campaigns(kernel)
    limit = len(campaign.schedule.round) if is_quick() else min(ALL_CAUGHT, budget(campaign))
    examples = campaign.schedule.examples(seed, limit)
    record(Sound(seed=seed, examples=sum(campaign.keeps(law, case) for law, case in examples)))


def test_planted_bug_is_caught(
    mutant: Mutant,
    seed: int,
    campaigns: Callable[[str], Campaign],
    record: Recorder,
    pytestconfig: pytest.Config,
) -> None:
    """The bug is caught with every seed. With ``--shrink``, its report must also hold what it promises."""
    campaign = campaigns(mutant.kernel)
    if mutant.device not in ("", campaign.schedule.device_type):
        pytest.skip(f"{mutant.name} shows on {mutant.device} alone")
    limit = budget(campaign)
    spec = f"kernels.mutants:{mutant.name}"
    attempt = campaign.attempt(spec, seed, limit, raises=mutant.raises)
    shrunk, diagnosis = Shrunk(math.nan, 0), ""
    if attempt.case is not None and pytestconfig.getoption("--shrink"):
        shrunk = shrink(campaign, spec, attempt.law, attempt.case.dtype, seed, limit)
        diagnosis = judged(shrunk.named, CAUSES[mutant.name])
    named = ", ".join(shrunk.named)
    record(
        Planted(
            name=mutant.name,
            seed=seed,
            law=attempt.law,
            examples=attempt.examples,
            seconds=attempt.seconds,
            shrink_seconds=shrunk.seconds,
            entries=shrunk.entries,
            named=named,
            diagnosis=diagnosis,
        )
    )
    assert attempt.case is not None, f"{mutant.what}: not caught in {limit} examples"
    assert diagnosis != "wrong", f"{mutant.what}: the report points to what it is not: {named}"
