"""The law ``calls``: a way of calling shows what is wrong with it alone, and sound functions answer or refuse it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

from kernels.contract import AttentionKernel
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from strategies.cases import Space
from strategies.design import Design
from strategies.ways import WAYS, ways_of
from tests.harness.law import law_named
from tests.harness.session.subject import AT_ONCE, drawn
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Finding
from tests.unit.support import called

CASE = Case(
    batch=2, seqlen_q=20, seqlen_k=33, group=2, dtype="bfloat16", causal=True, sinks=True, bias="full"
)
"""Its rows see 14 keys at least, so that no gradient is 0."""
SHORT = replace(CASE, seqlen_q=5, sinks=False, bias="none")
ONE_KEY = Case(seqlen_q=3, seqlen_k=1, dtype="float16")
MOST = 120
"""Cases within which a bug has to be found: as many as a default run has for the three dtypes."""
LAW = law_named("calls")


def judged(kernel: AttentionKernel, case: Case) -> tuple[Finding | None, Trial]:
    """Return what the law finds wrong, and the trial."""
    c = kernel.capabilities
    asked = replace(case, sinks=case.sinks and c.sinks, bias=case.bias if c.bias else "none")
    trial = Trial(kernel, asked, "cpu", SAFETY)
    try:
        LAW(trial)
    except LawBroken as broken:
        return broken.finding, trial
    return None, trial


def refused(trial: Trial) -> list[str]:
    """Return what was noted of the way of the case, without what the process has noted of kernels in earlier tests."""
    return [text for text, shows in trial.notes.items() if shows and "interpreter ran" not in text]


@pytest.mark.parametrize("way", ["none", *WAYS])
@pytest.mark.parametrize("name", called.SOUND)
def test_a_sound_function_keeps_the_law_in_every_way(name: str, way: str) -> None:
    kernel = called.kernel(name, called.SOUND[name])
    for case in (CASE, ONE_KEY):
        finding, _ = judged(kernel, replace(case, way=way))
        assert finding is None


@pytest.mark.parametrize("name", called.WRONG)
def test_its_way_shows_what_is_wrong_and_a_plain_call_does_not(name: str) -> None:
    wrong = called.WRONG[name]
    kernel = called.kernel(name, wrong.claims)
    assert judged(kernel, CASE)[0] is None
    found, _ = judged(called.kernel(name, wrong.claims), replace(CASE, way=wrong.way, seqlen_q=21))
    assert found
    assert found.claim.startswith("inputs that require grad get gradients") or " with " in found.claim


def test_what_is_refused_is_noted() -> None:
    kernel = called.kernel("one_backward", ())
    for way, told in (("second_backward", "a second backward of one forward"), ("vmap", "torch.func.vmap")):
        finding, trial = judged(kernel, replace(CASE, way=way))
        assert finding is None
        assert refused(trial) == [f"{told} is refused in {{}}"]
        assert trial.worst  # of the plain call in its place
    assert refused(judged(kernel, replace(CASE, way="k_alone"))[1]) == []


def test_less_precision_under_autocast_is_noted_unless_more_is_claimed() -> None:
    case = replace(CASE, way="autocast")
    finding, trial = judged(called.kernel("eager_under_autocast", ()), case)
    assert finding is None
    assert ["autocast" in text for text in refused(trial)] == [True]
    assert judged(called.kernel("eager_under_autocast", ("autocast=true",)), case)[0]


def test_gradients_lost_in_every_call_are_not_claimed() -> None:
    """A function without gradients claims none by that; one with gradients of long sequences alone has lost them."""
    case = replace(SHORT, way="q_alone")
    assert judged(called.kernel("never_trained", ()), case)[0] is None
    for way in ("q_alone", "another_thread", "none"):
        finding, _ = judged(called.kernel("long_rows_trained", ()), replace(case, way=way))
        assert finding
        assert finding.claim == "inputs that require grad get gradients, but in this call some get none"


def test_a_call_of_its_own_backward_has_no_ways_of_autograd() -> None:
    own = load("kernels.algorithms.flash_v2:KERNEL").capabilities
    assert ways_of(own) == ("inference_mode", "autocast", "vmap", "another_thread")
    plain = called.kernel("attention", ()).capabilities
    assert {"through_lse", "bias_alone", "sinks_too", "sinks_alone"}.isdisjoint(ways_of(plain))
    assert ways_of(called.kernel("attention", called.SOUND["attention"]).capabilities) == tuple(WAYS)


def cases_of(kernel: AttentionKernel, seed: int) -> Iterator[Case]:
    """Yield the cases of a run, as its design steers them."""
    claims = kernel.capabilities
    spaces = [Space(capabilities=claims, dtype=dtype, **LAW.draws) for dtype in claims.dtypes]
    design = Design(spaces, seed=seed)
    for number in range(MOST):
        chunk, place = divmod(number, AT_ONCE)
        for space in spaces:
            found = drawn(space.strategy(), f"{seed} {space.dtype} {chunk}")
            yield design.steered(number, found[place % len(found)])


def test_the_first_cases_have_every_way() -> None:
    kernel = called.kernel("attention", called.SOUND["attention"])
    assert {*WAYS} <= {case.way for case in islice(cases_of(kernel, 0), MOST // 2)}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", called.WRONG)
def test_a_run_draws_a_case_that_shows_it(name: str, seed: int) -> None:
    wrong = called.WRONG[name]
    kernel = called.kernel(name, wrong.claims)
    assert any(judged(kernel, case)[0] for case in islice(cases_of(kernel, seed), MOST))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", called.SOUND)
def test_no_case_of_a_run_accuses_a_sound_function(name: str, seed: int) -> None:
    kernel = called.kernel(name, called.SOUND[name])
    for case in islice(cases_of(kernel, seed), MOST):
        assert judged(kernel, case)[0] is None, case
