"""What makes NaN is told from what hides it, and both from what moves it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategies.case import Case, Spike
from tests.harness.law import law_named
from tests.unit.support import nan_toys
from tests.unit.support.nan_toys import CASE, NAN
from tests.unit.support.running import SubjectOf, finding_of

NAN_TOYS = Path(nan_toys.__file__)


@pytest.mark.usefixtures("unscripted")
def test_two_bugs_of_one_tensor_are_both_found(subject_of: SubjectOf) -> None:
    subject = subject_of("spreads_and_hides", toys=NAN_TOYS)
    in_first = replace(CASE, heads_kv=2)
    in_second = replace(in_first, spikes=(replace(NAN, index=(0, 1, 1, 0)),))
    assert finding_of(subject, "special", in_first).of_nan == ("made",)
    assert finding_of(subject, "special", in_second).of_nan == ("lost",)


@pytest.mark.parametrize(
    ("name", "size", "is_wrong"),
    [
        ("fused", 1e10, False),
        ("nonfinite_where_scores_are_large", 1e10, False),  # what makes it so is not known then
        ("fused", 1e6, False),
        ("nonfinite_where_scores_are_large", 1e6, True),
    ],
)
def test_only_scores_that_float32_can_not_tell_apart_may_make_infinity(
    subject_of: SubjectOf, name: str, size: float, is_wrong: bool
) -> None:
    spikes = (Spike("q", (0, 0, 0, 0), -size), Spike("k", (0, 0, 0, 0), 3.0), Spike("k", (0, 0, 1, 0), 3.0))
    zeros: dict[str, Any] = {"q_values": "zeros", "k_values": "zeros"}
    case = Case(seqlen_k=2, dtype="bfloat16", sm_scale=0.7, spikes=spikes, **zeros)
    runs = subject_of(name).runs
    for law in ("forward", "identities", "composition", "invariance"):
        wrong = is_wrong and law in (
            "forward",
            "identities",
        )  # the others compare calls, which are all wrong alike
        assert runs.verdict(law, case).status == ("broken" if wrong else "held"), law


@pytest.mark.usefixtures("unscripted")
def test_nan_that_moves_is_one_bug(subject_of: SubjectOf) -> None:
    subject = subject_of("moves", toys=NAN_TOYS)
    for case in (CASE, replace(CASE, seqlen_q=2), replace(CASE, heads_kv=3, seqlen_k=9)):
        subject.check(law_named("special"), case)
    assert len(subject.known.bugs) == 1
