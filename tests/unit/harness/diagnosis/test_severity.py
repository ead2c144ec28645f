"""How many ordinary cases show a bug."""

import json
from dataclasses import replace

from tests.harness.bugs.bug import Bug, Occurrences, Severity
from tests.harness.bugs.dense import ORDINARY, ordinary_cases
from tests.harness.report.wording import annotation, rank, severity, told
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CASE, CAUSAL, CLAIMS, LONG, OF_V, bug


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
        assert annotation(one, seen).startswith("::error title=k%3A law `forward` is broken%2C out is wrong")

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
