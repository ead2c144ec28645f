"""Bugs are told apart. A kernel is a function of a case here, which says at once which tensors are wrong in it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from strategies.case import Case, Spike
from strategies.features import SCORES, with_value
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Bug, Condition, Severity, in_parts
from tests.harness.bugs.counterfactuals import needs_of
from tests.harness.bugs.dense import symptoms_apart_from_forward
from tests.harness.bugs.duplicates import met_again, why_same
from tests.harness.bugs.failure import OF_MEMORY, Explanation
from tests.harness.bugs.restatement import restate_by_basic_law, restate_by_forward
from tests.harness.symptoms import is_small
from tests.harness.verdict import CAUSED, INTERMITTENT, Finding
from tests.unit.support.bugs import (
    CASE,
    CAUSAL,
    CLAIMS,
    GROUP,
    LONG,
    OF_V,
    UNEQUAL,
    Wrong,
    any_of,
    bug,
    causal,
    finding,
    grouped,
    long_lse,
    runner,
)


def with_finding(known: Bug, finding: Finding) -> Bug:
    return replace(known, failure=replace(known.failure, finding=finding))


class TestAttribution:
    def left(self, wrong: Wrong, case: Case, *known: Bug) -> tuple[FailingExample | None, list[Bug]]:
        run = runner(wrong)
        found = run("forward", case, frozenset())
        assert found is not None
        outcome = explain_by_known_bugs(FailingExample("forward", case, found), known, run, CLAIMS)
        return outcome.rest, outcome.blamed

    def test_a_failure_that_goes_away_without_what_a_bug_needs_is_explained(self) -> None:
        known = bug(CASE, ("out",), CAUSAL)
        assert self.left(causal, CASE, known) == (None, [known])

    def test_what_is_still_wrong_is_another_bug_without_the_first(self) -> None:
        rest, blamed = self.left(any_of(causal, grouped), CASE, bug(CASE, ("out",), CAUSAL))
        assert blamed == []
        assert rest is not None
        assert rest.case == replace(CASE, causal=False)

    def test_two_known_bugs_in_one_case_explain_it(self) -> None:
        known = [bug(CASE, ("out",), CAUSAL), bug(CASE, ("out",), GROUP)]
        rest, blamed = self.left(any_of(causal, grouped), CASE, *known)
        assert rest is None
        assert blamed == [known[1]]

    def test_a_case_without_what_a_bug_needs_is_not_explained_by_it(self) -> None:
        case = replace(CASE, causal=False)
        rest, blamed = self.left(grouped, case, bug(CASE, ("out",), CAUSAL))
        assert (rest and rest.case, blamed) == (case, [])

    def test_other_tensors_are_not_explained(self) -> None:
        rest, _ = self.left(long_lse, CASE, bug(CASE, ("out",), CAUSAL))
        assert rest is not None

    def test_tensors_beside_those_of_the_bug_are_judged_by_themselves(self) -> None:
        wrong = any_of(causal, lambda case: {"lse"} if case.causal and case.group > 1 else set())
        rest, blamed = self.left(wrong, CASE, known := bug(CASE, ("out",), CAUSAL))
        assert blamed == [known]
        assert rest is not None
        assert (rest.finding.tensor, rest.ignored) == ("lse", {"out"})

    def test_a_gradient_that_is_wrong_where_out_is_right_is_another_bug(self) -> None:
        def of_one(case: Case) -> set[str]:
            return {"out", "lse", "dq"} if case.causal else set()

        def of_two(case: Case) -> set[str]:
            return {"dq", *(("out", "lse") if case.seqlen_q % 32 != 1 else ())} if case.causal else set()

        known = bug(CASE, ("lse", "out"), CAUSAL)
        assert self.left(of_one, CASE, known) == (None, [replace(known, tensors=("dq", "lse", "out"))])
        rest, blamed = self.left(of_two, CASE, known)
        assert blamed == [known]
        assert rest is not None
        assert rest.finding.tensor == "dq"
        assert not why_same(known, bug(CASE, ("dq",), CAUSAL), runner(of_two), CLAIMS)
        third = bug(CASE, ("dq",), GROUP)
        assert symptoms_apart_from_forward(CASE, runner(of_two), CLAIMS) == {"dq"}
        assert symptoms_apart_from_forward(CASE, runner(of_two), CLAIMS, [third]) == set()

    def test_nan_of_out_that_reaches_a_gradient_is_explained_with_it(self) -> None:
        def left(kind_of_dq: str) -> FailingExample | None:
            def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
                dq = (
                    ("dq",) if case.seqlen_q == CASE.seqlen_q else ()
                )  # so the bug does not seem to make dq wrong
                wrong = tuple(x for x in ("out", *dq) if case.causal and x not in ignored)
                kind = kind_of_dq if wrong == dq else "nonfinite"
                return Finding(claim="so", kind=kind, tensor=wrong[0], tensors=wrong) if wrong else None

            found = run("backward", CASE, frozenset())
            assert found is not None
            return explain_by_known_bugs(
                FailingExample("backward", CASE, found), [bug(CASE, ("out",), CAUSAL)], run, CLAIMS
            ).rest

        assert left("nonfinite") is None
        assert left("error") is not None

    def test_a_bug_that_needs_nothing_explains_all_of_its_tensors(self) -> None:
        known = bug(CASE, ("out",))
        assert self.left(causal, CASE, known) == (None, [known])

    def test_a_length_is_tried_near_its_own(self) -> None:
        case = replace(CASE, seqlen_k=300)
        assert self.left(long_lse, case, bug(CASE, ("lse",), LONG))[0] is None

    def test_of_unequal_lengths_all_equal_ones_must_hold(self) -> None:
        short = bug(CASE, ("lse",), UNEQUAL)
        rest, _ = self.left(long_lse, replace(CASE, seqlen_q=10), short)
        assert rest is not None

    def test_numbers_of_a_tensor_are_a_field(self) -> None:
        case = replace(CASE, spikes=(Spike("v", (0, 0, 0, 0), 1e4),))
        known = bug(case, ("out",), OF_V)
        assert self.left(lambda c: {"out"} if c.spikes else set(), case, known)[0] is None
        assert self.left(causal, CASE, known)[0] is not None

    def test_huge_strides_are_one_bug_whatever_they_break(self) -> None:
        known = bug(CASE, (), Condition("huge", (True,), (False,)))
        case = replace(CASE, v_layout="huge")
        assert self.left(lambda c: {"dq"} if c.v_layout == "huge" else set(), case, known) == (None, [known])


class TestNeeds:
    def test_what_matters_in_the_small_case_alone_is_an_accident(self) -> None:
        small = replace(CASE, seqlen_q=1, seqlen_k=1, head_dim=16)

        def fails(case: Case) -> bool:
            return case.causal and (case.seqlen_k > 1 or case.head_dim == 16)

        by_luck = Condition("head_dim", (16,), (64,))
        assert needs_of([CAUSAL, by_luck], [small], fails, CLAIMS) == (CAUSAL, by_luck)
        assert needs_of([CAUSAL, by_luck], [small, CASE], fails, CLAIMS) == (CAUSAL,)

    def test_a_case_that_nothing_cures_has_other_bugs_and_is_no_witness(self) -> None:
        small = replace(CASE, group=1)

        def fails(case: Case) -> bool:
            return case.causal or case.group > 1

        assert needs_of([CAUSAL], [small, CASE], fails, CLAIMS) == (CAUSAL,)

    def test_nor_is_one_that_only_a_change_of_what_is_simplest_cures(self) -> None:
        small, scale = replace(CASE, group=1), Condition("sm_scale", (None,), (1.0,))

        def fails(case: Case) -> bool:
            return (case.causal or case.group > 1) and case.sm_scale is None

        assert needs_of([CAUSAL, scale], [small, CASE], fails, CLAIMS) == (CAUSAL, scale)

    @pytest.mark.parametrize(
        ("need", "met", "unmet"),
        [
            (CAUSAL, {"causal": True}, {"causal": False}),
            (LONG, {"seqlen_k": 200}, {"seqlen_k": 30}),
            (Condition("seqlen_k", (0,), (1, 2)), {"seqlen_k": 0}, {"seqlen_k": 9}),
            (Condition("seqlen_k", (1,), (0,)), {"seqlen_k": 9}, {"seqlen_k": 0}),
            (
                Condition("seqlen_k", (129,), (127, 128, 256), is_certain=True),
                {"seqlen_k": 200},
                {"seqlen_k": 100},
            ),
            (Condition("seqlen_k", (33,), (32, 64)), {"seqlen_k": 65}, {"seqlen_k": 64}),
            (Condition("seqlen_k", (1,), (64, 128)), {"seqlen_k": 65}, {"seqlen_k": 192}),
            (UNEQUAL, {"seqlen_k": 3}, {"seqlen_k": 70}),
            (OF_V, {"v_values": "zeros"}, {"v_values": "normal"}),
            (Condition("block_m", (64,), (128,)), {}, {"launch": (("block_m", 128),)}),
            (
                Condition("k and v layouts", ("other",), ("contiguous",)),
                {"k_layout": "gap"},
                {"q_layout": "gap"},
            ),
        ],
    )
    def test_a_case_meets_what_it_may_show(self, need: Condition, met: Any, unmet: Any) -> None:
        assert need.is_met(replace(CASE, **met))
        assert not need.is_met(replace(CASE, **unmet))

    def test_the_same_bug_needs_nothing_else_and_goes_away_alike(self) -> None:
        known, again = bug(CASE, ("out", "dq"), CAUSAL), bug(replace(CASE, group=1), ("out",), CAUSAL)
        run = runner(causal)
        assert why_same(known, again, run, CLAIMS)
        assert not why_same(known, bug(CASE, ("out",), CAUSAL, GROUP), run, CLAIMS)
        assert not why_same(bug(CASE, ("lse",), CAUSAL), bug(CASE, ("dq",), CAUSAL), run, CLAIMS)
        assert (
            not why_same(known, again, runner(any_of(causal, grouped)), CLAIMS)
            or again.failure.case.group == 1
        )

    def test_bugs_that_need_the_same_in_one_tensor_are_one_whatever_else_is_wrong(self) -> None:
        known, again = bug(CASE, ("out", "lse"), CAUSAL), bug(replace(CASE, seqlen_k=7), ("out",), CAUSAL)
        always = runner(any_of(causal, lambda case: {"out"}))
        assert why_same(known, again, always, CLAIMS)
        assert not why_same(bug(CASE, ("lse",), CAUSAL), bug(CASE, ("dv",), CAUSAL), always, CLAIMS)

    def test_bugs_of_one_tensor_that_go_away_by_different_fields_are_two(self) -> None:
        of_group, of_mask = bug(CASE, ("out",), GROUP), bug(replace(CASE, group=1), ("out",), CAUSAL)
        assert not why_same(of_group, of_mask, runner(any_of(causal, grouped)), CLAIMS)

    def test_an_lse_that_is_always_wrong_is_not_what_makes_gradients_wrong(self) -> None:
        always = runner(lambda case: {"lse", "dv"})
        assert not why_same(bug(CASE, ("lse",)), bug(CASE, ("dv",), law="backward"), always, CLAIMS)
        assert why_same(bug(CASE, ("lse",)), bug(replace(CASE, group=1), ("lse",)), always, CLAIMS)

    def test_repeats_of_any_call_that_differ_are_one_bug_in_any_tensor(self) -> None:
        """Memory that an earlier call has left behind may spoil another tensor in each repeat."""
        dq, dv = bug(CASE, ("dq",), law="determinism"), bug(CASE, ("dv",), law="memory")
        assert dq.is_like(dv)
        assert why_same(dq, dv, runner(lambda case: {"dq", "dv"}), CLAIMS)
        assert dq.is_like(bug(CASE, ("out",), law="composition"))
        assert not dq.is_like(bug(CASE, ("dv",), CAUSAL, law="memory"))
        assert not bug(CASE, ("out",), law="composition").is_like(bug(CASE, ("dv",), law="additivity"))
        assert not dq.is_like(bug(CASE, ("dv",)))

    def test_bugs_of_one_tensor_that_need_nothing_are_one_without_a_run(self) -> None:
        """Their records decide, because at the end of a run there is no time for further runs."""
        known = bug(CASE, ("dk", "dq"))
        assert known.is_like(bug(replace(CASE, group=1), ("dk",)))
        assert not known.is_like(bug(CASE, ("dq",)))
        assert not known.is_like(bug(CASE, ("dk",), CAUSAL))

    def test_bugs_of_which_only_the_case_is_known_may_make_all_wrong_that_is_wrong_there(self) -> None:
        """A cache is read beyond a sequence: NaN in out by one case and a wrong lse by another, both met at the end."""
        both = bug(CASE, ("lse", "out"))
        of_lse = replace(both, tensors=("lse",))
        other = bug(replace(CASE, group=1), ("lse", "out")).failure
        nan = replace(other.finding, kind="nonfinite", tensor="out")
        of_out = Bug(replace(other, finding=nan), ("out",))
        assert of_lse.is_like(of_out)
        assert of_out.is_like(of_lse)
        tried = Severity(8, 20)
        assert not replace(of_lse, severity=tried).is_like(replace(of_out, severity=tried))

    def test_an_exception_that_is_raised_at_one_line_is_one_bug(self) -> None:
        """Which fields cure it may differ from case to case, but the line is the same."""

        def raising(line: int, *needs: Condition, words: str = "size 16", more: str = "") -> Bug:
            known = bug(CASE, (), *needs)
            detail = f'  File "k.py", line 3, in f\n    g(q)\n  File "k.py", line {line}, in g\n{more}'
            finding = Finding(claim=f"raised ValueError: {words}", kind="exception", detail=detail)
            return with_finding(known, finding)

        inside = '  File "/venv/lib/site-packages/torch/_ops.py", line 875, in __call__\n'
        launched = f'{CAUSED}\n  File "k.py", line 20, in launch\n'
        for same in ({}, {"words": "size 1024"}, {"more": inside}, {"more": launched}):
            assert raising(9, CAUSAL).is_like(raising(9, GROUP, **same))
            assert not raising(9, CAUSAL).is_like(raising(12, GROUP, **same))
        assert not raising(9, CAUSAL).is_like(raising(9, GROUP, words="stride 16"))

    def test_a_contract_that_is_broken_in_the_same_words_is_one_bug(self) -> None:
        def breaking(words: str, *needs: Condition) -> Bug:
            return with_finding(
                bug(CASE, ("out",), *needs), Finding(claim=words, kind="contract", tensor="out")
            )

        squeezed = "out.shape is (1, 1, 16), but should be (1, 1, 1, 16)"
        longer = squeezed.replace("16", "128").replace("1, 1,", "3, 2,")
        padded = "out.shape is (1, 1, 1, 32), but should be (1, 1, 1, 16)"
        of_half, of_bfloat = (
            f"out.dtype is torch.float32, but should be torch.{x}" for x in ("float16", "bfloat16")
        )
        for one, other in ((squeezed, longer), (of_half, of_bfloat)):
            assert breaking(one, LONG).is_like(breaking(other, LONG, CAUSAL))
            assert breaking(one, LONG).could_break(breaking(other).failure.finding)
        for one, other in ((squeezed, padded), (squeezed, of_half)):
            assert not breaking(one, LONG).is_like(breaking(other, LONG, CAUSAL))
            assert not breaking(one, LONG).could_break(breaking(other).failure.finding)

    def test_what_a_kernel_keeps_from_call_to_call_is_one_bug_with_what_comes_and_goes(self) -> None:
        def found(law: str, *tensors: str, shown: int = 20, needs: tuple[Condition, ...] = ()) -> Bug:
            return replace(bug(CASE, tensors, *needs, law=law), severity=Severity(shown, 20))

        def at_times(*tensors: str, **fields: Any) -> Bug:
            known = bug(replace(CASE, **fields), tensors)
            return with_finding(known, replace(known.failure.finding, kind=INTERMITTENT))

        def are_one(one: Bug, other: Bug) -> bool:
            run = runner(lambda case: set())
            return all(x.is_like(y) and why_same(x, y, run, CLAIMS) for x, y in ((one, other), (other, one)))

        assert are_one(found("memory", "dk", "dv"), at_times("dv"))
        assert not are_one(found("memory", "dk", "dv"), at_times("dq"))
        assert not are_one(found("backward", "dk", "dv"), at_times("dv"))
        assert not are_one(found("memory", "dk", "dv", shown=3), at_times("dv"))
        if_long = found("memory", "dk", "dv", shown=3, needs=(LONG,))
        assert are_one(if_long, at_times("dv", seqlen_k=65))
        assert not are_one(if_long, at_times("dv", seqlen_k=3))
        assert are_one(found("composition", "dv", needs=(LONG,)), at_times("dv", seqlen_k=65))
        assert are_one(found("memory", "out"), at_times("out", "dv"))

    def test_a_bug_that_is_met_again_needs_no_more_than_both_cases_have(self) -> None:
        known = bug(replace(CASE, seqlen_k=65), ("out",), CAUSAL, LONG)
        again = bug(replace(CASE, seqlen_k=9), ("out", "dq"), CAUSAL)
        assert met_again(known, again).needs == (CAUSAL,)
        assert met_again(known, again).tensors == ("dq", "out")

    def test_in_a_tensor_that_is_always_wrong_lengths_matter_by_accident(self) -> None:
        always = replace(bug(CASE, ("lse",)), severity=Severity(20, 20))
        assert why_same(always, bug(replace(CASE, seqlen_k=65), ("lse",), LONG), runner(long_lse), CLAIMS)

    def test_roundings_to_one_format_are_one_bug_in_all_dtypes(self) -> None:
        """In float32 they always show, in bfloat16 only with some numbers, and in float16 they are right."""
        of_dtype = Condition("dtype", ("float32",), ("float16",))
        small: dict[str, Any] = {"relative": 1e-3}
        large: dict[str, Any] = {"relative": 0.5}
        always = replace(bug(CASE, ("out",), of_dtype, **small), severity=Severity(20, 20))
        steer_away = replace(CASE, dtype="bfloat16", v_values="outliers")
        run = runner(lambda case: {"dv", "out"} if case.dtype != "float16" else set())
        assert always.is_everywhere
        assert why_same(always, bug(steer_away, ("dv", "out"), OF_V, GROUP, **small), run, CLAIMS)
        assert not why_same(always, bug(steer_away, ("dv", "out"), OF_V, GROUP, **large), run, CLAIMS)
        assert why_same(always, bug(CASE, ("out",), GROUP, **small), run, CLAIMS)
        assert not why_same(always, bug(CASE, ("out",), GROUP, **large), run, CLAIMS)

    def test_what_is_less_precise_after_a_change_is_cured_of_wrong_numbers(self) -> None:
        """Beside a bug of roundings, which a less precise design explains."""

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            return finding({"out"}) if case.causal else finding({"out"}, explained_by=("tf32=true",))

        known, again = bug(CASE, ("out",), CAUSAL), bug(replace(CASE, group=1), ("out",), CAUSAL, LONG)
        assert why_same(known, again, run, CLAIMS)
        small = bug(replace(CASE, group=1), ("out",), CAUSAL, LONG, relative=1e-3)
        assert not why_same(known, small, run, CLAIMS)

    def test_bugs_of_nan_are_one_beside_wrong_numbers(self) -> None:
        """What cures one of NaN cures the other, although a third bug still makes its numbers wrong."""
        of_mask = runner(lambda case: {"out"})

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            found = of_mask(law, case, ignored)
            return found and replace(found, kind="nonfinite" if case.causal else "error")

        def nan(*needs: Condition) -> Bug:
            known = bug(CASE, ("out",), *needs)
            finding = replace(known.failure.finding, kind="nonfinite")
            return replace(known, failure=replace(known.failure, finding=finding))

        assert why_same(nan(CAUSAL), nan(CAUSAL, LONG), run, CLAIMS)
        assert not why_same(bug(CASE, ("out",), CAUSAL), bug(CASE, ("out",), GROUP), run, CLAIMS)

    def test_a_bug_shows_everywhere_if_enough_cases_tell_so(self) -> None:
        assert replace(bug(CASE, ("lse",)), severity=Severity(20, 20)).is_everywhere
        assert not replace(bug(CASE, ("lse",)), severity=Severity(1, 1)).is_everywhere
        assert not replace(bug(CASE, ("lse",)), severity=Severity(19, 20)).is_everywhere
        assert not replace(bug(CASE, ("lse",), CAUSAL), severity=Severity(20, 20)).is_everywhere

    def test_small_errors_are_those_of_roundings(self) -> None:
        known = Finding(claim="so", kind="error", tensor="out", relative=1e-3)
        assert is_small(known)
        assert not is_small(replace(known, relative=0.1))
        assert not is_small(replace(known, relative=None))

    def test_scores_are_large_by_their_scale_or_by_their_numbers(self) -> None:
        need = Condition(SCORES, ("other",), ("ordinary",))
        by_scale, by_numbers = replace(CASE, sm_scale=30.0), replace(CASE, k_values="positive")
        assert need.is_met(by_scale)
        assert need.is_met(by_numbers)
        assert not need.is_met(CASE)
        assert with_value(by_scale, SCORES, "ordinary") == CASE
        assert with_value(by_numbers, SCORES, "ordinary") == CASE

    def test_laws_that_call_with_parts_meet_a_crash_at_any_size(self) -> None:
        crash = bug(replace(CASE, seqlen_q=91), (), CAUSAL, UNEQUAL)
        equal = replace(CASE, seqlen_q=90)
        assert crash.end_of(equal) is None
        assert in_parts(crash).end_of(equal) == crash.failure.finding
        assert in_parts(crash).end_of(replace(equal, causal=False)) is None


class TestPlainly:
    PART: Mapping[str, Any] = {"seqlen_k": 30, "causal": False}

    def told(self, wrong: Wrong, law: str = "composition", **fields: Any) -> FailingExample:
        failed = finding({"out"})
        assert failed is not None
        return restate_by_basic_law(
            FailingExample(law, CASE, failed, sizes=(self.PART,), **fields), runner(wrong), CLAIMS
        )

    def test_a_call_of_another_size_that_is_wrong_by_itself_is_told(self) -> None:
        told = self.told(lambda case: {"out"} if case.seqlen_k == 30 else set())
        assert (told.law, told.case) == ("forward", replace(CASE, seqlen_k=30, causal=False))

    def test_a_call_of_another_size_is_wrong_with_ordinary_numbers_where_its_own_are_all_0(self) -> None:
        zeros, failed = replace(CASE, q_values="zeros"), finding({"out"})
        assert failed is not None
        shrunk = FailingExample("composition", zeros, failed, sizes=(self.PART,))
        wrong = runner(lambda case: {"out"} if case.seqlen_k == 30 and case.q_values == "normal" else set())
        assert restate_by_basic_law(shrunk, wrong, CLAIMS).law == "forward"

    def test_an_exception_is_told_of_the_call_that_raises_it(self) -> None:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            return raised if case.seqlen_k == 30 else finding(causal(case))

        raised = Finding(claim="it raised", kind="exception", detail='File "mine.py", line 7, in forward')
        for law in ("composition", "determinism"):
            told = restate_by_basic_law(FailingExample(law, CASE, raised, sizes=(self.PART,)), run, CLAIMS)
            assert (told.law, told.case.seqlen_k, told.finding) == ("forward", 30, raised)
        steer_away = replace(raised, detail='File "mine.py", line 8, in forward')
        assert (
            restate_by_basic_law(
                FailingExample("composition", CASE, steer_away, sizes=(self.PART,)), run, CLAIMS
            ).law
            == "composition"
        )

    def test_the_case_itself_comes_first(self) -> None:
        assert self.told(causal).case == CASE

    def test_parts_are_put_together_by_an_lse_that_is_known_to_be_wrong(self) -> None:
        told = self.told(lambda case: {"lse"}, ignored=frozenset({"lse"}))
        assert (told.law, told.finding.tensor, told.ignored) == ("forward", "lse", frozenset())

    def test_calls_that_are_right_by_themselves_leave_the_law_to_tell(self) -> None:
        assert self.told(lambda case: set()).law == "composition"

    @pytest.mark.parametrize("case", [CASE, replace(CASE, batch=30, seqlen_q=250, seqlen_k=250)])
    def test_equations_between_gradients_do_not_hold_at_a_wrong_lse(self, case: Case) -> None:
        """The second case has so many scores that one of its heads is judged."""
        failed = finding({"dk"})
        assert failed is not None
        told = restate_by_basic_law(
            FailingExample("identities", case, failed), runner(lambda case: {"lse"}), CLAIMS
        )
        assert (told.law, told.finding.tensor) == ("forward", "lse")

    def test_what_is_wrong_without_nan_as_well_is_told_so(self) -> None:
        failed = finding({"out"})
        assert failed is not None
        case = replace(CASE, spikes=(Spike("v", (0, 0, 0, 0), "nan"), Spike("q", (0, 0, 0, 0), 4.0)))
        told = restate_by_basic_law(FailingExample("special", case, failed), runner(causal), CLAIMS)
        assert (told.law, told.case) == ("forward", replace(case, spikes=case.spikes[1:]))

    @pytest.mark.parametrize(("wrong", "law"), [({"out", "dv"}, "forward"), ({"lse", "dv"}, "backward")])
    def test_gradients_beside_a_wrong_out_are_told_by_the_forward_law(
        self, wrong: set[str], law: str
    ) -> None:
        failed = finding(wrong)
        assert failed is not None
        assert (
            restate_by_forward(FailingExample("backward", CASE, failed), runner(lambda case: wrong)).law
            == law
        )

    @pytest.mark.parametrize("law", ["memory", "backward"])
    def test_other_laws_tell_of_themselves(self, law: str) -> None:
        assert self.told(causal, law).law == law


def test_tiny_numbers_that_become_0_are_one_bug_whatever_makes_them_tiny() -> None:
    def flush(expected: float, *needs: Condition, **fields: Any) -> Bug:
        case = replace(CASE, dtype="float16", **fields)
        return bug(case, ("dk",), *needs, expected=expected, actual=0.0, relative=1.0)

    of_v, of_scores = flush(7e-6, OF_V), flush(-9e-7, Condition(SCORES, ("other",), ("ordinary",)), seed=1)
    assert of_v.is_like(of_scores)
    assert not of_v.is_like(flush(1e-3, CAUSAL))
    assert not replace(of_v, failure=replace(of_v.failure, case=CASE)).is_like(of_scores)


def test_small_errors_of_some_ordinary_cases_are_one_bug() -> None:
    seldom = Severity(2, 20)
    one, two = (replace(bug(CASE, ("out",), x, relative=1e-6), severity=seldom) for x in (CAUSAL, GROUP))
    assert one.is_like(two)
    assert not one.is_like(replace(two, severity=Severity(20, 20)))
    assert not one.is_like(replace(two, tensors=("dq",), failure=bug(CASE, ("dq",)).failure))
    large = bug(CASE, ("out",), GROUP, relative=0.5)
    assert not one.is_like(replace(large, severity=seldom))


@pytest.mark.parametrize("sentences", [(), (OF_MEMORY,)])
def test_a_record_keeps_whether_uninitialised_memory_decides(sentences: tuple[str, ...]) -> None:
    known = bug(CASE, ("dq",))
    explained = replace(known.failure, explanation=Explanation(sentences))
    record = json.loads(json.dumps(replace(known, failure=explained).to_dict()))
    assert Bug.from_dict(record).failure.explanation.sentences == sentences
