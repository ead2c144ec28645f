"""What makes NaN is told from what hides it, and both from what moves it."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from kernels.contract import Capabilities
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.duplicates import why_same
from tests.harness.bugs.failure import Failure, symptom
from tests.harness.law import law_named
from tests.harness.trial.trial import Trial
from tests.harness.verdict import Finding
from tests.unit.support import nan_toys
from tests.unit.support.nan_toys import CASE, NAN
from tests.unit.support.running import broken

NAN_TOYS = Path(nan_toys.__file__)


def finding_in(function: str, case: Case) -> Finding:
    return broken(f"{NAN_TOYS}:{function}", case, "special")[0]


@pytest.mark.parametrize(
    ("function", "of_nan"), [("spreads", ("made",)), ("hides", ("lost",)), ("moves", ("lost", "made"))]
)
def test_a_finding_says_what_became_of_nan(function: str, of_nan: tuple[str, ...]) -> None:
    assert finding_in(function, CASE).of_nan == of_nan


@pytest.mark.parametrize("tensor", ["q", "k"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_with_a_scale_of_0_the_product_of_q_and_k_may_be_left_out(tensor: str, value: str) -> None:
    spike = Spike(tensor, (0, 0, 1, 0), value)
    case = replace(CASE, sm_scale=0.0, spikes=(spike,))
    for function in ("leaves_out", "sound"):
        law_named("special")(Trial(load(f"{NAN_TOYS}:{function}"), case, "cpu", SAFETY))


def test_with_a_scale_of_0_nan_in_v_shows_all_the_same() -> None:
    case = replace(CASE, sm_scale=0.0, spikes=(replace(NAN, tensor="v"),))
    assert finding_in("hides", case).of_nan == ("lost",)


def test_numbers_that_are_only_wrong_say_nothing_of_nan() -> None:
    wrong = Finding(claim="so", kind="error", tensor="out", tensors=("out",))
    assert all(wrong.is_akin(finding_in(function, CASE)) for function in ("spreads", "hides"))


def bug(function: str) -> Bug:
    failure = Failure(
        "k.py:f", (), "special", CASE, kernel="k", finding=finding_in(function, CASE), environment={}
    )
    return Bug(failure, ("out",), (Condition("qk_values", ("set",), ("normal",)),))


def test_bugs_that_the_same_change_cures_are_two_if_one_makes_nan_and_the_other_hides_it() -> None:
    made, lost, moved = map(bug, ("spreads", "hides", "moves"))

    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return moved.failure.finding if case.spikes else None

    assert not why_same(made, lost, run, Capabilities())
    assert why_same(moved, lost, run, Capabilities())
    assert why_same(moved, made, run, Capabilities())
    assert not made.could_break(lost.failure.finding)
    of_no_keys = replace(
        made.failure.finding, tensor="lse", tensors=("lse", "out"), neginf=2, nan=0, posinf=0
    )
    hidden = replace(made, failure=replace(made.failure, finding=of_no_keys))
    assert hidden.could_break(lost.failure.finding)


def test_a_bug_of_finite_large_numbers_loses_no_nan() -> None:
    """Ordinary numbers in q and k mend both, but only by taking NaN out of them as well."""
    lost, large = finding_in("hides", CASE), replace(NAN, value=30.0)
    wrong = Finding(claim="so", kind="error", tensor="out", tensors=("out",))
    of_numbers = bug("hides")
    failure = replace(of_numbers.failure, finding=wrong, case=replace(CASE, spikes=(large,)))
    case = replace(CASE, spikes=(NAN, replace(large, index=(0, 0, 2, 0))))

    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return lost if NAN in case.spikes else wrong if case.spikes else None

    for known, is_explained in ((replace(of_numbers, failure=failure), False), (of_numbers, True)):
        outcome = explain_by_known_bugs(FailingExample("special", case, lost), [known], run, Capabilities())
        assert (outcome.rest is None) == is_explained


def test_ordinary_numbers_tell_whether_a_bug_is_in_a_case_of_zeros() -> None:
    """A group makes dv wrong, and so its NaN is lost. Of a dout of zeros, dv is 0 whatever the group makes of it.

    Where lse is judged, another bug of it is all that is told. With a large scale the group does not show.
    """
    lost = replace(finding_in("hides", CASE), tensor="dv", tensors=("dv",))
    wrong = Finding(claim="so", kind="error", tensor="dv", tensors=("dv",))
    case = Case(group=2, q_values="zeros", dout_values="zeros", spikes=(NAN,))
    failure = replace(
        bug("hides").failure, law="backward", case=replace(CASE, group=2, spikes=()), finding=wrong
    )
    of_group = Bug(failure, ("dv",), (Condition("group", (2,), (1,)),))

    def run(law: str, case: Case, ignored: frozenset[str], *, shows: bool = True) -> Finding | None:
        if law == "backward" and "lse" not in ignored:
            return replace(wrong, tensor="lse", tensors=("lse",))
        if case.group == 1 or (law == "backward" and (case.dout_values == "zeros" or case.sm_scale == 30.0)):
            return None
        return wrong if shows and law == "backward" else lost if case.spikes else None

    for shows, scale in product((True, False), (None, 30.0)):
        broken = FailingExample("special", replace(case, sm_scale=scale), lost)
        told = explain_by_known_bugs(broken, [of_group], partial(run, shows=shows), Capabilities())
        assert (told.rest is None) == shows


def test_what_writes_to_an_input_is_known_again_beside_nan() -> None:
    """Such a bug is told of a case only where numbers are wrong, so all tensors are judged to see whether it shows."""
    written = Finding(claim="dout is never written", kind="memory", tensor="dout")
    failure = Failure("k.py:f", (), "backward", Case(), kernel="k", finding=written, environment={})
    known = Bug(failure, ("dout",), (Condition("sm_scale", (None,), (1.0,)),))

    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return written if case.sm_scale is None and not ignored else None

    assert (
        explain_by_known_bugs(FailingExample("special", CASE, written), [known], run, Capabilities()).rest
        is None
    )


def test_hidden_nan_is_not_called_a_result_that_is_not_finite() -> None:
    assert [symptom(bug(x).failure) for x in ("spreads", "hides")] == ["out is not finite", "out hides NaN"]
