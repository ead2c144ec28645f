"""What makes NaN is told from what hides it, and both from what moves it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.failure import Failure
from tests.harness.law import law_named
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Finding
from tests.unit.support.running import SubjectOf, finding_of
from tests.unit.support.toys import sound

NAN = Spike("q", (0, 0, 1, 0), "nan")
CASE = Case(seqlen_q=4, seqlen_k=3, dtype="float32", spikes=(NAN,))


def spreads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """NaN in one row of the first head makes the whole of out NaN."""
    out, lse = sound(q, k, v, **options)
    return torch.where(q[:, :1].isnan().any(), torch.nan, out), lse


def hides(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """NaN in out becomes 0."""
    out, lse = sound(q, k, v, **options)
    return out.nan_to_num(0.0), lse


def moves(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """NaN in a row of out moves to the next."""
    out, lse = sound(q, k, v, **options)
    return torch.where(out.isnan().roll(1, 2), torch.nan, out.nan_to_num(0.0)), lse


def spreads_and_hides(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """NaN in one row makes all rows of the first head NaN; in those of other heads it becomes 0."""
    (first, lse), (others, _) = (bug(q, k, v, **options) for bug in (spreads, hides))
    return torch.cat([first[:, :1], others[:, 1:]], 1), lse


def finding_in(function: str, case: Case) -> Finding:
    with pytest.raises(LawBroken) as broken:
        law_named("special")(Trial(load(f"{Path(__file__)}:{function}"), case, "cpu", SAFETY))
    return broken.value.finding


def bug(function: str) -> Bug:
    failure = Failure(
        "k.py:f", (), "special", CASE, kernel="k", finding=finding_in(function, CASE), environment={}
    )
    return Bug(failure, ("out",), (Condition("qk_values", ("set",), ("normal",)),))


@pytest.mark.usefixtures("unscripted")
def test_two_bugs_of_one_tensor_are_both_found(subject_of: SubjectOf) -> None:
    subject = subject_of("spreads_and_hides", toys=Path(__file__))
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
    subject = subject_of("moves", toys=Path(__file__))
    for case in (CASE, replace(CASE, seqlen_q=2), replace(CASE, heads_kv=3, seqlen_k=9)):
        subject.check(law_named("special"), case)
    assert len(subject.known.bugs) == 1
