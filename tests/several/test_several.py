"""Each planted bug shows on the case of its record, also alone, and never on cases that the record excludes."""

from collections.abc import Iterator
from dataclasses import fields

import pytest

from strategies.case import Case
from tests.harness.law import law_named
from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.session.plan import chosen_device
from tests.harness.verdict import Finding
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import Schedule, is_quick
from tests.several import KERNELS
from tests.several.bug import PlantedBug, Several

BUGS = [
    pytest.param(kernel, bug, id=f"{kernel.name}-{bug.name}")
    for kernel in KERNELS.values()
    for bug in kernel.bugs
]
EXAMPLES, QUICK_EXAMPLES = 200, 10
"""The number of examples drawn. Only those of basic laws are run: the others judge further cases that they make."""
SEED = 2


@pytest.fixture(scope="module")
def campaign(pytestconfig: pytest.Config) -> Iterator[Campaign]:
    """Yield a campaign with one child for all kernels, since all have the claims of a plain function."""
    child = Child(chosen_device(pytestconfig))
    info = KernelInfo.ask(child, next(iter(KERNELS.values())).base, ())
    yield Campaign(info, child, Schedule(info.capabilities, child.device.partition(":")[0]))
    child.close()


def shows(bug: PlantedBug, finding: Finding | None) -> bool:
    """Whether a finding may come from this bug."""
    if finding is None:
        return False
    return finding.kind == bug.kind if bug.ends_process else finding.tensor in bug.tensors


@pytest.mark.parametrize(("kernel", "bug"), BUGS)
def test_shows_on_its_case_alone(kernel: Several, bug: PlantedBug, campaign: Campaign) -> None:
    finding = campaign.run(kernel.only(bug), bug.law, bug.case).finding
    assert shows(bug, finding), finding


@pytest.mark.parametrize(("kernel", "bug"), BUGS)
def test_its_case_shows_nothing_without_it(kernel: Several, bug: PlantedBug, campaign: Campaign) -> None:
    sound = campaign.run(kernel.base, bug.law, bug.case)
    assert sound.status == "held", sound.finding
    left = campaign.run(kernel.without(bug), bug.law, bug.case).finding
    others = [other for other in kernel.bugs if other != bug and other.can_show(bug.case)]
    assert not shows(bug, left) or any(shows(other, left) for other in others), left


@pytest.mark.parametrize(("kernel", "bug"), BUGS)
def test_shows_only_where_its_record_says(kernel: Several, bug: PlantedBug, campaign: Campaign) -> None:
    assert bug.can_show(bug.case)
    for law, case in campaign.schedule.examples(SEED, QUICK_EXAMPLES if is_quick() else EXAMPLES):
        if not law_named(law).is_basic:
            continue
        finding = campaign.run(kernel.only(bug), law, case).finding
        if finding is None or campaign.run(kernel.base, law, case).finding is not None:
            continue
        assert shows(bug, finding), (law, case, finding)
        assert bug.can_show(case), (law, case, finding)


def test_kernels_are_many_and_their_bugs_several() -> None:
    assert len(KERNELS) >= 12
    assert all(2 <= len(kernel.bugs) <= 4 for kernel in KERNELS.values())
    assert sum(kernel.base.startswith("tests.panel.triton") for kernel in KERNELS.values()) >= 3


def test_fields_decide_whether_a_bug_shows() -> None:
    names = {field.name for field in fields(Case)}
    for kernel in KERNELS.values():
        for bug in kernel.bugs:
            assert set(bug.fields) <= names, (kernel.name, bug.name)
