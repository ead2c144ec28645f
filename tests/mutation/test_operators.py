"""Every mutant that operators make of a kernel is caught, is equivalent, or is shown to the user as a diff."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kernels import registry
from kernels.mutants.mutant import KERNEL
from tests.harness.law import law_named
from tests.harness.trial.trial import Trial, run_kernel
from tests.mutation.campaign import Campaign
from tests.mutation.equivalence import Judgement, RecordedLaunch, judge, recorded_launches
from tests.mutation.equivalent import ARGUMENTS
from tests.mutation.schedule import is_quick
from tests.mutation.score import Operator, Recorder
from tests.mutation.targets import Target, absolute, targets

Judgements = Mapping[Target, Judgement]

EXAMPLES = 1000
"""A mutant has survived if it holds on this many examples."""
OPERATOR_SAMPLE = 150
"""A quick profile takes every 150th mutant."""
RECORDED = 48
"""The number of examples whose launches are compiled, to find equivalent mutants."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over every mutant of the kernels of --kernel, by default of flash_v2."""
    specs = metafunc.config.getoption("--kernel") or [KERNEL]
    try:
        found = [target for spec in specs for target in targets(spec)]
    except ValueError as e:
        raise pytest.UsageError(f"--kernel {e}") from None
    found = found[:: OPERATOR_SAMPLE if is_quick() else 1]
    metafunc.parametrize("target", [pytest.param(t, id=f"{t.spec}-{t.mutant.name}") for t in found])


@pytest.mark.nightly
def test_operator_mutant_is_caught(
    target: Target, judgements: Judgements, campaign: Campaign, record: Recorder, pytestconfig: pytest.Config
) -> None:
    """A mutant must be caught, unless it compiles to the same code or ``equivalent`` argues why it is not caught."""
    name, judgement = target.mutant.name, judgements[target]
    if judgement.verdict != "different":
        record(Operator(name=name, verdict=judgement.verdict, reason=judgement.detail))
        return
    for argument in ARGUMENTS:
        if target.change in argument.changes and argument.device in ("", campaign.schedule.device_type):
            verdict, reason = argument.verdict, argument.reason
            record(Operator(name=name, verdict=verdict, reason=reason, diff=target.diff))
            return
    spec = target.write(Path(pytestconfig.getoption("--report-dir")) / "mutants")
    attempt = campaign.attempt(spec, 0, EXAMPLES)
    verdict = "killed" if attempt.finding else "invalid" if attempt.only_raised else "survived"
    record(
        Operator(
            name=name,
            verdict=verdict,
            law=attempt.law,
            examples=attempt.examples,
            seconds=attempt.seconds,
            diff=target.diff,
        )
    )
    if verdict == "survived":
        pytest.fail(
            f"{attempt.examples} examples do not tell {spec} from {target.spec}:\n{target.diff}",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def judgements(request: pytest.FixtureRequest, campaign: Campaign) -> Judgements:
    """Judge all mutants of this run at once, so that the originals are compiled only once, and only when needed."""
    items = (item for item in request.session.items if "judgements" in getattr(item, "fixturenames", ()))
    found: list[Target] = [item.callspec.params["target"] for item in items]  # type: ignore[attr-defined]
    entry = absolute(registry.locate(campaign.info.spec)[0])
    judged = judge(entry, [{absolute(t.module): t.mutant.source} for t in found], launches(campaign))
    return dict(zip(found, judged, strict=True))


def launches(campaign: Campaign) -> list[RecordedLaunch]:
    """Return what the kernel itself launches on some of the cases."""
    kernel = registry.load(campaign.info.spec, campaign.info.claims)
    with recorded_launches() as found:
        for law, case in campaign.schedule.examples(0, RECORDED):
            if law_named(law).is_basic:
                trial = Trial(kernel, case, campaign.child.device, 0.0)
                run_kernel(kernel, trial.problem, trial.launch, backward=bool(kernel.capabilities.backward))
    return found
