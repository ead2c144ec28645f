"""Calls that are less precise than claimed: when they are a finding of the kernel, and in which words."""

import json
import math
from dataclasses import replace

import pytest

from reference.family import implied
from tests.harness.bugs.bug import Condition, Severity
from tests.harness.bugs.imprecise import Imprecise, ImpreciseCall, sentence
from tests.unit.support.bugs import CASE, CAUSAL, bug


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

    def test_calls_of_two_dtypes_may_be_of_two_designs(self) -> None:
        """Two processes may each have met a call that one design explains."""
        all_calls = Imprecise()
        all_calls.add(self.call("k_prescaled=true"))
        all_calls.add(self.call("tf32=true", dtype="float32"))
        assert all_calls.may_be_meant
        assert sentence(all_calls, ["float16"]).endswith("; no one claim explains those of all dtypes")

    def test_a_bug_of_which_no_more_is_known_explains_what_is_wrong_in_its_case(self) -> None:
        """No ordinary case was tried of it: it may make each tensor less precise that is wrong in its own case."""
        hurried = replace(bug(CASE, ("dq", "lse")), tensors=("lse",))
        assert self.call("k_prescaled=true").is_of(hurried)
        assert not self.call("k_prescaled=true").is_of(replace(hurried, severity=Severity(8, 20)))

    def test_calls_of_one_dtype_that_no_design_explains_together_are_wrong(self) -> None:
        all_calls = Imprecise()
        all_calls.add(self.call("k_prescaled=true"))
        all_calls.add(self.call("q_prescaled=true", ulps=9.0))
        assert not all_calls.may_be_meant
        assert sentence(all_calls, ["float16"]).startswith("2 calls are wrong, dq up to 9 ulps off: ")

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
