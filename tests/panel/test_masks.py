"""Masks of models: sound functions raise no alarm under their claims, and each planted bug of a mask is found."""

from collections.abc import Iterator

import pytest

from kernels.contract import Capabilities
from tests.harness.child import Child
from tests.harness.kernel_info import KernelInfo
from tests.harness.plan import chosen_device
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import Schedule, is_quick
from tests.panel.masks import CLAIMS
from tests.panel.planted_masks import COMBINED, PLANTED, Planted

FUNCTIONS = ("eager", "tiled")
EXAMPLES, QUICK_EXAMPLES = 1000, 60
"""Examples for each sound function."""
MOST_EXAMPLES = 3000
"""Within so many examples a planted bug is found."""
SEEDS = range(20)

Campaigns = dict[str, Campaign]


@pytest.fixture(scope="module")
def campaigns(pytestconfig: pytest.Config) -> Iterator[Campaigns]:
    """Yield a campaign for each sound function. They share a child and the cases of their claims."""
    child = Child(chosen_device(pytestconfig))
    infos = [KernelInfo.ask(child, f"tests.panel.masks:{name}", CLAIMS) for name in FUNCTIONS]
    schedule = Schedule(infos[0].capabilities, child.device.partition(":")[0])
    yield {info.spec.partition(":")[2]: Campaign(info, child, schedule) for info in infos}
    child.close()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sound_masks_raise_no_alarm(name: str, campaigns: Campaigns) -> None:
    campaign = campaigns[name]
    for law, case in campaign.schedule.examples(1, QUICK_EXAMPLES if is_quick() else EXAMPLES):
        finding = campaign.run(campaign.info.spec, law, case).finding
        assert finding is None, (law, case, finding)


@pytest.mark.parametrize("bug", [*PLANTED, *COMBINED], ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Planted, campaigns: Campaigns) -> None:
    campaign = campaigns[bug.function]
    for seed in SEEDS[:1] if is_quick() else SEEDS:
        attempt = campaign.attempt(f"tests.panel.planted_masks:{bug.name}", seed, MOST_EXAMPLES)
        assert attempt.finding is not None, f"not found with seed {seed} in {attempt.examples} examples"
        assert attempt.case is not None
        assert getattr(attempt.case, bug.part), f"found without {bug.part}: {attempt.case!r}"


def test_every_part_of_a_pattern_has_five_planted_bugs() -> None:
    parts = {claim.partition("=")[0] for claim in CLAIMS}
    assert parts == {name for name in vars(Capabilities()) if name in parts}
    assert all(sum(bug.part == part for bug in PLANTED) >= 5 for part in parts)
