"""Unwritten memory that decides about a tensor explains that NaN of an input is lost there, and nothing else."""

from dataclasses import replace
from typing import Any

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.duplicates import tells_more, why_same
from tests.harness.bugs.failure import OF_MEMORY, Explanation
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CAUSAL, LONG, bug

CASE = Case(seqlen_q=9, seqlen_k=65)
OF_NAN = replace(CASE, q_values="nan", seqlen_k=1)


def lost(tensor: str = "dq") -> Finding:
    return Finding(claim="NaN reaches it", kind="nonfinite", tensor=tensor, of_nan=("lost",))


def unwritten(*needs: Condition, sentence: str = OF_MEMORY) -> Bug:
    known = bug(CASE, ("dq",), *needs, law="backward")
    return replace(known, failure=replace(known.failure, explanation=Explanation((sentence,))))


def of_lost(tensor: str = "dq") -> Bug:
    known = bug(OF_NAN, (tensor,), law="special")
    return replace(known, failure=replace(known.failure, finding=lost(tensor)))


def fails(law: str, case: Case, *_: Any) -> Finding:
    return lost()


@pytest.mark.parametrize(
    ("known", "tensor", "is_explained"),
    [
        (unwritten(LONG), "dq", True),
        (unwritten(LONG), "dk", False),
        (unwritten(CAUSAL), "dq", False),
        (unwritten(LONG, sentence="it is so"), "dq", False),
    ],
)
def test_lost_nan_is_explained_where_the_bug_may_show_and_in_its_tensor(
    known: Bug, tensor: str, is_explained: bool
) -> None:
    broken = FailingExample("special", OF_NAN, lost(tensor))
    outcome = explain_by_known_bugs(broken, [known], fails, Capabilities())
    assert (outcome.rest is None) is is_explained
    for one, other in ((known, of_lost(tensor)), (of_lost(tensor), known)):
        assert bool(why_same(one, other, fails, Capabilities())) is is_explained


def test_other_numbers_are_not_explained_without_a_run() -> None:
    broken = FailingExample("backward", CASE, Finding(claim="so", kind="error", tensor="dq"))
    outcome = explain_by_known_bugs(broken, [unwritten(LONG)], lambda *_: broken.finding, Capabilities())
    assert outcome.rest is not None


def test_wrong_numbers_are_told_rather_than_lost_nan() -> None:
    assert tells_more(unwritten(), of_lost())
    assert not tells_more(of_lost(), unwritten())
    assert not tells_more(unwritten(), unwritten())
