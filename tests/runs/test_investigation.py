"""What the investigation of a failure finds out before it shrinks a case, and of bugs that show in every case."""

from dataclasses import replace
from typing import Any

import pytest

from strategies.case import Case
from tests.harness.bugs.attribution import FailingExample
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.clock import Clock
from tests.harness.law import law_named
from tests.harness.session.subject import Subject
from tests.harness.verdict import Verdict
from tests.unit.support.running import CASE, SEVERAL, SubjectOf


@pytest.mark.usefixtures("unscripted")
def test_a_known_bug_is_remembered_with_the_further_tensors_that_it_spoils(
    subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of("three", SEVERAL)
    case = Case(heads_kv=2, group=2, seqlen_q=9, seqlen_k=9)
    (of_heads,) = found(subject, case)
    subject.known.add(replace(of_heads, tensors=("lse", "out")))
    monkeypatch.setattr(subject.triage, "_investigate", lambda broken: pytest.fail("it is known"))
    subject.check(law_named("backward"), case)
    assert subject.known.bugs[of_heads.key].tensors == ("dk", "dq", "dv", "lse", "out")
    assert len(subject.known.bugs) == 1


def found(subject: Subject, *cases: Case) -> list[Bug]:
    """Return the bugs that the forward law finds in these cases."""
    for case in cases:
        subject.check(law_named("forward"), case)
    return list(subject.known.bugs.values())


@pytest.mark.usefixtures("unscripted")
def test_the_smallest_case_of_what_is_always_wrong_shows_no_other_bug(subject_of: SubjectOf) -> None:
    """Shrinking alone ends at one key, where a logarithm of 1 is right in any base and the other bug is left."""
    subject = subject_of("always_and_in_a_tail", SEVERAL)
    (of_lse,) = found(subject, Case(seqlen_q=5, seqlen_k=33, v_values="zeros"))
    assert of_lse.is_everywhere
    assert of_lse.tensors == ("lse",)
    of_lse, of_tail = found(subject, Case(seqlen_q=5, seqlen_k=33))
    assert [need.name for need in of_tail.needs] == ["seqlen_k"]
    assert of_lse.failure.case.seqlen_k % 64 == 0
    assert of_lse.failure.explanation.fields


@pytest.mark.usefixtures("unscripted")
def test_what_is_always_wrong_in_one_dtype_is_judged_in_others(subject_of: SubjectOf) -> None:
    subject = subject_of("scaled_in_float32", SEVERAL)
    (bug,) = found(subject, Case(seqlen_q=5, seqlen_k=33, causal=True))
    assert bug.is_everywhere
    assert bug.needs == (Condition("dtype", ("float32",), ("float16", "bfloat16")),)
    ordinary = Case(seqlen_q=9, seqlen_k=3)
    before = subject.known.seen[bug.key].total
    subject.check(law_named("forward"), ordinary)
    assert subject.known.seen[bug.key].total == before + 1
    subject.check(law_named("forward"), replace(ordinary, dtype="bfloat16"))
    assert subject.known.seen[bug.key].total == before + 1


@pytest.mark.usefixtures("unscripted")
def test_failures_that_others_wait_behind_at_the_end_are_told_apart_as_they_were_drawn(
    subject_of: SubjectOf,
) -> None:
    subject = subject_of("three", SEVERAL)
    cases = (
        Case(heads_kv=2, group=2, seqlen_q=9, seqlen_k=9),
        Case(batch=2, seqlen_q=9, seqlen_k=9, causal=True),
        Case(heads_kv=2, group=2, seqlen_q=7, seqlen_k=9),
    )
    verdicts = [(case, subject.runs.verdict("forward", case)) for case in cases]
    subject.triage.waiting = [FailingExample("forward", case, x.finding) for case, x in verdicts if x.finding]
    subject.runs.clock = Clock(0.0, grace=100.0)  # of a busy machine
    subject.runs.clock.start()
    subject.triage.finish()
    needs = {tuple(need.name for need in bug.needs): bug.failure.case for bug in subject.known.bugs.values()}
    assert needs.keys() == {("heads_kv", "group"), ("causal",)}
    assert set(needs.values()) == {*cases[:2]}


@pytest.mark.usefixtures("unscripted")
@pytest.mark.parametrize(("name", "expected"), [("dead_row", True), ("dead_short_rows", False)])
def test_whether_the_numbers_of_an_ordinary_case_decide(
    subject_of: SubjectOf, name: str, expected: bool
) -> None:
    """Both are right in some ordinary cases. A bug of lengths shows with any numbers."""
    subject = subject_of(name, SEVERAL)
    case = Case(seqlen_q=9, seqlen_k=3, q_values="positive", k_values="negative")
    subject.check(law_named("forward"), case)
    (found,) = subject.known.bugs.values()
    assert found.by_numbers == expected
    assert Bug.from_dict(found.to_dict()).by_numbers == expected


@pytest.mark.usefixtures("unscripted")
def test_what_is_asked_twice_of_a_failure_is_run_once(
    subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, ran = subject_of("wrong").runs, list[Case]()
    in_time = runs.in_time

    def counted(law: str, case: Case, **options: Any) -> Verdict:
        ran.append(case)
        return in_time(law, case, **options)

    monkeypatch.setattr(runs, "in_time", counted)
    found = [runs.judged("forward", CASE), runs.judged("forward", CASE), runs.judged_raw("forward", CASE)]
    assert found[0] == found[1]
    assert len(ran) == 2  # of which one looks for no design
    runs.forget()
    assert runs.judged("forward", CASE) == found[0]
    assert len(ran) == 3
