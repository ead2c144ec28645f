"""The calls that a certificate is asked of are claimed, ordinary, and have what the bug needs."""

from dataclasses import replace
from itertools import combinations

from kernels.contract import Capabilities
from strategies.case import LAYOUT_FIELDS, Case, Spike
from tests.harness.certificates.probes import SMALL, further, probes

CLAIMS = Capabilities(backward=True)
FAILING = Case(
    group=4,
    seqlen_q=3,
    head_dim=32,
    dtype="float16",
    q_values="zeros",
    spikes=(Spike("q", (0, 0, 0, 0), 1.0),),
)


def test_they_are_claimed_small_and_of_ordinary_numbers() -> None:
    asked = [*probes(FAILING, CLAIMS, ())]
    assert len(asked) > 10
    assert all(CLAIMS.admits(case) and case.scores <= SMALL for case in asked)
    assert all(case.q_values == "normal" and not case.spikes for case in asked)
    assert {case.dtype for case in asked} == {"float16"}


def test_what_is_no_need_has_several_values() -> None:
    asked = [*probes(FAILING, CLAIMS, ())]
    assert {case.causal for case in asked} == {True, False}
    assert len({case.group for case in asked}) > 1
    assert len({case.sm_scale for case in asked}) > 1


def test_needs_stay() -> None:
    asked = [*probes(FAILING, CLAIMS, {"group", "causal"})]
    assert {case.group for case in asked} == {4}
    assert {case.causal for case in asked} == {False}
    assert {case.causal for case in probes(FAILING, replace(CLAIMS, causal=(False,)), ())} == {False}


def test_lengths_that_are_needed_are_near_the_failing_ones() -> None:
    asked = [*probes(replace(FAILING, seqlen_k=300), CLAIMS, {"lengths"})]
    lengths = {(case.seqlen_q, case.seqlen_k) for case in asked}
    assert (3, 300) in lengths
    assert len(lengths) > 10
    assert {(3, 4), (3, 3), (299, 300)} == {x for x in lengths if abs(x[0] - x[1]) < 2}
    assert min(keys for rows, keys in lengths if keys > rows + 1) > 290


def test_what_a_need_is_made_of_stays() -> None:
    failing = replace(FAILING, causal=True, seqlen_q=80)
    assert {case.causal for case in probes(failing, CLAIMS, {"blind rows"})} == {True}
    assert {case.group for case in probes(failing, CLAIMS, {"heads_q"})} == {4}


def test_a_call_of_many_scores_has_one_sequence() -> None:
    asked = [*probes(replace(FAILING, seqlen_q=130, seqlen_k=130), CLAIMS, {"seqlen_q"})]
    assert (258, 258) in {(case.seqlen_q, case.seqlen_k) for case in asked}
    assert all(case.scores <= SMALL for case in asked)


def test_further_calls_are_others_of_the_same_kind() -> None:
    asked, more = [*probes(FAILING, CLAIMS, {"group"})], [*further(FAILING, CLAIMS, {"group"})]
    assert {case.group for case in more} == {4}
    assert {(case.seqlen_q, case.seqlen_k) for case in asked}.isdisjoint(
        (case.seqlen_q, case.seqlen_k) for case in more
    )
    assert {case.k_layout for case in more} == {"contiguous"}


def test_further_calls_mix_layouts_if_the_failing_case_has_several() -> None:
    more = further(replace(FAILING, v_layout="bnhd"), CLAIMS, ())
    assert len({(case.q_layout, case.k_layout, case.v_layout) for case in more}) > 3


def test_half_of_the_calls_mix_layouts_if_the_failing_case_has_several() -> None:
    asked = [*probes(replace(FAILING, v_layout="gap"), CLAIMS, ())]
    own = [case for case in asked if case.v_layout == "gap"]
    assert 0.3 < len(own) / len(asked) < 0.7
    mixed = [case for case in asked if case not in own]
    for one, other in combinations(LAYOUT_FIELDS, 2):  # no tensor always lies as another one does
        assert len({getattr(case, one) == getattr(case, other) for case in mixed}) == 2, (one, other)
    assert {case.causal for case in mixed} == {True, False}


def test_of_a_scale_that_is_needed_only_the_sign_stays() -> None:
    asked = [*probes(replace(FAILING, sm_scale=-1.0), CLAIMS, {"sm_scale"})]
    assert len({case.sm_scale for case in asked}) > 2
    assert all(case.sm_scale is not None and case.sm_scale < 0 for case in asked)
    assert {case.sm_scale for case in probes(replace(FAILING, sm_scale=0.0), CLAIMS, {"sm_scale"})} == {0.0}
