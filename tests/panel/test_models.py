"""What models add to attention: sound functions raise no alarm under its claims, and each planted bug is found."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.harness.child import Child
from tests.harness.kernel_info import KernelInfo
from tests.harness.plan import chosen_device
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import Schedule, is_quick
from tests.panel import lse_forms, masks, planted_lse, planted_masks, planted_scores, scores
from tests.panel.planted import Planted

CLAIMS = {
    "tests.panel.masks:eager": masks.CLAIMS,
    "tests.panel.masks:tiled": masks.CLAIMS,
    "tests.panel.scores:eager": scores.CLAIMS,
    "tests.panel.scores:gated": scores.CLAIMS,
    "tests.panel.scores:tiled": scores.CLAIMS,
    "tests.panel.scores:everything": scores.ALL_CLAIMS,
    "tests.panel.scores:approximate": (scores.CLAIMS[0], scores.APPROXIMATE),
    "tests.panel.lse_forms:converted": lse_forms.BASE_2,
    "tests.panel.lse_forms:transposed": lse_forms.ROWS_FIRST,
    "tests.panel.lse_forms:tiled": lse_forms.BOTH,
}
"""The sound functions, with what they claim."""
EXAMPLES, QUICK_EXAMPLES = 1000, 60
"""Examples for each sound function."""
MOST_EXAMPLES = 3000
"""Within so many examples a planted bug is found."""
SEEDS = range(20)
PLANTED = (*planted_masks.PLANTED, *planted_scores.PLANTED, *planted_lse.PLANTED)
PLANTED_IN = {
    masks.__name__: planted_masks.__name__,
    scores.__name__: planted_scores.__name__,
    lse_forms.__name__: planted_lse.__name__,
}
"""The modules of the planted bugs, by the module that they are planted in."""
COMBINED = (*planted_masks.COMBINED, *planted_scores.COMBINED)

Campaigns = dict[str, Campaign]


@pytest.fixture(scope="module")
def campaigns(pytestconfig: pytest.Config) -> Iterator[Campaigns]:
    """Yield a campaign for each sound function; they share a child."""
    child = Child(chosen_device(pytestconfig))
    infos = {spec: KernelInfo.ask(child, spec, claims) for spec, claims in CLAIMS.items()}
    device_type = child.device.partition(":")[0]
    schedules = {CLAIMS[spec]: Schedule(info.capabilities, device_type) for spec, info in infos.items()}
    yield {spec: Campaign(info, child, schedules[CLAIMS[spec]]) for spec, info in infos.items()}
    child.close()


@pytest.mark.parametrize("spec", CLAIMS)
def test_sound_functions_raise_no_alarm(spec: str, campaigns: Campaigns) -> None:
    campaign = campaigns[spec]
    for law, case in campaign.schedule.examples(1, QUICK_EXAMPLES if is_quick() else EXAMPLES):
        finding = campaign.run(spec, law, case).finding
        assert finding is None, (law, case, finding)


def test_an_approximate_tanh_is_explained_by_its_claim(campaigns: Campaigns) -> None:
    campaign = campaigns["tests.panel.scores:approximate"]
    plain = replace(campaign, info=replace(campaign.info, claims=scores.CLAIMS[:1]))
    findings = [
        plain.run(plain.info.spec, law, case).finding for law, case in plain.schedule.examples(2, 100)
    ]
    alarms = [finding for finding in findings if finding is not None]
    assert alarms
    assert all(scores.APPROXIMATE in finding.explained_by for finding in alarms)


@pytest.mark.parametrize("bug", [*PLANTED, *COMBINED], ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Planted, campaigns: Campaigns) -> None:
    module = PLANTED_IN[bug.edit.module]
    campaign = campaigns[f"{bug.edit.module}:{bug.function}"]
    for seed in SEEDS[:1] if is_quick() else SEEDS:
        attempt = campaign.attempt(f"{module}:{bug.name}", seed, MOST_EXAMPLES)
        assert attempt.finding is not None, f"not found with seed {seed} in {attempt.examples} examples"
        assert attempt.case is not None
        assert bug.can_show(attempt.case), f"found without {bug.part}: {attempt.case!r}"


def test_every_claim_has_five_planted_bugs() -> None:
    claims = {claim.partition("=")[0] for claim in (*scores.ALL_CLAIMS, *lse_forms.BOTH)}
    assert all(sum(bug.part == claim for bug in PLANTED) >= 5 for claim in claims)
    assert len(COMBINED) >= 6
