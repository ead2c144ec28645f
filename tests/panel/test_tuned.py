"""Bugs of tuners show with some configuration, in a case where the sound kernel is right with all of them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.contract.tuners import AT_WORK
from strategies.case import Case
from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.session.plan import chosen_device
from tests.panel.planted import Planted
from tests.panel.planted_tuned import PLANTED
from tests.unit.support.running import pytest_run, summary_in

CASES = {
    "attention": Case(seqlen_q=80, seqlen_k=80, causal=True, dtype="float32"),
    "hooked": Case(seqlen_q=80, seqlen_k=80, dtype="float32"),
    "split": Case(seqlen_q=1, seqlen_k=80, dtype="float32"),
    "divided": Case(seqlen_q=48, seqlen_k=80, dtype="float32"),
}
"""A case of each function, with several tiles of all configurations."""
LAWS = {name: "forward" if name in ("split", "divided") else "backward" for name in CASES}
SEVERAL = {
    "attention__diagonal_of_one_configuration": (
        "BLOCK_M 32, BLOCK_N 32, STAGES 3 of 12 configurations of _forward"
    ),
    "attention__dq_not_reset": "the tuner of _gradients at work",
}
"""What the conditions of some bugs have in a whole run, by their names."""


@pytest.fixture(scope="module")
def child(pytestconfig: pytest.Config) -> Iterator[Child]:
    """Yield a process that runs kernels."""
    with_kernels = Child(chosen_device(pytestconfig))
    yield with_kernels
    with_kernels.close()


def broken(child: Child, spec: str, function: str) -> set[str]:
    """Return the configurations, of all tuners of a kernel, with which the case of a function breaks a law.

    One tuner takes each of its configurations, while the others take their first. "" stands for these together.
    """
    launch = KernelInfo.ask(child, spec, ()).capabilities.launch
    simple, found = {name: values[0] for name, values in launch.items()}, set[str]()
    others = [(tuner, value) for tuner, values in launch.items() for value in values[1:]]
    for name, value in [("", ""), *others]:
        settings = {**simple, **({name: value} if name else {})}
        case = replace(CASES[function], launch=tuple(settings.items()))
        verdict = child.run(Run(spec, (), LAWS[function], case), lambda: None)
        assert all(taken == [settings[tuner]] for tuner, taken in verdict.launched.items())
        if verdict.status == "broken":
            found.add(value)
    return found


@pytest.mark.parametrize("function", CASES)
def test_sound_kernels_hold_with_every_configuration(child: Child, function: str) -> None:
    assert not broken(child, f"tests.panel.tuned:{function}", function)


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_bugs_show_with_some_configuration(child: Child, bug: Planted) -> None:
    found = broken(child, f"tests.panel.planted_tuned:{bug.name}", bug.function)
    assert found
    assert "" not in found
    is_of_trial_runs = bug.name.endswith(("not_reset", "not_restored"))
    assert (found == {AT_WORK}) is is_of_trial_runs


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEVERAL)
def test_a_run_names_the_configurations(name: str, tmp_path: Path) -> None:
    law = "backward" if "dq" in name else "forward"
    options = ("--kernel", f"tests.panel.planted_tuned:{name}", "-k", law, "--examples=60")
    pytest_run(tmp_path, *options, "--hypothesis-seed=1", status=pytest.ExitCode.TESTS_FAILED)
    (bug,) = summary_in(tmp_path)["bugs"]
    assert SEVERAL[name] in bug["facts"]["needs"]
