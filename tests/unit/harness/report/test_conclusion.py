"""At the end of a run, bugs that are one are told once."""

from dataclasses import replace

from tests.harness.bugs.bug import Bug, Occurrences, Severity
from tests.harness.bugs.duplicates import OF_RECORDS
from tests.harness.report.conclusion import merged, replaced
from tests.unit.support.bugs import CASE, CAUSAL, GROUP, LONG, bug

LAWS_OF_THREE = ("additivity", "backward", "composition")


class TestConclusion:
    def test_two_processes_that_found_one_bug_tell_of_it_once(self) -> None:
        one = replace(bug(CASE, ("out", "dq"), CAUSAL), severity=Severity(9, 20))
        twin = bug(CASE, ("dq",), CAUSAL, law="backward")
        other = bug(CASE, ("dq",), GROUP, law="backward")
        other = replace(other, failure=replace(other.failure, number=1))
        seen = {one.key: Occurrences(), twin.key: Occurrences()}
        seen[twin.key].add("backward", CASE, "dq")
        found = merged({x.key: x for x in (one, twin, other)}, seen)
        assert [x.bug.key for x in found] == [one.key, other.key]
        assert found[0].seen.total == 1
        assert found[0].twins == (twin.key,)
        assert found[0].reasons == (f"found again: dq is wrong (backward, {CASE.dtype}), as {OF_RECORDS}",)
        assert replaced(f"see {twin.key}/report.md", found) == f"see {one.key}/report.md"

    def test_the_one_whose_kernel_is_known_to_compute_something_else_is_told(self) -> None:
        worst = replace(bug(CASE, ("out", "dq"), CAUSAL), severity=Severity(9, 20))
        twin = bug(CASE, ("dq",), CAUSAL, law="backward")
        finding = replace(twin.failure.finding, certificate="delta is left out of dq")
        told = replace(twin, failure=replace(twin.failure, finding=finding))
        (found,) = merged({x.key: x for x in (worst, told)}, {})
        assert (found.bug.failure, found.twins) == (told.failure, (worst.key,))
        assert {*found.bug.tensors} == {"out", "dq"}

    def test_bugs_of_few_examples_are_compared_first(self) -> None:
        needs, numbers = (CAUSAL, GROUP, LONG), (9, 1, 5)
        first, second, third = LAWS_OF_THREE
        found = {
            name: bug(CASE, ("out",), need, law=name) for name, need in zip(LAWS_OF_THREE, needs, strict=True)
        }
        seen = {known.key: Occurrences() for known in found.values()}
        for known, number in zip(found.values(), numbers, strict=True):
            for seed in range(number):
                seen[known.key].add("forward", replace(CASE, seed=seed), "out")
        compared: list[set[str]] = []

        def why_one(one: Bug, other: Bug) -> str:
            compared.append({one.failure.law, other.failure.law})
            return "both are late" if {second, third} <= compared[-1] else ""

        distinct = merged(found, seen, why_one)
        assert len(distinct) == 2
        ((reason,),) = filter(None, (x.reasons for x in distinct))
        assert reason == f"found again: out is wrong ({third}, {CASE.dtype}), as both are late"
        assert any(reason in x.lines() for x in distinct)
        assert sorted(compared[:2], key=sorted) == [{first, second}, {second, third}]
        assert compared[2:] == [{first, third}]

    def test_bugs_of_a_common_tensor_are_compared_before_others(self) -> None:
        tensors, needs = (("out",), ("dk",), ("lse", "dk")), (CAUSAL, GROUP, LONG)
        found = {
            name: bug(CASE, wrong, need, law=name)
            for name, wrong, need in zip(LAWS_OF_THREE, tensors, needs, strict=True)
        }
        compared: list[set[str]] = []

        def why_one(one: Bug, other: Bug) -> str:
            compared.append({one.failure.law, other.failure.law})
            return ""

        assert len(merged(found, {}, why_one)) == 3
        assert compared[0] == {*LAWS_OF_THREE[1:]}


"""The laws that found three bugs."""
