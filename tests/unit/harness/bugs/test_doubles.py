"""What would tell one bug twice is told once, and two bugs that look alike stay two."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from strategies.features import BLIND, HIDDEN, SCORES, SEEN, pair_of
from tests.harness.bugs.attribution import FailingExample, Outcome, explain_by_known_bugs
from tests.harness.bugs.bug import Bug, Condition, Severity
from tests.harness.bugs.duplicates import met_again, why_same
from tests.harness.bugs.failure import Failure
from tests.harness.bugs.imprecise import Imprecise
from tests.harness.bugs.restatement import restate_by_basic_law
from tests.harness.clock import Clock, ShrinkBudget
from tests.harness.diagnosis.conditions import ConditionSearch
from tests.harness.diagnosis.investigation import Investigation
from tests.harness.diagnosis.known_bugs import KnownBugs
from tests.harness.diagnosis.reruns import without_design_of_strides
from tests.harness.diagnosis.triage import Triage
from tests.harness.law import law_named
from tests.harness.report.conclusion import merged
from tests.harness.run import ALL_DESIGNS, ONE_DESIGN
from tests.harness.running.runs import Try
from tests.harness.symptoms import is_of_format
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CAUSAL, CLAIMS, bug
from tests.unit.support.running import TOYS
from tests.unit.support.stubs import runs_of

NO_NUMBERS = Finding(claim="so", kind="nonfinite", tensor="out", tensors=("out", "lse"), nan=16, total=16)
"""All of out is NaN, so that gradients are not judged."""


def wrong(*tensors: str, **fields: Any) -> Finding | None:
    """Return the finding that these tensors are wrong; None if there are none."""
    if not tensors:
        return None
    return Finding(**{"claim": "so", "kind": "error", "tensor": tensors[0], "tensors": tensors, **fields})


class TestTheCaseThatIsLeft:
    """Rows that see no key are NaN. To cure them the lengths change, and then another bug shows."""

    OF_MASK = bug(Case(seqlen_q=9, seqlen_k=8, causal=True), ("out",), Condition(BLIND, (HIDDEN,), (SEEN,)))
    MADE_NAN = replace(OF_MASK.failure.finding, kind="nonfinite")
    BLIND_ROWS = replace(OF_MASK, failure=replace(OF_MASK.failure, finding=MADE_NAN))
    REMAINDER = bug(Case(seqlen_k=5), ("out",), Condition("seqlen_k", (5,), (0, 4, 32, 64)))
    DRAWN = Case(seqlen_q=129, seqlen_k=32, causal=True)

    @staticmethod
    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        if case.causal and case.seqlen_q > case.seqlen_k:
            return wrong("out", kind="nonfinite")
        return wrong("out") if case.seqlen_k % 4 else None

    def outcome(self, run: Try, *known: Bug, drawn: Case = DRAWN) -> Outcome:
        found = run("forward", drawn, frozenset())
        assert found is not None
        return explain_by_known_bugs(FailingExample("forward", drawn, found), known, run, CLAIMS)

    def test_a_bug_that_a_cure_brings_in_explains_what_is_left(self) -> None:
        outcome = self.outcome(self.run, self.REMAINDER, self.BLIND_ROWS)
        assert outcome.rest is None
        assert outcome.blamed == [self.BLIND_ROWS, self.REMAINDER]

    def test_what_no_known_bug_explains_is_left(self) -> None:
        outcome = self.outcome(self.run, self.BLIND_ROWS)
        assert outcome.blamed == [self.BLIND_ROWS]
        assert outcome.rest is not None
        assert outcome.rest.finding.kind == "error"

    @pytest.mark.parametrize("always", [False, True])
    def test_nan_is_not_of_a_bug_that_makes_numbers_wrong_where_no_row_is_blind(
        self, *, always: bool
    ) -> None:
        """Lengths that fill their tiles leave no blind row, so that they cure NaN as well as wrong numbers."""

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            is_nan = always and case.seqlen_k % 4
            return wrong("out", kind="nonfinite") if is_nan else self.run(law, case, ignored)

        outcome = self.outcome(run, self.REMAINDER, drawn=replace(self.DRAWN, seqlen_q=33, seqlen_k=31))
        assert outcome.blamed == ([self.REMAINDER] if always else [])

    def test_an_lse_of_blind_rows_that_is_elsewhere_is_of_a_bug_that_mixes_up_rows(self) -> None:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            is_blind = case.causal and case.seqlen_q > case.seqlen_k
            kind = "nonfinite" if is_blind else "error"
            return wrong("lse", kind=kind, neginf=int(is_blind)) if case.heads_kv > 1 else None

        mixed = bug(Case(heads_kv=2), ("lse",), Condition("heads_kv", (2,), (1,)))
        assert self.outcome(run, mixed, drawn=replace(self.DRAWN, heads_kv=2)).rest is None

    def test_nan_that_stays_is_another_bug(self) -> None:
        outcome = self.outcome(lambda *_: wrong("out", kind="nonfinite"), self.BLIND_ROWS)
        assert not outcome.blamed
        assert outcome.rest is not None


class TestFoundBesideAnother:
    """k is read by the strides of v: with one key head all is NaN, with two the gradients are wrong numbers."""

    LAYOUTS = Condition(pair_of("k", "v"), ("other",), ("contiguous",))
    HEADS = Condition("heads_kv", (2,), (1,))
    SMALL = Case(seqlen_k=2, k_layout="gap")

    def found(self, at_one_head: Finding | None, *tensors: str) -> bool:
        """Whether gradients that are wrong with two key heads come from a known bug of the layouts."""
        known = bug(self.SMALL, ("lse", "out", *tensors), self.LAYOUTS)
        beside = bug(replace(self.SMALL, heads_kv=2), ("dk", "dv"), self.HEADS, self.LAYOUTS, law="backward")
        ignored = frozenset({"lse", "out"})
        beside = replace(beside, failure=replace(beside.failure, ignored=ignored))

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            if case.k_layout == "contiguous":
                return None
            if case.heads_kv == 1:
                return None if "out" in ignored else at_one_head
            return wrong(*({"out", "lse", "dk", "dv"} - ignored))

        return bool(why_same(known, beside, run, CLAIMS) and why_same(beside, known, run, CLAIMS))

    def test_gradients_that_are_not_judged_without_a_field_do_not_need_it(self) -> None:
        assert self.found(NO_NUMBERS)

    def test_gradients_that_are_right_without_a_field_are_another_bug(self) -> None:
        assert not self.found(wrong("out", "lse"))

    @pytest.mark.parametrize("is_right", [True, False])
    def test_gradients_that_ordinary_numbers_show_without_a_field_do_not_need_it(
        self, *, is_right: bool
    ) -> None:
        """Two bugs need the same two lengths; unless ``is_right``, dq is wrong wherever out is wrong."""
        rows, keys = Condition("seqlen_q", (65,), (64,)), Condition("seqlen_k", (129,), (128,))
        known = bug(Case(seqlen_q=65, seqlen_k=129), ("lse", "out"), rows, keys)
        needs = replace(rows, fails=(66,), holds=(65, 64)), replace(keys, fails=(254,), holds=(253, 128))
        beside = bug(Case(seqlen_q=66, seqlen_k=254), ("dq",), *needs, law="backward")
        beside = replace(beside, failure=replace(beside.failure, ignored=frozenset({"lse", "out"})))

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            if case.seqlen_q <= 64 or case.seqlen_k <= 128:
                return None
            gradients = {"dq"} if case == beside.failure.case or not is_right else set()
            return wrong(*({"out", "lse", *gradients} - ignored))

        assert bool(why_same(known, beside, run, CLAIMS)) != is_right

    def test_gradients_that_the_known_bug_spoils_elsewhere_are_its_own(self) -> None:
        assert self.found(wrong("out", "lse"), "dv")

    def test_what_the_known_bug_does_not_show_without_a_field_is_another_bug(self) -> None:
        assert not self.found(None, "dv")


class TestSpoiledByOtherNumbers:
    """A causal mask is wrong. In a short case with nothing else, few numbers make dv wrong too."""

    DRAWN = Case(batch=2, seqlen_q=9, seqlen_k=9, causal=True, v_layout="gap")

    def blamed(self, shows_in_dv: Callable[[Case], bool]) -> list[Bug]:
        """Return the known bug with all tensors that it is blamed for, once dv is wrong beside out."""

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            found = ["out", *(["dv"] if shows_in_dv(case) else [])] if case.causal else []
            return wrong(*(x for x in found if x not in ignored))

        found = run("backward", self.DRAWN, frozenset())
        assert found is not None
        known = bug(Case(seqlen_q=2, causal=True), ("out",), CAUSAL)
        return explain_by_known_bugs(
            FailingExample("backward", self.DRAWN, found), [known], run, CLAIMS
        ).blamed

    def test_a_tensor_that_other_numbers_show_is_of_the_same_bug(self) -> None:
        (blamed,) = self.blamed(lambda case: case.batch > 1 or case.seed == 5 or case.seqlen_q > 64)
        assert blamed.tensors == ("dv", "out")

    def test_a_tensor_that_needs_more_is_not(self) -> None:
        (blamed,) = self.blamed(lambda case: case.v_layout == "gap" or case.seqlen_q > 64)
        assert blamed.tensors == ("out",)


class TestTheGradientOfABias:
    """A soft-cap is wrong. Its smallest case has no bias, so that it cannot show whether dbias is wrong as well."""

    CASE = Case(seqlen_q=9, seqlen_k=9, softcap=20.0, bias="full")
    CLAIMS = replace(CLAIMS, softcap=(0.0, 1.5, 20.0), bias=("none", "full"), bias_gradient=True)
    KNOWN = bug(Case(softcap=1.5), ("lse", "out"), Condition("softcap", (1.5,), (0.0,)))

    def blamed(self, shows_in_dbias: Callable[[Case], bool]) -> list[Bug]:
        """Return the known bug with all tensors that it is blamed for, once dbias is wrong beside out."""

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            of_cap = ("out", "lse") if case.softcap else ()
            of_bias = ("dbias",) if case.bias != "none" and shows_in_dbias(case) else ()
            return wrong(*(x for x in (*of_cap, *of_bias) if x not in ignored))

        found = run("backward", self.CASE, frozenset())
        assert found is not None
        return explain_by_known_bugs(
            FailingExample("backward", self.CASE, found), [self.KNOWN], run, self.CLAIMS
        ).blamed

    def test_is_of_a_bug_that_it_shows_whenever_there_is_a_bias(self) -> None:
        (blamed,) = self.blamed(lambda case: bool(case.softcap))
        assert blamed.tensors == ("dbias", "lse", "out")

    def test_is_of_another_bug_if_it_is_wrong_without_what_that_one_needs(self) -> None:
        (blamed,) = self.blamed(lambda case: True)
        assert blamed.tensors == ("lse", "out")


class TestCallsInOtherLayouts:
    """A law that makes a v of its own calls the kernel with k and v in two layouts, whatever those of the case are."""

    CASE = Case(
        heads_kv=2,
        seqlen_k=2,
        k_layout="gap",
        v_layout="gap",
        spikes=(Spike("k", (0, 0, 0, 0), "-inf"), Spike("q", (0, 0, 0, 0), 1.0)),
    )

    def test_a_law_tells_the_layouts_of_its_calls(self) -> None:
        trial = Trial(load("tests.several:corners__only__k_by_strides_of_v"), self.CASE, "cpu", SAFETY)
        with pytest.raises(LawBroken):
            law_named("special")(trial)
        told = {(size["k_layout"], size["v_layout"]) for size in trial.sizes}
        assert ("gap", "contiguous") in told
        assert ("gap", "gap") not in told

    def test_rows_of_a_tensor_count_as_laid_out(self) -> None:
        case = Case(heads_kv=2, seqlen_q=3, seqlen_k=2, seed=1)
        trial = Trial(load(f"{TOYS}:sound"), case, "cpu", SAFETY)
        law_named("composition")(trial)
        assert ("bnhd", 2) in {(size["q_layout"], size["seqlen_q"]) for size in trial.sizes}

    def test_a_plain_law_tells_the_failure_in_the_layouts_of_a_call(self) -> None:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            return wrong("out") if case.k_layout != case.v_layout else None

        failed = wrong("out")
        assert failed is not None
        for v_layout, law in (("contiguous", "forward"), ("gap", "special")):
            broken = FailingExample("special", self.CASE, failed, sizes=({"v_layout": v_layout},))
            assert restate_by_basic_law(broken, run, CLAIMS).law == law

    @pytest.mark.parametrize(("in_elements", "law"), [(True, "backward"), (False, "unbiased")])
    def test_a_mean_is_told_by_its_elements_if_these_are_wrong(self, *, in_elements: bool, law: str) -> None:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            is_shown = law == "backward" and case.q_values == "normal" and in_elements
            return wrong("dk") if is_shown else None

        failed = wrong("dq")
        assert failed is not None
        broken = FailingExample("unbiased", replace(self.CASE, q_values="zeros"), failed)
        assert restate_by_basic_law(broken, run, CLAIMS).law == law


class TestAnotherSequence:
    """A sequence gets the weights of another one, which differ where there are many keys, or where they are NaN."""

    SEVERAL = Condition("batch", (2,), (1,))
    LARGE = Condition(SCORES, ("other",), ("ordinary",))
    LONG = bug(Case(batch=2, seqlen_k=17), ("out",), Condition("seqlen_k", (17,), (16,)), SEVERAL)
    OF_NAN = Case(batch=2, spikes=(Spike(tensor="q", index=(0, 0, 0, 14), value="nan"),))

    @staticmethod
    def holds(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return None

    def test_what_nan_shows_at_any_length_is_the_bug_of_long_sequences(self) -> None:
        by_nan = bug(self.OF_NAN, ("out",), self.SEVERAL, self.LARGE, law="special")
        assert why_same(self.LONG, by_nan, self.holds, CLAIMS)
        assert why_same(by_nan, self.LONG, self.holds, CLAIMS)

    @pytest.mark.parametrize("need", [CAUSAL, Condition("group", (2,), (1,))])
    def test_nan_that_shows_elsewhere_is_another_bug(self, need: Condition) -> None:
        by_nan = bug(replace(self.OF_NAN, causal=True, group=2), ("out",), need, self.LARGE, law="special")
        assert not why_same(self.LONG, by_nan, self.holds, CLAIMS)

    def test_a_mask_may_be_wrong_and_let_nan_through(self) -> None:
        of_mask = bug(Case(causal=True), ("out",), CAUSAL)
        by_nan = bug(replace(self.OF_NAN, causal=True), ("out",), CAUSAL, self.LARGE, law="special")
        assert not why_same(of_mask, by_nan, self.holds, CLAIMS)


class TestLargeScales:
    """A tail is not masked. At a large sm_scale one key has all weight, so that out is right by chance."""

    NOT_CAUSAL = Condition("causal", (False,), (True,))
    TAIL = bug(Case(), ("lse", "out"), NOT_CAUSAL)
    SCALED = bug(Case(sm_scale=1.0), ("lse",), NOT_CAUSAL)

    @staticmethod
    def tail(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        found = () if case.causal else ("lse",) if case.sm_scale else ("lse", "out")
        return wrong(*(x for x in found if x not in ignored))

    def test_a_scale_that_a_bug_does_not_need_does_not_tell_it_apart(self) -> None:
        assert why_same(self.TAIL, self.SCALED, self.tail, CLAIMS)
        assert why_same(self.SCALED, self.TAIL, self.tail, CLAIMS)

    def test_a_bug_that_needs_its_scale_keeps_it(self) -> None:
        """Another bug makes lse wrong where a scale is given, and is not that of the default."""
        scale = Condition("sm_scale", (1.0,), (None,))
        of_scale = replace(self.SCALED, needs=(self.NOT_CAUSAL, scale))
        assert not why_same(self.TAIL, of_scale, self.tail, CLAIMS)

    def test_out_that_is_right_at_the_default_scale_is_another_bug(self) -> None:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            is_tail = case.seqlen_k % 2 == 1
            found = () if case.causal else ("lse", "out") if is_tail else ("lse",)
            return wrong(*(x for x in found if x not in ignored))

        of_lse = bug(Case(seqlen_k=2, sm_scale=1.0), ("lse",), self.NOT_CAUSAL)
        assert not why_same(self.TAIL, of_lse, run, CLAIMS)


class TestRoundings:
    """A cast to a format of few bits shows in all cases of float32, and in bfloat16 only as tiny numbers that are 0."""

    DTYPE = Condition("dtype", ("float32",), ("float16", "bfloat16"))
    LARGE = Condition(SCORES, ("other",), ("ordinary",))
    OF_RANGE = replace(
        bug(Case(seqlen_k=4, dtype="bfloat16", q_values="wide"), ("out",), LARGE, expected=3e-8, actual=0.0),
        severity=Severity(0, 20),
    )
    EVERYWHERE = replace(bug(Case(seqlen_k=2), ("out",), DTYPE, relative=1e-4), severity=Severity(20, 20))
    OF_V, LENGTH = Condition("v_values", ("huge",), ("normal",)), Condition("seqlen_k", (65,), (0, 64))
    LARGE_V = Case(seqlen_k=65, dtype="bfloat16", v_values="huge")

    def test_others_know_of_a_bug_while_it_is_looked_into_unless_it_turns_out_to_be_none(
        self, tmp_path: Any
    ) -> None:
        finder, other = (KnownBugs("k", "float32", tmp_path, verbose=False) for _ in range(2))
        finder.announce(self.OF_RANGE)
        other.learn()
        assert [*other.bugs] == [self.OF_RANGE.key]
        assert not finder.bugs
        finder.withdraw(self.OF_RANGE.failure)
        other.learn()
        assert not other.bugs

    def known_after(self, bug: Bug, tmp_path: Any) -> tuple[Bug | None, list[Bug]]:
        """Return what a bug is known as if that of the range was found first, and the bugs that explain failures."""
        known = KnownBugs("k", "float32", tmp_path, verbose=False)
        known.add(self.OF_RANGE)

        def hard(law: str, case: Case, *_: Any, **options: Any) -> Finding | None:
            return wrong("out", relative=1e-4) if case.dtype == "float32" else None

        runs = runs_of(CLAIMS, judged=hard, clock=Clock(), device_type="cpu")
        triage = Triage(runs, known, {}, ShrinkBudget(0.0))
        known_as = triage._same_as(bug)
        known.learn()
        return known_as, list(known.bugs.values())

    def test_a_bug_that_always_shows_takes_the_place_of_one_that_needs_numbers(self, tmp_path: Any) -> None:
        assert why_same(self.EVERYWHERE, self.OF_RANGE, lambda *_: None, CLAIMS)
        assert self.known_after(self.EVERYWHERE, tmp_path) == (None, [])

    @pytest.mark.parametrize(("expected", "told"), [(3e-6, True), (0.3, False)])
    def test_any_scale_above_the_default_one_may_make_a_tiny_weight(
        self, expected: float, *, told: bool
    ) -> None:
        case, needs = Case(seqlen_k=7, sm_scale=0.3), (Condition("sm_scale", (0.3,), (1.0, None)), self.OF_V)
        unequal = Condition("lengths", ("more keys than queries",), ("equal",))
        for more in ((), (unequal,)):
            found = bug(
                case, ("out",), *needs, *more, relative=0.01, expected=expected, actual=1.01 * expected
            )
            assert bool(why_same(self.EVERYWHERE, found, lambda *_: None, CLAIMS)) == told

    def test_another_bug_leaves_it_as_it_is(self, tmp_path: Any) -> None:
        other = replace(bug(Case(causal=True), ("lse",), CAUSAL), severity=Severity(9, 20))
        assert self.known_after(other, tmp_path) == (None, [self.OF_RANGE])

    def test_a_bug_that_ordinary_cases_do_not_show_keeps_its_needs(self) -> None:
        again = bug(Case(seqlen_k=2, v_values="wide"), ("out",))
        assert met_again(self.OF_RANGE, again).needs == (self.LARGE,)
        assert not met_again(replace(self.OF_RANGE, severity=Severity(20, 20)), again).needs

    @pytest.mark.parametrize(
        ("relative", "kind", "case", "needs", "expected"),
        [
            (1e-4, "nonfinite", LARGE_V, (OF_V,), True),
            (1e-4, "nonfinite", LARGE_V, (OF_V, LENGTH), True),
            (2e-3, "nonfinite", LARGE_V, (OF_V,), False),
            (1e-4, "nonfinite", LARGE_V, (OF_V, CAUSAL), False),
            (1e-4, "nonfinite", LARGE_V, (LARGE,), False),
            (1e-4, "nonfinite", LARGE_V, (LENGTH,), False),
        ],
    )
    @pytest.mark.parametrize("shown", [9, 11, 20])
    def test_a_format_of_narrow_range_makes_gradients_of_large_numbers_nan(
        self, relative: float, kind: str, case: Case, needs: tuple[Condition, ...], expected: bool, shown: int
    ) -> None:
        """Most ordinary cases show the roundings, if not all."""
        rounds = bug(Case(seqlen_k=2), ("out",), self.DTYPE, relative=relative)
        rounds, expected = replace(rounds, severity=Severity(shown, 20)), expected and shown > 10
        large = bug(case, ("dk", "dq"), *needs, law="backward")
        overflows = replace(large, failure=replace(large.failure, finding=replace(NO_NUMBERS, tensor="dq")))
        for one, other in ((rounds, overflows), (overflows, rounds)):
            assert bool(why_same(one, other, lambda *_: None, CLAIMS)) == expected
        forward = replace(overflows, tensors=("out",))
        assert not why_same(rounds, forward, lambda *_: None, CLAIMS)

    def test_roundings_whose_numbers_overflow_in_another_dtype_need_either(self) -> None:
        large = bug(self.LARGE_V, ("dq",), self.OF_V, law="backward")
        (need,) = met_again(self.EVERYWHERE, large).needs
        assert (need.fails, need.holds) == (("float32", "bfloat16"), ("float16",))
        elsewhere = replace(self.EVERYWHERE, needs=(Condition("dtype", ("float32",), ("bfloat16",)),))
        assert not met_again(elsewhere, large).needs

    @pytest.mark.parametrize(("ordinary", "expected"), [(0.5, False), (1e-4, True)])
    def test_a_large_error_is_of_roundings_if_ordinary_numbers_make_it_small(
        self, ordinary: float, expected: bool
    ) -> None:
        tail = bug(Case(seqlen_k=65), ("out",), self.LENGTH, relative=1.0)

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            return wrong("out", relative=ordinary)

        assert bool(why_same(self.EVERYWHERE, tail, run, CLAIMS)) == expected

    @pytest.mark.parametrize(("relative", "expected"), [(3e-4, {"dq", "out"}), (2e-3, {"out"})])
    def test_gradients_follow_from_roundings_that_are_as_large(
        self, relative: float, expected: set[str]
    ) -> None:
        """In half of the cases the error of dq is above its bound."""
        relatives = {"out": 1e-4, "dq": relative}

        def is_wrong(law: str, case: Case, ignored: frozenset[str], *_: Any) -> Finding | None:
            found = [x for x in ("out", *(["dq"] if case.seed % 2 else [])) if x not in ignored]
            return wrong(*found, relative=relatives[found[0]]) if found else None

        runs = runs_of(CLAIMS, judged_raw=is_wrong, device_type="cpu")
        search = ConditionSearch(runs, self.EVERYWHERE.failure)
        assert search.always_wrong(lambda: None) == expected

    def test_what_few_rows_leave_wrong_beside_it_is_of_another_bug(self) -> None:
        """One bug makes out wrong from 9 keys on, another one dk in any case."""

        def is_wrong(law: str, case: Case, *_: Any) -> Finding | None:
            return wrong("dk", *(["out"] if case.seqlen_k > 8 else []))

        runs = runs_of(CLAIMS, judged_raw=is_wrong, device_type="cpu")
        for tensor in ("out", "dk"):
            found = ConditionSearch(runs, bug(Case(seqlen_k=9), (tensor,)).failure)
            assert found.always_wrong(lambda: None) == {tensor}

    @pytest.mark.parametrize(
        ("found", "expected"),
        [
            ({"relative": 0.5}, False),
            ({"relative": 0.5, "expected": 0.25, "actual": 0.0}, False),
            ({"relative": 0.5, "expected": 0.0, "actual": 1.0}, False),
            ({"relative": 0.5, "expected": 3e-8, "actual": 0.0}, True),
            ({"relative": 1e-4}, True),
        ],
    )
    def test_small_errors_and_tiny_numbers_that_are_lost_are_of_a_format(
        self, found: dict[str, Any], expected: bool
    ) -> None:
        finding = wrong("out", **found)
        assert finding is not None
        assert is_of_format(finding) == expected

    @pytest.mark.parametrize(
        ("drawn", "smaller", "fails"), [(0.5, 0.4, True), (0.5, 1e-4, False), (1e-4, 1e-5, True)]
    )
    def test_wrong_numbers_are_not_shrunk_to_those_of_a_cast(
        self, drawn: float, smaller: float, fails: bool
    ) -> None:
        found = {relative: wrong("out", relative=relative) for relative in (drawn, smaller)}
        case, small = Case(seqlen_q=9), Case()
        runs: Any = SimpleNamespace(judged=lambda *_, **__: found[smaller], clock=Clock())
        finding = found[drawn]
        assert finding is not None
        failure = Failure("k", (), "forward", case, kernel="k", finding=finding, environment={})
        known: Any = SimpleNamespace(bugs={}, precision=Imprecise())
        alike = Investigation(runs, failure, known, ShrinkBudget(0.0)).alike(small)
        assert (alike is not None) == fails


def test_a_call_that_a_law_makes_is_asked_about_every_less_precise_design(tmp_path: Any) -> None:
    """The law itself was, and a call of it is told instead. The first design that explains it may be another one."""
    known = KnownBugs("k", "float16", tmp_path, verbose=False)
    case = Case(seqlen_k=2, dtype="float16")
    known.is_less_precise(FailingExample("forward", case, found_imprecise("own=true")))

    def hard(law: str, case: Case, *_: Any, designs: str = ONE_DESIGN, **options: Any) -> Finding | None:
        return found_imprecise("other=true", *(["own=true"] if designs == ALL_DESIGNS else []))

    runs = runs_of(CLAIMS, judged=hard, clock=Clock())
    triage = Triage(runs, known, {}, ShrinkBudget(0.0))
    assert (
        triage._unsorted(FailingExample("invariance", case, found_imprecise("own=true")), patient=True)
        is None
    )
    assert known.imprecise.total == 2
    assert not known.bugs


@pytest.mark.parametrize("is_of_strides", [True, False])
def test_no_design_explains_what_huge_strides_alone_show(*, is_of_strides: bool) -> None:
    def hard(law: str, case: Case, *_: Any, **options: Any) -> Finding | None:
        return None if is_of_strides and case.k_layout != "huge" else found_imprecise("own=true")

    runs = runs_of(CLAIMS, judged=hard, clock=Clock())
    case = Case(seqlen_k=2, dtype="float16", k_layout="huge")
    left = without_design_of_strides(FailingExample("forward", case, found_imprecise("own=true")), runs)
    assert bool(left.finding.explained_by) != is_of_strides


def found_imprecise(*claims: str) -> Finding:
    """Return the finding that out is wrong, which each of these claims would explain."""
    return Finding(claim="so", kind="error", tensor="out", tensors=("out",), explained_by=claims)


class TestTheEndOfAProcess:
    """A crash costs the start of a process, so that little is known of what it needs."""

    ALWAYS = replace(bug(Case(seqlen_k=6), ()), severity=Severity(3, 3))
    LONG = bug(Case(seqlen_k=24), (), Condition("seqlen_k", (24,), (16,)))
    OF_LENGTHS = bug(Case(seqlen_k=24), (), Condition("lengths", ("more keys than queries",), ("equal",)))
    GROUPED = bug(Case(group=2), (), Condition("group", (2,), (1,)))

    @staticmethod
    def ends(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return TestTheEndOfAProcess.ALWAYS.failure.finding

    def test_what_ends_every_ordinary_case_in_the_same_words_is_one_bug(self) -> None:
        assert why_same(self.ALWAYS, self.LONG, self.ends, CLAIMS)
        assert why_same(self.GROUPED, self.ALWAYS, self.ends, CLAIMS)
        sometimes = replace(self.ALWAYS, severity=Severity(2, 3))
        assert why_same(sometimes, replace(self.ALWAYS, severity=Severity()), self.ends, CLAIMS)
        assert not why_same(sometimes, self.GROUPED, self.ends, CLAIMS)
        words = replace(self.LONG.failure.finding, claim="it runs, but ended with signal 6")
        otherwise = replace(self.LONG, failure=replace(self.LONG.failure, finding=words))
        assert not why_same(self.ALWAYS, otherwise, self.ends, CLAIMS)

    def test_crashes_that_need_the_same_are_one_bug_and_others_are_two(self) -> None:
        assert why_same(self.LONG, self.OF_LENGTHS, self.ends, CLAIMS)
        assert not why_same(self.LONG, self.GROUPED, self.ends, CLAIMS)

    def test_a_find_is_compared_with_all_finds_of_a_bug(self) -> None:
        worst = replace(self.LONG, severity=Severity(3, 3))
        assert len(merged(dict(zip("abc", (worst, self.ALWAYS, self.GROUPED), strict=True)), {})) == 1
        assert len(merged({"a": worst, "b": self.GROUPED}, {})) == 2

    def test_a_law_of_parts_meets_a_crash_of_sizes_whatever_its_case_has(self) -> None:
        found = self.LONG.failure.finding
        assert self.LONG.ends_parts(found)
        assert not self.LONG.ends_parts(replace(found, claim="it runs, but ended with signal 6"))
        assert not bug(Case(causal=True), (), CAUSAL).ends_parts(found)
        assert not self.ALWAYS.ends_parts(found)


class TestHiddenNan:
    """Where one bug needs large scores and another hides NaN, ordinary scores cure both."""

    OF_SCORES = Condition(SCORES, ("other",), ("ordinary",))
    LARGE = bug(Case(seqlen_q=2, spikes=(Spike("q", (0, 0, 0, 0), 20.0),)), ("out",), OF_SCORES)
    HIDING = bug(
        Case(spikes=(Spike("k", (0, 0, 0, 0), "nan"),)), ("out",), OF_SCORES, law="special", of_nan=("lost",)
    )

    @pytest.mark.parametrize("rows", [1, 2])
    def test_it_is_a_bug_of_its_own_unless_large_scores_show_the_other_in_one_row(self, rows: int) -> None:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            is_nan = any(isinstance(spike.value, str) for spike in case.spikes)
            return wrong("out") if case.spikes and (is_nan or case.seqlen_q >= rows) else None

        assert bool(why_same(self.LARGE, self.HIDING, run, CLAIMS)) == (rows == 1)
        assert bool(why_same(self.HIDING, self.LARGE, run, CLAIMS)) == (rows == 1)

    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_bug_that_its_own_law_shows_without_the_nan_may_be_to_blame(self, is_there: bool) -> None:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            shown = case.spikes if law == "special" else is_there
            return wrong("out") if case.causal and shown else None

        case = replace(self.HIDING.failure.case, causal=True)
        hidden = wrong("out", of_nan=("lost",))
        assert hidden is not None
        known = bug(Case(causal=True), ("out",), CAUSAL)
        outcome = explain_by_known_bugs(FailingExample("special", case, hidden), [known], run, CLAIMS)
        assert (outcome.rest is None) == is_there
