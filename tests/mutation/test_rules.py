"""The rules of other suites, each on its own inputs, judge the same planted bugs: ``--compare`` prints the table."""

from functools import cache

import pytest

from kernels.mutants import CATALOGUE, MUTANTS
from kernels.mutants.mutant import KERNEL
from tests.harness.session.plan import chosen_device
from tests.mutation.compare import RuleOutcome, outcomes
from tests.mutation.schedule import SAMPLE, is_quick
from tests.mutation.score import Compared, Recorder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over the kernel itself and planted bugs; a quick profile takes a sample of these.

    Bugs of dropout, of windows and of changed scores are left out, because these rules ask for none of them.
    """
    left_out = (*MUTANTS["dropout"], *MUTANTS["window"], *MUTANTS["scores"])
    asked = [mutant for mutant in CATALOGUE.values() if mutant not in left_out]
    bugs = [mutant.name for mutant in asked if mutant.kernel == KERNEL]
    metafunc.parametrize("name", (KERNEL, *bugs[:: SAMPLE if is_quick() else 1]))


def test_what_other_rules_say(name: str, record: Recorder, pytestconfig: pytest.Config) -> None:
    """Judge the kernel itself on all cases; judge a bug up to the first case that fails, leaving out false alarms."""
    device = chosen_device(pytestconfig)
    if name == KERNEL:
        for outcome in alarms(device):
            record(Compared(rule=outcome.rule, alarms=len(outcome.failed), tried=outcome.tried))
        return
    mutant = CATALOGUE[name]
    if mutant.device not in ("", device.partition(":")[0]):
        pytest.skip(f"{name} shows on {mutant.device} alone")
    without = {outcome.rule: outcome.failed for outcome in alarms(device)}
    for outcome in outcomes(f"kernels.mutants:{name}", device, without=without):
        record(Compared(rule=outcome.rule, bug=name, caught=bool(outcome.failed), tried=outcome.tried))


@cache
def alarms(device: str) -> list[RuleOutcome]:
    """Return what the rules say of the kernel without a bug: cases that it fails are false alarms."""
    return outcomes(KERNEL, device, every=True)
