"""Sound attention raises no alarm under its claims, and under the defaults none that those claims don't explain."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings

from kernels.registry import load
from reference import safe_softmax
from strategies.case import Case
from tests.harness.child import Child
from tests.harness.kernel_info import KernelInfo
from tests.harness.plan import chosen_device
from tests.harness.verdict import Finding
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import LAWS, Schedule, is_quick
from tests.panel import LESS_PRECISION, PANEL, Member

QUICK_EXAMPLES, QUICK_INTERPRETED = 40, 12
"""Of each member in a quick profile, and of each that is interpreted: what two cores do in half a minute."""
SEED = 1
"""Every member is tried on the same cases, which are drawn once."""
ROUNDINGS = {torch.float16: 2.0, torch.bfloat16: 2.0, torch.float32: 64.0}
"""The largest error of a member of full precision, in units of machine epsilon of a tensor's largest entry."""

EachClaim = Callable[[str, tuple[str, ...]], Campaign]
Alarm = tuple[str, Case, Finding]


@pytest.fixture(scope="module")
def campaigns(pytestconfig: pytest.Config) -> Iterator[EachClaim]:
    """A campaign for a SPEC and claims. All share a child, and what is drawn for the default claims."""
    child = Child(chosen_device(pytestconfig))
    schedules: list[Schedule] = []

    @cache
    def of(spec: str, claims: tuple[str, ...]) -> Campaign:
        info = KernelInfo.ask(child, spec, claims)
        if not schedules:
            schedules.append(Schedule(info.capabilities, child.device.partition(":")[0]))
        return Campaign(info, child, schedules[0])

    yield of
    child.close()


def budget(member: Member) -> int:
    """Examples: as many as a whole run of the properties draws for one kernel; a quick profile takes a sample."""
    if is_quick():
        return QUICK_INTERPRETED if member.is_triton else QUICK_EXAMPLES
    return settings().max_examples * len(LAWS) * len(ROUNDINGS)


def alarms(campaign: Campaign, limit: int) -> Iterator[Alarm]:
    """Laws and cases on which the suite finds something wrong, and what."""
    for law, case in campaign.schedule.examples(SEED, limit):
        finding = campaign.run(campaign.info.spec, law, case).finding
        if finding is not None:
            yield law, case, finding


def told(found: list[Alarm]) -> str:
    """How many alarms there are, and the first."""
    law, case, finding = found[0]
    where = f"{finding.tensor} {finding.kind} {finding.ratio}"
    return f"{len(found)} false alarms, the first by {law} ({where}): {finding.claim}\n{case!r}"


def names(claims: tuple[str, ...]) -> set[str]:
    """Claims without the dtype that they may be for."""
    return {claim.rpartition(":")[2] for claim in claims}


@pytest.mark.parametrize("member", PANEL, ids=lambda member: member.name)
def test_holds_under_its_claims(member: Member, campaigns: EachClaim) -> None:
    found = list(alarms(campaigns(member.spec, member.claims), budget(member)))
    assert not found, told(found)


@pytest.mark.parametrize("member", LESS_PRECISION, ids=lambda member: member.name)
def test_alarms_under_the_default_claims_name_its_own(member: Member, campaigns: EachClaim) -> None:
    found = alarms(campaigns(member.spec, ()), budget(member))
    unexplained = [alarm for alarm in found if not names(member.claims) & names(alarm[2].explained_by)]
    assert not unexplained, told(unexplained)


@pytest.mark.parametrize("member", PANEL, ids=lambda member: member.name)
def test_docstring_ends_with_its_claims(member: Member) -> None:
    module, _, function = member.spec.partition(":")
    docstring = getattr(__import__(module, fromlist=[function]), function).__doc__
    assert docstring.strip().splitlines()[-1].strip() == f"Claims: {', '.join(member.claims) or 'none'}"


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize(
    "member", [member for member in PANEL if not member.claims], ids=lambda member: member.name
)
def test_full_precision_is_a_few_roundings_from_float64(
    member: Member, dtype: torch.dtype, pytestconfig: pytest.Config
) -> None:
    """By a rule that no bound of the suite has a part in, on ordinary data of unequal lengths and grouped heads."""
    device = chosen_device(pytestconfig)
    generator = torch.Generator().manual_seed(SEED)
    shapes = [(1, 4, 40, 16), (1, 2, 90, 16), (1, 2, 90, 16), (1, 4, 40, 16)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.2}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = load(member.spec).forward(*leaves, **options)
    gradients = torch.autograd.grad(out, leaves, dout)
    right = (*safe_softmax.forward(q, k, v, **options), *safe_softmax.backward(dout, q, k, v, **options))
    for name, got, true in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), right, strict=True):
        if got is None:
            continue
        unit = torch.finfo(got.dtype).eps * float(true.abs().max())
        error = float((got.double() - true).abs().max()) / unit
        assert error < ROUNDINGS[got.dtype], f"{name}: {error:.3g} units off"
