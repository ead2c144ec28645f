"""What models add to attention: sound functions raise no alarm under its claims, and each planted bug is found."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.session.plan import chosen_device
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import Schedule, is_quick
from tests.panel import (
    appended,
    documents,
    eight_bit_inputs,
    eight_bits,
    latent,
    lse_forms,
    masks,
    nonfinite,
    packed,
    packed_paged,
    padded_rows,
    paged,
    planted_appended,
    planted_designs,
    planted_documents,
    planted_eight_bit_inputs,
    planted_eight_bits,
    planted_latent,
    planted_lse,
    planted_masks,
    planted_nonfinite,
    planted_packed,
    planted_packed_paged,
    planted_pages,
    planted_restricted,
    planted_rotated,
    planted_scores,
    planted_serving,
    planted_v_head_dim,
    restricted,
    rotated,
    scores,
    split_cache,
)

CLAIMS = {
    "tests.panel.appended:in_a_cache": appended.IN_A_CACHE,
    "tests.panel.appended:in_pages": appended.CLAIMS,
    "tests.panel.documents:eager": documents.CLAIMS,
    "tests.panel.eight_bit_inputs:dequantised": eight_bit_inputs.DEQUANTISED,
    "tests.panel.eight_bit_inputs:tiled": eight_bit_inputs.TILED,
    "tests.panel.eight_bits:of_heads": eight_bits.OF_HEADS,
    "tests.panel.eight_bits:of_pages": eight_bits.OF_PAGES,
    "tests.panel.latent:eager": latent.CLAIMS,
    "tests.panel.latent:tiled": latent.SERVED,
    "tests.panel.latent:of_one_buffer": latent.ONE_BUFFER,
    "tests.panel.masks:eager": masks.CLAIMS,
    "tests.panel.masks:tiled": masks.CLAIMS,
    "tests.panel.nonfinite:added_mask": (),
    "tests.panel.packed:eager": packed.CLAIMS,
    "tests.panel.packed:like_flash_attention_2": packed.LIKE_FLASH_ATTENTION_2,
    "tests.panel.packed:of_one_length": packed.OF_ONE_LENGTH,
    "tests.panel.packed_paged:eager": packed_paged.CLAIMS,
    "tests.panel.packed_paged:tiled": packed_paged.CLAIMS,
    "tests.panel.padded_rows:of_fixed_size": padded_rows.CLAIMS,
    "tests.panel.split_cache:in_own_parts": split_cache.CLAIMS,
    "tests.panel.paged:eager": paged.CLAIMS,
    "tests.panel.paged:tiled": paged.CLAIMS,
    "tests.panel.rotated:eager": rotated.CLAIMS,
    "tests.panel.rotated:fused": rotated.CLAIMS,
    "tests.panel.rotated:appended": rotated.APPENDED,
    "tests.panel.scores:eager": scores.CLAIMS,
    "tests.panel.scores:expanded": scores.CLAIMS,
    "tests.panel.scores:gated": scores.CLAIMS,
    "tests.panel.scores:tiled": scores.CLAIMS,
    "tests.panel.scores:everything": scores.ALL_CLAIMS,
    "tests.panel.scores:approximate": (scores.CLAIMS[0], scores.APPROXIMATE),
    "tests.panel.scores:in_16_bits": scores.IN_16_BITS,
    "tests.panel.narrow:head_by_head": ("rounded_group_sums=true",),
    "tests.panel.narrow:qk_prescaled": ("qk_prescaled=true",),
    **restricted.SOUND,
    **dict.fromkeys(planted_v_head_dim.SOUND, planted_v_head_dim.CLAIMS),
    "tests.panel.lse_forms:converted": lse_forms.BASE_2,
    "tests.panel.lse_forms:transposed": lse_forms.ROWS_FIRST,
    "tests.panel.lse_forms:tiled": lse_forms.BOTH,
    "tests.panel.lse_forms:infinite": lse_forms.OF_NO_KEYS,
}
"""The sound functions, with what they claim."""
EXAMPLES = 1000
"""Examples for each sound function; in a quick run these are one round, which asks every law."""
MOST_EXAMPLES = 3000
"""Within so many examples a planted bug is found."""
SEEDS = range(20)
SAMPLE = 2
"""A quick run takes every second planted bug of one claim, and all that need three at once."""
PLANTED = {
    f"{module.__name__}:{bug.name}": bug
    for module in (
        planted_masks,
        planted_scores,
        planted_v_head_dim,
        planted_lse,
        planted_nonfinite,
        planted_pages,
        planted_appended,
        planted_eight_bits,
        planted_eight_bit_inputs,
        planted_packed,
        planted_packed_paged,
        planted_serving,
        planted_rotated,
        planted_documents,
        planted_latent,
        planted_designs,
        planted_restricted,
    )
    for bug in module.PLANTED
}
COMBINED = {
    f"{module.__name__}:{bug.name}": bug
    for module in (planted_masks, planted_scores)
    for bug in module.COMBINED
}

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
    limit = len(campaign.schedule.round) if is_quick() else EXAMPLES
    for law, case in campaign.schedule.examples(1, limit):
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of planted bugs once for each of them; in a quick run, for a sample."""
    if "planted" in metafunc.fixturenames:
        metafunc.parametrize("planted", [*PLANTED, *COMBINED][:: SAMPLE if is_quick() else 1])


def test_a_planted_bug_is_found(planted: str, campaigns: Campaigns) -> None:
    bug = PLANTED.get(planted) or COMBINED[planted]
    campaign = campaigns[f"{bug.edit.module}:{bug.function}"]
    for seed in SEEDS[:1] if is_quick() else SEEDS:
        attempt = campaign.attempt(planted, seed, MOST_EXAMPLES)
        assert attempt.finding is not None, f"not found with seed {seed} in {attempt.examples} examples"
        assert attempt.case is not None
        assert bug.can_show(attempt.case), f"found without {bug.part}: {attempt.case!r}"


def test_every_claim_has_five_planted_bugs() -> None:
    claims = {
        claim.partition("=")[0]
        for claim in (
            *scores.ALL_CLAIMS,
            *planted_v_head_dim.CLAIMS,
            *lse_forms.BOTH,
            *lse_forms.OF_NO_KEYS,
            *nonfinite.STRICT,
            *eight_bits.OF_PAGES,
            *eight_bit_inputs.OF_INPUTS[:1],
            *rotated.APPENDED,
            *latent.CLAIMS[:1],
        )
    }
    assert all(sum(bug.part == claim for bug in PLANTED.values()) >= 5 for claim in claims)
    assert len(COMBINED) >= 6
