"""What a kernel computes instead is told in the first line of a report, and explains later failures of a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from strategies.case import Case
from tests.harness.bugs.failure import headline
from tests.harness.law import law_named
from tests.harness.report.wording import conditions_of
from tests.harness.run import read
from tests.unit.support import instead
from tests.unit.support.running import SubjectOf, report_of

INSTEAD = Path(instead.__file__)
DRAWN = Case(heads_kv=2, group=2, seqlen_q=40, seqlen_k=70, head_dim=32, causal=True, sm_scale=0.3)

pytestmark = pytest.mark.usefixtures("unscripted")


def test_it_is_the_first_line_of_a_report_and_needs_no_conditions(subject_of: SubjectOf) -> None:
    subject = subject_of("tail_of_rows", toys=INSTEAD)
    subject.check(law_named("backward"), DRAWN)
    (bug,) = subject.known.bugs.values()
    (words,) = instead.INSTEAD["tail_of_rows"]
    assert words in headline(bug.failure)
    assert conditions_of(bug) == ""
    lines = (report_of(subject) / "report.md").read_text().splitlines()
    assert words in lines[0]


def test_a_later_failure_that_it_explains_is_counted_for_it(subject_of: SubjectOf) -> None:
    subject = subject_of("tail_of_rows", toys=INSTEAD)
    subject.check(law_named("backward"), DRAWN)
    subject.check(law_named("backward"), replace(DRAWN, seqlen_q=75, causal=False, dtype="float16"))
    (bug,) = subject.known.bugs.values()
    assert subject.known.blamed[bug.key, "backward"] == 2


def test_sizes_of_tiles_may_follow_head_dim(subject_of: SubjectOf) -> None:
    subject = subject_of(instead.BY_HEAD_DIM, toys=INSTEAD)
    subject.check(law_named("forward"), DRAWN)
    subject.check(law_named("forward"), replace(DRAWN, head_dim=64, seqlen_k=90, causal=False))
    (bug,) = subject.known.bugs.values()
    assert bug.failure.finding.certificate.endswith("keys past the last whole tile of 32 are dropped")
    assert subject.known.blamed[bug.key, "forward"] == 2


def test_it_is_told_in_place_of_a_less_precise_design(subject_of: SubjectOf) -> None:
    """Without it, a delta that is 3 % too large is told as that of a kernel in tf32."""
    subject = subject_of("more_delta", toys=INSTEAD)
    subject.check(law_named("backward"), replace(DRAWN, causal=False))
    (bug,) = subject.known.bugs.values()
    (words,) = instead.INSTEAD["more_delta"]
    assert bug.failure.finding.certificate.startswith(words)
    assert not subject.known.precision.claims


def test_what_explains_different_tensors_is_told_as_different_bugs(subject_of: SubjectOf) -> None:
    subject = subject_of("base_2_and_tail_of_rows", toys=INSTEAD)
    subject.check(law_named("backward"), DRAWN)
    subject.check(law_named("backward"), replace(DRAWN, seqlen_q=75, seed=1))
    subject.check(law_named("backward"), replace(DRAWN, seqlen_q=45, causal=False, seed=2))
    told = {bug.failure.finding.certificate for bug in subject.known.bugs.values()}
    assert told == {*instead.INSTEAD["base_2"], *instead.INSTEAD["tail_of_rows"]}
    assert len(subject.known.bugs) == 2


def test_a_second_bug_in_the_same_tensor_is_told_beside_one_that_shows_everywhere(
    subject_of: SubjectOf,
) -> None:
    subject = subject_of(f"dq_unscaled_and_{instead.RARE}", toys=INSTEAD)
    subject.check(law_named("backward"), DRAWN)
    subject.check(law_named("backward"), replace(DRAWN, batch=5))
    first, second = subject.known.bugs.values()
    assert first.failure.finding.certificate == instead.INSTEAD["dq_unscaled"][0]
    assert second.failure.alternatives == first.failure.finding.alternatives
    assert (second.tensors, second.failure.case.batch) == (("dq",), 5)
    assert [need.name for need in second.needs] == ["batch"]
    subject.check(law_named("backward"), replace(DRAWN, batch=6, causal=False))
    assert subject.known.blamed[second.key, "backward"] == 2
    replayed = read(subject.known.report_dir / second.failure.folder / "case.json")
    assert replayed.alternatives == second.failure.alternatives
