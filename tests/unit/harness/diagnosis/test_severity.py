"""How many ordinary cases show a bug."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from strategies.case import Case
from tests.harness.bugs.bug import ENOUGH, Bug, Occurrences, Severity
from tests.harness.bugs.dense import ORDINARY, ordinary_cases
from tests.harness.clock import meter
from tests.harness.diagnosis.severity import PER_USE, with_uses
from tests.harness.report.wording import rank, severity, told
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CASE, CAUSAL, CLAIMS, LONG, OF_V, Wrong, bug, runner
from tests.unit.support.stubs import runs_of


class TestSeverity:
    ORDINARY = Severity(10, 20)

    def test_wrong_numbers_on_ordinary_data_come_first(self) -> None:
        one = bug(CASE, ("out",), CAUSAL, relative=0.1, ratio=10.0)
        worst = replace(one, severity=self.ORDINARY)
        smaller = replace(bug(CASE, ("out",), relative=0.01), severity=self.ORDINARY)
        crash = replace(bug(CASE, ()), severity=self.ORDINARY)
        at_the_end = replace(one, severity=Severity(0, 20))
        special = replace(bug(CASE, ("dq",), law="special"), severity=Severity(0, 20))
        less = replace(bug(CASE, ("dq",), explained_by=("tf32",)), severity=self.ORDINARY)
        accepted = replace(one, failure=replace(one.failure, finding=Finding(claim="", kind="accepted")))
        in_order = [worst, smaller, crash, at_the_end, special, less, accepted]
        shuffled = [in_order[i] for i in (4, 1, 6, 0, 5, 2, 3)]
        assert sorted(shuffled, key=severity) == in_order
        assert [rank(x) for x in in_order[2:]] == ["crashes", "range", "special", "imprecise", "accepted"]

    def test_a_bug_in_lines(self) -> None:
        seen = Occurrences()
        for dtype in ("float16", "float16", "float32"):
            seen.add("forward", replace(CASE, dtype=dtype), "out")
        one = replace(bug(CASE, ("out",), CAUSAL, OF_V, ulps=3.0, relative=0.5), severity=self.ORDINARY)
        assert told(one, seen) == [
            ("how bad", "shows in 10 of 20 ordinary cases; 3 ulps off, 0.5 of out's norm"),
            ("seen", "3 failing examples: forward; float16, float32; out"),
            ("needs", "only with causal True, special numbers in v"),
        ]

    def test_what_is_shared_comes_back(self) -> None:
        one = replace(bug(CASE, ("out",), CAUSAL, LONG), severity=self.ORDINARY, offers=("min_seqlen=1",))
        assert Bug.from_dict(json.loads(json.dumps(one.to_dict()))) == one
        seen = Occurrences()
        seen.add("forward", CASE, "out")
        assert Occurrences.from_dict(json.loads(json.dumps(seen.to_dict()))) == seen

    def test_ordinary_cases_are_claimed_and_the_same_every_time(self) -> None:
        claims = replace(CLAIMS, causal_unequal_lengths=False)
        drawn = ordinary_cases(claims, "float16", "cpu")
        assert drawn == ordinary_cases(claims, "float16", "cpu")
        assert len(drawn) == ORDINARY
        assert {case.causal for case in drawn} == {False, True}
        assert all(claims.admits(case) and case.sm_scale is None for case in drawn)
        assert {case.q_values for case in drawn} == {"normal"}

    def test_kernels_with_a_head_dim_of_v_of_its_own_have_ordinary_cases(self) -> None:
        claims = replace(CLAIMS, head_dims=(192, 576), v_head_dim=(128, 512))
        drawn = ordinary_cases(claims, "float16", "cpu")
        assert len(drawn) == ORDINARY
        assert {case.v_head_dim for case in drawn} == {128}

    def test_kernels_that_take_one_query_have_ordinary_cases(self) -> None:
        drawn = ordinary_cases(replace(CLAIMS, max_seqlen_q=1), "float16", "cpu")
        assert {case.seqlen_q for case in drawn} == {1}
        assert len(drawn) >= ENOUGH

    def test_the_uses_that_a_bug_hits_come_first(self) -> None:
        uses = (("prefills", 0, 14), ("calls of grouped heads", 3, 6), ("decode steps", 6, 6))
        one = replace(bug(CASE, ("out",)), severity=Severity(0, 14, uses=uses))
        assert told(one, Occurrences()) == [
            ("how bad", "shows in each of 6 decode steps, 3 of 6 calls of grouped heads, none of 14 prefills")
        ]
        assert rank(one) == "numbers"
        assert Bug.from_dict(json.loads(json.dumps(one.to_dict()))) == one


Counts = dict[str, tuple[int, int]]


def uses_of(wrong: Wrong, law: str, spend: Callable[[], None] = lambda: None, **claims: Any) -> Counts:
    """Return for each use in how many of how many cases a kernel shows a bug under a law."""
    capabilities = replace(CLAIMS, **claims)
    run = runner(wrong)
    runs = runs_of(
        capabilities,
        judged=lambda law, case, ignored, **_: run(law, case, ignored),
        ordinary={},
        device_type="cpu",
    )
    known = bug(CASE, ("out",), law=law)
    ordinary = [
        (case, run(law, case, frozenset())) for case in ordinary_cases(capabilities, "float32", "cpu")
    ]
    uses = with_uses(known, ordinary, runs, lambda x: x, spend).severity.uses
    return {use: (shown, tried) for use, shown, tried in uses}


def test_a_bug_of_every_decode_step_shows_in_none_of_the_prefills() -> None:
    def decode(case: Case) -> set[str]:
        return {"out"} if case.seqlen_q == 1 else set()

    uses = uses_of(decode, "forward")
    assert uses["decode steps"] == (PER_USE, PER_USE)
    assert uses["prefills"] == (0, ORDINARY)
    assert uses["calls of grouped heads"] == (0, PER_USE)
    assert "training steps" in uses_of(decode, "backward")
    assert [*uses_of(decode, "forward", max_seqlen_q=1, grouped_heads=False)] == ["decode steps"]


@pytest.mark.parametrize("most", [0, 1, PER_USE, PER_USE + 1])
def test_a_use_of_which_no_case_was_run_in_time_is_not_counted(most: int) -> None:
    uses = uses_of(lambda case: {"out"}, "forward", meter(60, calls=most))
    assert all(tried for _, tried in uses.values())
    assert sum(tried for use, (_, tried) in uses.items() if use != "prefills") == most


def test_a_law_of_several_sequences_has_uses_of_each_kind() -> None:
    def paged(case: Case) -> set[str]:
        return {"out"} if case.ragged == "paged" and case.seqlen_q == 1 else set()

    uses = uses_of(paged, "ragged", ragged=("packed", "paged"), backward=False)
    assert {*uses} == {
        f"{kind} {use}" for kind in ("packed", "paged") for use in ("decode steps", "prefills")
    }
    assert uses["paged decode steps"] == (PER_USE, PER_USE)
    assert not any(shown for use, (shown, _) in uses.items() if use != "paged decode steps")


def test_sinks_are_a_use_if_they_are_claimed() -> None:
    uses = uses_of(lambda case: {"out"} if case.sinks and case.group > 1 else set(), "forward", sinks=True)
    assert uses["calls with sinks"] == (PER_USE, PER_USE)
    assert uses["prefills"] == (0, ORDINARY)
