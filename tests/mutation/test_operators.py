"""What operators make of a kernel's source is caught, is equivalent, or is shown to the user as a diff."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from kernels import registry
from kernels.mutants.equivalent import EQUIVALENT
from kernels.mutants.mutant import KERNEL
from tests.harness.trial import Trial, run_kernel
from tests.mutation.campaign import Campaign
from tests.mutation.equivalence import Launch, judge, recorded_launches
from tests.mutation.summary import Operator, Recorder
from tests.mutation.targets import Target, absolute, targets
from tests.mutation.test_planted import QUICK

FEW = 40
"""Examples before it is asked whether a mutant is one: most are caught by then, and compiling takes seconds."""
MANY = 400
SAMPLE = 25
"""A quick profile takes every so manieth mutant."""
RECORDED = 24
"""Cases whose launches are compiled."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every mutant of the kernels asked for, flash_v2 unless told otherwise."""
    specs = metafunc.config.getoption("--kernel") or [KERNEL]
    try:
        found = [target for spec in specs for target in targets(spec)]
    except ValueError as e:
        raise pytest.UsageError(f"--kernel {e}") from None
    found = found[:: SAMPLE if settings().max_examples < QUICK else 1]
    metafunc.parametrize("target", [pytest.param(t, id=f"{t.spec}-{t.mutant.name}") for t in found])


def test_operator_mutant_is_caught(
    target: Target, campaign: Campaign, recorder: Recorder, pytestconfig: pytest.Config
) -> None:
    """Caught; or not a mutant at all; or argued, line by line, to be none."""
    spec = target.write(Path(pytestconfig.getoption("--report-dir")) / "mutants")
    name = target.mutant.name
    attempt = campaign.attempt(spec, 0, FEW)
    if attempt.finding is None:
        judgement = judge(
            absolute(registry.locate(target.spec)[0]),
            [{absolute(target.module): target.mutant.source}],
            launches(campaign),
        )[0]
        if judgement.verdict != "different":
            recorder.add(Operator(name=name, verdict=judgement.verdict, reason=judgement.detail))
            return
        if target.change in EQUIVALENT:
            recorder.add(Operator(name=name, verdict="argued", reason=EQUIVALENT[target.change]))
            return
        attempt = campaign.attempt(spec, 1, MANY)
    verdict = "killed" if attempt.finding else "invalid" if attempt.only_raised else "survived"
    recorder.add(
        Operator(
            name=name,
            verdict=verdict,
            law=attempt.law,
            examples=attempt.examples,
            seconds=attempt.seconds,
            diff=target.diff,
        )
    )


@cache
def launches(campaign: Campaign) -> list[Launch]:
    """What the kernel itself launches on some of the cases."""
    kernel = registry.load(campaign.info.spec, campaign.info.claims)
    with recorded_launches() as found:
        for law, case in campaign.schedule.examples(0, 4 * RECORDED):
            if law in ("forward", "backward"):
                trial = Trial(kernel, case, campaign.child.device, 0.0)
                run_kernel(kernel, trial.problem, trial.launch, backward=kernel.capabilities.backward)
    return found
