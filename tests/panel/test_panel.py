"""Sound functions raise no alarm under their claims, and under the defaults only alarms that those claims explain."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings

from kernels.registry import load
from reference import safe_softmax
from reference.family import AND
from strategies.case import Case
from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.session.plan import chosen_device
from tests.harness.verdict import Finding
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import LAWS, ROUND, Schedule, is_quick
from tests.panel import LESS_PRECISION, PANEL, Member

QUICK_INTERPRETED = 12
"""Examples for each interpreted member in a quick profile; the others have one round, which asks every law."""
SEED = 1
"""The seed of the cases, which are drawn once and are the same for every member."""
ROUNDINGS = {torch.float16: 2.0, torch.bfloat16: 2.0, torch.float32: 64.0}
"""The largest error allowed a member of full precision, in machine epsilons times the largest entry of the tensor."""

EachClaim = Callable[[str, tuple[str, ...]], Campaign]
Alarm = tuple[str, Case, Finding]


@pytest.fixture(scope="module")
def campaigns(pytestconfig: pytest.Config) -> Iterator[EachClaim]:
    """Yield a function from a SPEC and claims to a campaign. Campaigns share a child and the default claims' cases."""
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
    """Return how many examples to try: as many as a full run draws for one kernel, or a sample in a quick profile."""
    if is_quick():
        return QUICK_INTERPRETED if member.is_triton else len(ROUND)
    return settings().max_examples * len(LAWS) * len(ROUNDINGS)


def alarms(campaign: Campaign, limit: int) -> Iterator[Alarm]:
    """Yield each law and case on which the suite finds something wrong, with what it finds."""
    for law, case in campaign.schedule.examples(SEED, limit):
        finding = campaign.run(campaign.info.spec, law, case).finding
        if finding is not None:
            yield law, case, finding


def told(found: list[Alarm]) -> str:
    """Say how many alarms there are, and describe the first."""
    law, case, finding = found[0]
    where = f"{finding.tensor} {finding.kind} {finding.ratio}"
    return f"{len(found)} false alarms, the first by {law} ({where}): {finding.claim}\n{case!r}"


def names(claims: tuple[str, ...]) -> set[str]:
    """Return the claims, those of pairs by themselves, without the dtype that they may be limited to."""
    return {part.rpartition(":")[2] for claim in claims for part in claim.split(AND)}


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
    """Errors are judged without any bound of the suite, on ordinary data with unequal lengths and grouped heads."""
    device = chosen_device(pytestconfig).partition(":")[0]  # Triton launches on the current device
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
        error = float((got.detach().double() - true).abs().max()) / unit
        assert error < ROUNDINGS[got.dtype], f"{name}: {error:.3g} units off"
