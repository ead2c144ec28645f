"""Bugs are told apart. A kernel is a function of a case here, which says at once which tensors are wrong in it."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.contract import KnownFailure
from reference.family import implied
from strategies.case import Case, Spike
from strategies.features import SCORES, with_value
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.avoidance import Avoided, steer_away
from tests.harness.bugs.bug import Bug, Condition, Occurrences, Severity, in_parts, met_again
from tests.harness.bugs.counterfactuals import needs_of
from tests.harness.bugs.dense import ORDINARY, ordinary_cases, symptoms_apart_from_forward
from tests.harness.bugs.duplicates import is_same
from tests.harness.bugs.imprecise import Imprecise, ImpreciseCall, sentence
from tests.harness.bugs.restatement import restate_by_basic_law, restate_by_forward
from tests.harness.diagnosis.known_bugs import MOST_BLAMED, MOST_BLAMED_IN_DOUBT, KnownBugs
from tests.harness.diagnosis.shrink import RUNS, shrunk_in_few_runs
from tests.harness.report.conclusion import merged, replaced
from tests.harness.report.ledger import Ledger
from tests.harness.report.wording import annotation, conditions_of, rank, severity, told
from tests.harness.symptoms import is_in_common, is_not_cured, is_small
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
    all_laid_out,
    any_of,
    bug,
    causal,
    finding,
    grouped,
    long_lse,
    runner,
)


@pytest.mark.parametrize(
    ("need", "text"),
    [
        (Condition("sm_scale", (None,), (1.0,)), "sm_scale other than 1.0"),
        (Condition("sm_scale", (0.0,), (None, 1.0)), "sm_scale 0"),
        (Condition("sm_scale", (0.0,), (None,)), "sm_scale other than default"),
        (Condition("sm_scale", (-0.125,), (None, 1.0)), "negative sm_scale"),
        (Condition("sm_scale", (-0.125,), (None,)), "sm_scale other than default"),
        (Condition("sm_scale", (-0.125,), (-1.0, 1.0)), "sm_scale other than -1.0 or 1.0"),
        (Condition("seqlen_k", (65,), (0, 64)), "seqlen_k above 64"),
        (Condition("seqlen_k", (65,), (64, 128)), "seqlen_k no multiple of 64"),
        (
            Condition("seqlen_k", (129,), (127, 128, 256), is_certain=True),
            "seqlen_k above and no multiple of 128",
        ),
        (Condition("seqlen_k", (1,), (2, 3)), "seqlen_k below 2"),
        (Condition("seqlen_k", (0,), (1,)), "no keys"),
        (Condition("seqlen_k", (2,), (1, 3)), "certain seqlen_k"),
        (Condition("heads_kv", (3,), (2, 4)), "odd heads_kv"),
        (Condition("heads_kv", (3,), (2,)), "heads_kv above 2"),
        (Condition("group", (2, 3), (1, 4)), "group 2"),
        (Condition("window", (116,), (0,)), "window above 0"),
        (Condition("softcap", (5.0,), (0.0,)), "softcap above 0.0"),
        (CAUSAL, "causal True"),
        (Condition("ragged", ("paged", "cache"), ("none",)), "ragged cache or paged"),
        (Condition("bias", ("full", "of_keys"), ("none",)), "bias full"),
    ],
)
def test_what_a_bug_needs_in_words(need: Condition, text: str) -> None:
    assert conditions_of(bug(CASE, ("dk",), need)) == f"only with {text}"


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
        assert not is_same(known, bug(CASE, ("dq",), CAUSAL), runner(of_two), CLAIMS)
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
        assert is_same(known, again, run, CLAIMS)
        assert not is_same(known, bug(CASE, ("out",), CAUSAL, GROUP), run, CLAIMS)
        assert not is_same(bug(CASE, ("lse",), CAUSAL), bug(CASE, ("dq",), CAUSAL), run, CLAIMS)
        assert (
            not is_same(known, again, runner(any_of(causal, grouped)), CLAIMS)
            or again.failure.case.group == 1
        )

    def test_bugs_that_need_the_same_in_one_tensor_are_one_whatever_else_is_wrong(self) -> None:
        known, again = bug(CASE, ("out", "lse"), CAUSAL), bug(replace(CASE, seqlen_k=7), ("out",), CAUSAL)
        always = runner(any_of(causal, lambda case: {"out"}))
        assert is_same(known, again, always, CLAIMS)
        assert not is_same(bug(CASE, ("lse",), CAUSAL), bug(CASE, ("dv",), CAUSAL), always, CLAIMS)

    def test_bugs_of_one_tensor_that_go_away_by_different_fields_are_two(self) -> None:
        of_group, of_mask = bug(CASE, ("out",), GROUP), bug(replace(CASE, group=1), ("out",), CAUSAL)
        assert not is_same(of_group, of_mask, runner(any_of(causal, grouped)), CLAIMS)

    def test_an_lse_that_is_always_wrong_is_not_what_makes_gradients_wrong(self) -> None:
        always = runner(lambda case: {"lse", "dv"})
        assert not is_same(bug(CASE, ("lse",)), bug(CASE, ("dv",), law="backward"), always, CLAIMS)
        assert is_same(bug(CASE, ("lse",)), bug(replace(CASE, group=1), ("lse",)), always, CLAIMS)

    def test_repeats_of_any_call_that_differ_are_one_bug_in_any_tensor(self) -> None:
        """Memory that an earlier call has left behind may spoil another tensor in each repeat."""
        dq, dv = bug(CASE, ("dq",), law="determinism"), bug(CASE, ("dv",), law="memory")
        assert dq.is_like(dv)
        assert is_same(dq, dv, runner(lambda case: {"dq", "dv"}), CLAIMS)
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
            return all(x.is_like(y) and is_same(x, y, run, CLAIMS) for x, y in ((one, other), (other, one)))

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
        assert is_same(always, bug(replace(CASE, seqlen_k=65), ("lse",), LONG), runner(long_lse), CLAIMS)

    def test_roundings_to_one_format_are_one_bug_in_all_dtypes(self) -> None:
        """In float32 they always show, in bfloat16 only with some numbers, and in float16 they are right."""
        of_dtype = Condition("dtype", ("float32",), ("float16",))
        small: dict[str, Any] = {"relative": 1e-3}
        large: dict[str, Any] = {"relative": 0.5}
        always = replace(bug(CASE, ("out",), of_dtype, **small), severity=Severity(20, 20))
        steer_away = replace(CASE, dtype="bfloat16", v_values="outliers")
        run = runner(lambda case: {"dv", "out"} if case.dtype != "float16" else set())
        assert always.is_everywhere
        assert is_same(always, bug(steer_away, ("dv", "out"), OF_V, GROUP, **small), run, CLAIMS)
        assert not is_same(always, bug(steer_away, ("dv", "out"), OF_V, GROUP, **large), run, CLAIMS)
        assert is_same(always, bug(CASE, ("out",), GROUP, **small), run, CLAIMS)
        assert not is_same(always, bug(CASE, ("out",), GROUP, **large), run, CLAIMS)

    def test_what_is_less_precise_after_a_change_is_cured_of_wrong_numbers(self) -> None:
        """Beside a bug of roundings, which a less precise design explains."""

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            return finding({"out"}) if case.causal else finding({"out"}, explained_by=("tf32=true",))

        known, again = bug(CASE, ("out",), CAUSAL), bug(replace(CASE, group=1), ("out",), CAUSAL, LONG)
        assert is_same(known, again, run, CLAIMS)
        small = bug(replace(CASE, group=1), ("out",), CAUSAL, LONG, relative=1e-3)
        assert not is_same(known, small, run, CLAIMS)

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

        assert is_same(nan(CAUSAL), nan(CAUSAL, LONG), run, CLAIMS)
        assert not is_same(bug(CASE, ("out",), CAUSAL), bug(CASE, ("out",), GROUP), run, CLAIMS)

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

    def test_equations_between_gradients_do_not_hold_at_a_wrong_lse(self) -> None:
        failed = finding({"dk"})
        assert failed is not None
        told = restate_by_basic_law(
            FailingExample("identities", CASE, failed), runner(lambda case: {"lse"}), CLAIMS
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


class TestElsewhere:
    def known(self, **where: tuple[Any, ...]) -> KnownFailure:
        return KnownFailure(what="", laws=("forward",), case=None, where=where, device="cpu", torch=("",))

    def test_a_case_of_a_known_failure_is_run_with_a_field_that_holds(self) -> None:
        closed = Avoided(
            (self.known(k_layout=("gap", "offset")), self.known(causal=(True,), sm_scale=(0.0,)))
        )
        case = replace(CASE, k_layout="gap", q_layout="gap", sm_scale=0.0)
        assert steer_away(case, closed, CLAIMS) == replace(case, k_layout="contiguous", sm_scale=None)

    def test_a_case_that_meets_nothing_stays(self) -> None:
        assert steer_away(CASE, Avoided((self.known(group=(3,)),)), CLAIMS) == CASE

    @pytest.mark.parametrize("where", [{}, {"dtype": ("float32",)}])
    def test_a_case_that_cannot_be_told_apart_is_left_out(self, where: Any) -> None:
        assert steer_away(CASE, Avoided((self.known(**where),)), CLAIMS) is None

    def test_what_is_run_instead_is_claimed(self) -> None:
        claims = replace(CLAIMS, layouts=("bnhd", "gap"), causal=(True,))
        closed = Avoided((self.known(causal=(True,), q_layout=("gap",)),))
        case = all_laid_out(CASE, "gap")
        moved = steer_away(case, closed, claims)
        assert moved == replace(case, q_layout="bnhd")
        assert moved is not None
        assert claims.admits(moved)

    def test_a_size_moves_to_the_nearest(self) -> None:
        closed = Avoided((self.known(seqlen_k=tuple(range(80, 100))),))
        moved = steer_away(CASE, closed, CLAIMS)
        assert moved is not None
        assert moved.seqlen_k in (79, 100)

    def test_a_bug_is_left_by_one_of_what_it_needs(self) -> None:
        closed = Avoided((), (bug(CASE, (), CAUSAL, GROUP),))
        moved = steer_away(CASE, closed, CLAIMS)
        assert moved == replace(CASE, causal=False)

    @pytest.mark.parametrize(("missed", "most"), [(0, MOST_BLAMED), (1, MOST_BLAMED_IN_DOUBT)])
    def test_cases_are_run_elsewhere_later_if_the_bug_needs_more_than_is_known(
        self, tmp_path: Path, missed: int, most: int
    ) -> None:
        known = KnownBugs("k", "float32", tmp_path, verbose=False)
        found = replace(bug(CASE, ("out",), CAUSAL), severity=Severity(8, 20, missed))
        known.add(found)
        assert most > 1
        for blamed in range(most):
            assert not known.closed("forward"), blamed
            known.count(found, "forward", CASE, "out")
        assert known.closed("forward") == (found,)

    def test_failing_examples_of_other_processes_count_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known, other, of_float16 = (
            KnownBugs("k", dtype, tmp_path, verbose=False) for dtype in ("float32", "float32", "float16")
        )
        found = bug(CASE, ("out",), CAUSAL)
        known.add(found)
        monkeypatch.setattr("tests.harness.report.ledger.os.getpid", lambda: 1)
        for _ in range(MOST_BLAMED):
            other.count(found, "forward", CASE, "out")
        monkeypatch.undo()
        for one in (known, of_float16):
            one.learn()
        assert known.closed("forward") == (found,)
        assert of_float16.closed("forward") == ()

    @pytest.mark.parametrize(
        ("fields", "stays"),
        [
            ({"sm_scale": 0.0}, True),
            ({"sm_scale": -0.01}, True),
            ({"sm_scale": 30.0}, False),
            ({"sm_scale": 0.01, "q_values": "outliers"}, False),
        ],
    )
    def test_a_bug_of_large_scores_leaves_small_ones_to_be_tried(self, fields: Any, stays: bool) -> None:
        large = replace(CASE, sm_scale=30.0)
        case = replace(CASE, **fields)
        for need in (
            Condition(SCORES, ("other",), ("ordinary",)),
            Condition("sm_scale", (30.0,), (None, 1.0)),
        ):
            moved = steer_away(case, Avoided((), (bug(large, ("out",), need),)), CLAIMS)
            assert (moved == case) == (stays if need.name == SCORES else case.sm_scale == 0)

    def test_a_bug_of_finite_large_scores_leaves_nan_to_be_tried(self) -> None:
        large, nan = (Spike("q", (0, 0, 0, 0), x) for x in (30.0, "nan"))
        found = bug(replace(CASE, spikes=(large,)), ("out",), Condition(SCORES, ("other",), ("ordinary",)))
        for spike, stays in ((large, False), (nan, True)):
            case = replace(CASE, spikes=(spike,))
            assert (steer_away(case, Avoided((), (found,)), CLAIMS) == case) == stays


class TestGently:
    def reduced(self, case: Case, fails: Callable[[Case], bool]) -> tuple[Case, list[str], int]:
        runs: list[Case] = []

        def counted(case: Case) -> bool:
            runs.append(case)
            return fails(case)

        *_, (smallest, needs) = shrunk_in_few_runs(case, counted, CLAIMS)
        return smallest, [need.name for need in needs], len(runs)

    def test_one_layout_is_found_in_few_runs(self) -> None:
        case = replace(CASE, q_layout="bnhd", v_layout="gap", k_values="wide", head_dim=64)
        smallest, needs, runs = self.reduced(case, lambda c: c.v_layout == "gap")
        assert needs == ["v_layout"]
        assert smallest == replace(case, q_layout="contiguous", k_values="normal", seqlen_q=16, seqlen_k=16,
            heads_kv=1, group=1, causal=False, head_dim=16)  # fmt: skip
        assert runs <= RUNS

    def test_no_keys_and_no_queries_are_needs_and_no_unequal_lengths(self) -> None:
        for name, fails in (
            ("seqlen_k", lambda c: c.seqlen_k == 0 < c.seqlen_q),
            ("seqlen_q", lambda c: c.seqlen_q == 0 < c.seqlen_k),
        ):
            case = with_value(CASE, name, 0)
            smallest, needs, runs = self.reduced(case, fails)
            assert needs == [name]
            assert sorted((smallest.seqlen_q, smallest.seqlen_k)) == [0, 16]
            assert runs <= RUNS

    def test_of_unequal_lengths_one_may_be_0(self) -> None:
        smallest, needs, _ = self.reduced(replace(CASE, seqlen_k=0), lambda c: c.seqlen_q > c.seqlen_k)
        assert needs == ["lengths"]
        assert smallest.seqlen_k == 1

    def test_huge_strides_of_any_tensor_are_one_need(self) -> None:
        case = all_laid_out(CASE, "huge")
        assert self.reduced(case, lambda c: c.k_layout == "huge")[1] == ["huge"]

    def test_a_length_is_narrowed_down(self) -> None:
        case = replace(CASE, seqlen_k=290)
        smallest, needs, runs = self.reduced(case, lambda c: c.seqlen_k > 128)
        assert needs == ["seqlen_k"]
        assert 128 < smallest.seqlen_k < 200
        assert runs <= RUNS + 3


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


LAWS_OF_THREE = ("additivity", "backward", "composition")
"""The laws that found three bugs."""


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
        assert replaced(f"see {twin.key}/report.md", found) == f"see {one.key}/report.md"

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

        def is_same(one: Bug, other: Bug) -> bool:
            compared.append({one.failure.law, other.failure.law})
            return {second, third} <= compared[-1]

        assert len(merged(found, seen, is_same)) == 2
        assert sorted(compared[:2], key=sorted) == [{first, second}, {second, third}]
        assert compared[2:] == [{first, third}]

    def test_bugs_of_a_common_tensor_are_compared_before_others(self) -> None:
        tensors, needs = (("out",), ("dk",), ("lse", "dk")), (CAUSAL, GROUP, LONG)
        found = {
            name: bug(CASE, wrong, need, law=name)
            for name, wrong, need in zip(LAWS_OF_THREE, tensors, needs, strict=True)
        }
        compared: list[set[str]] = []

        def is_same(one: Bug, other: Bug) -> bool:
            compared.append({one.failure.law, other.failure.law})
            return False

        assert len(merged(found, {}, is_same)) == 3
        assert compared[0] == {*LAWS_OF_THREE[1:]}


class TestLessPrecise:
    def call(self, *explained_by: str, dtype: str = "float16", ulps: float = 2.0) -> ImpreciseCall:
        return ImpreciseCall("backward", replace(CASE, dtype=dtype), "dq", explained_by, ulps, 1.5)

    def test_one_claim_that_explains_every_call_is_one_finding(self) -> None:
        all_calls = Imprecise()
        for call in (self.call("k_prescaled=true", "tf32=true"), self.call("k_prescaled=true", ulps=12.0)):
            assert all_calls.explains_also(call)
            all_calls.add(call)
        assert sentence(all_calls, ["float16"]) == (
            "consistent with `k_prescaled`: less precise than FlashAttention-2, dq up to 12 ulps off; "
            "if that is meant, `--claims k_prescaled=true`"
        )
        assert sentence(all_calls, ["float16", "float32"]) == sentence(all_calls, ["float16"])
        assert "`--claims float16:k_prescaled=true`" in sentence(all_calls, ["float16", "bfloat16"])

    @pytest.mark.parametrize(
        ("ulps", "told_of"), [(1.0, "dq up to 1 ulp off;"), (math.inf, "dq off where it should be 0;")]
    )
    def test_the_largest_error_is_told(self, ulps: float, told_of: str) -> None:
        all_calls = Imprecise()
        all_calls.add(replace(self.call("k_prescaled=true"), ulps=ulps))
        assert told_of in sentence(all_calls, ["float16"])

    def test_other_claims_that_explain_every_call_are_named(self) -> None:
        all_calls = Imprecise()
        all_calls.add(self.call("k_prescaled=true", "rounded_scores=true"))
        told_of = sentence(all_calls, ["float16"])
        assert told_of.startswith("consistent with `k_prescaled` (or rounded_scores=true): less precise")
        assert told_of.endswith("`--claims k_prescaled=true`")

    def test_the_claim_that_most_calls_make_likely_is_offered(self) -> None:
        """Another claim may come nearer to single calls. That does not rule out the one that explains all of them."""
        all_calls, both = Imprecise(), self.call("q_prescaled=true", "rounded_scores=true")
        for likely in ("q_prescaled=true", "rounded_scores=true", "rounded_scores=true"):
            assert all_calls.explains_also(both)
            all_calls.add(replace(both, likely=(likely,)))
        assert sentence(all_calls, ["float16"]).startswith("consistent with `rounded_scores`: less precise")

    def test_a_pair_of_claims_explains_what_either_does(self) -> None:
        all_calls, (pair,) = Imprecise(), implied(["rounded_partials=true"])[1:]
        for claims in (["rounded_partials=true"], ["merged_by_difference=true"], [pair]):
            call = self.call(*implied(claims))
            assert all_calls.explains_also(call)
            all_calls.add(call)
        assert sentence(all_calls, ["float16"]).startswith(
            "consistent with `rounded_partials` with `merged_by_difference`: less precise"
        )
        assert sentence(all_calls, ["float16"]).endswith(
            "`--claims rounded_partials=true --claims merged_by_difference=true`"
        )

    def test_calls_that_a_bug_explains_are_not_told_of(self) -> None:
        all_calls = Imprecise()
        all_calls.add(self.call("k_prescaled=true"))
        assert all_calls.are_of([bug(CASE, ("dq", "dk"))])
        assert not all_calls.are_of([bug(CASE, ("dv",))])
        assert all_calls.are_of([bug(CASE, ("out",), CAUSAL)])  # gradients follow from out
        assert not all_calls.are_of(
            [bug(CASE, ("out",))]
        )  # where it is always wrong, nothing is known of them
        assert not all_calls.are_of([bug(CASE, ("dq",), Condition("causal", (False,), (True,)))])

    def test_a_call_that_needs_another_claim_is_none_of_them(self) -> None:
        all_calls = Imprecise()
        all_calls.add(self.call("k_prescaled=true"))
        assert not all_calls.explains_also(self.call("l_from_rounded_p=true", dtype="float32"))

    def test_what_items_remember_merges(self) -> None:
        one, two = Imprecise(), Imprecise()
        one.add(self.call("a=true", "b=true"))
        two.add(self.call("b=true", dtype="float32", ulps=7.0))
        one.merge(Imprecise.from_dict(json.loads(json.dumps(two.to_dict()))))
        assert (one.total, one.common, one.ulps) == (2, ["b=true"], {"dq": 7.0})


class TestLedger:
    def test_processes_read_what_others_wrote(self, tmp_path: Path) -> None:
        one, two = Ledger(tmp_path / "x" / "bugs.jsonl"), Ledger(tmp_path / "x" / "bugs.jsonl")
        one.append({"kernel": "k"})
        assert [record["kernel"] for record in two.news()] == ["k"]
        assert two.news() == []

    def test_half_a_line_is_read_when_it_is_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "bugs.jsonl"
        path.write_text('{"a": 1, "process": 1}\n{"a": 2, ')
        ledger = Ledger(path)
        assert [record["a"] for record in ledger.news()] == [1]
        path.write_text('{"a": 1, "process": 1}\n{"a": 2, "process": 1}\n')
        assert [record["a"] for record in ledger.news()] == [2]

    def test_an_investigation_of_another_process_is_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, two = Ledger(tmp_path / "bugs.jsonl"), Ledger(tmp_path / "bugs.jsonl")
        with one.investigating("k", "forward"):
            two.news()
            assert not two.is_busy("k")  # the investigation is this process's own
            monkeypatch.setattr("tests.harness.report.ledger.os.getpid", lambda: 1)
            assert two.is_busy("k")
            assert two.is_busy("k", "forward")
            assert not two.is_busy("k", "gradients")
            assert not two.is_busy("another")
            monkeypatch.undo()
        two.news()
        monkeypatch.setattr("tests.harness.report.ledger.os.getpid", lambda: 1)
        assert not two.is_busy("k")

    def test_a_folder_that_cannot_be_written_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        ledger = Ledger(tmp_path / "file" / "bugs.jsonl")
        ledger.append({})
        assert ledger.news() == []

    def test_a_law_of_large_scores_is_told_with_ordinary_numbers_if_these_fail(self) -> None:
        case = replace(CASE, q_values="zeros", spikes=(Spike("v", (0, 0, 0, 0), 4.0),))
        failed = finding({"out"})
        assert failed is not None
        ordinarily = runner(lambda case: {"out"} if case.q_values == "normal" else set())
        told = restate_by_basic_law(FailingExample("exact", case, failed), ordinarily, CLAIMS)
        assert (told.law, told.case) == ("forward", replace(case, q_values="normal", spikes=()))
        assert (
            restate_by_basic_law(FailingExample("identities", case, failed), ordinarily, CLAIMS).law
            == "identities"
        )


@pytest.mark.parametrize(("kind", "tensor", "expected"), [("memory", "q", True), ("memory", "out", False)])
def test_a_write_to_an_input_hides_numbers(kind: str, tensor: str, expected: bool) -> None:
    """Numbers can't be judged if the kernel has changed an input, so no other bug counts as absent from the case."""
    found = Finding(claim="so", kind=kind, tensor=tensor)
    assert found.hides_numbers == expected
    mine = Finding(claim="so", kind="error", tensor="dk")
    assert is_not_cured(mine, found) == expected


@pytest.mark.parametrize(("tensor", "expected"), [("dq", True), ("lse", False)])
def test_what_is_not_finite_hides_gradients(tensor: str, expected: bool) -> None:
    mine = Finding(claim="so", kind="error", tensor=tensor)
    assert is_not_cured(mine, Finding(claim="so", kind="nonfinite", tensor="out")) == expected
    assert not is_not_cured(mine, Finding(claim="so", kind="nonfinite", tensor="dv"))


@pytest.mark.parametrize(("tensor", "expected"), [("dq", False), ("lse", True)])
def test_roundings_of_a_tensor_are_not_its_wrong_numbers(tensor: str, expected: bool) -> None:
    """Of lse an error is as small where one of many keys is left out."""
    mine, found = (
        Finding(claim="so", kind="error", tensor=tensor, relative=relative) for relative in (1.0, 1e-3)
    )
    assert is_in_common(mine, found) == expected
    assert is_in_common(found, mine)
    assert is_in_common(replace(mine, tensor="out", tensors=("out", tensor)), found) is False
    assert is_in_common(mine, replace(found, tensor="out", tensors=("out", tensor)))
