"""The conditions of a bug are what other cases, lengths and numbers show them to be."""

from dataclasses import replace

from strategies.case import Case, Spike
from strategies.features import SCORES, UNEQUAL
from strategies.size_rules import ABOVE, Rule
from tests.harness.bugs.bug import Condition
from tests.harness.bugs.duplicates import met_again
from tests.harness.bugs.failure import Explanation
from tests.harness.diagnosis.conditions import ConditionSearch, diagnosed, explained
from tests.harness.diagnosis.explanation import fields
from tests.unit.support.bugs import CASE, CAUSAL, CLAIMS, LONG, bug, causal, left, runner
from tests.unit.support.stubs import runs_of


def test_what_is_told_of_the_smallest_case_corrects_the_needs_of_the_drawn_one() -> None:
    of_batch, of_scores = Condition("batch", (2,), (1,)), Condition(SCORES, ("other",), ("ordinary",))
    smallest = Case(batch=2, seqlen_k=2, sm_scale=0.5, causal=False)
    known = bug(smallest, ("dq",)).failure

    def told(*names: str) -> list[Condition]:
        fields_ = fields(smallest, lambda case: bool(case.sm_scale) and not case.causal, CLAIMS)
        chosen = tuple(x for x in fields_ if x.name in names)
        return explained([of_batch, of_scores], replace(known, explanation=Explanation(fields=chosen)))

    assert told() == [of_batch, of_scores]
    (kept, of_scale) = told("batch", "sm_scale", "causal", "seqlen_k")
    assert kept == of_scores
    assert (of_scale.name, of_scale.fails, set(of_scale.holds)) == ("sm_scale", (0.5,), {None})


def search(case: Case) -> ConditionSearch:
    """Return the search for what a bug needs, whose smallest case is given."""
    runs = runs_of(CLAIMS)
    return ConditionSearch(runs, bug(case, ("out",)).failure)


def test_bugs_with_more_queries_and_with_more_keys_are_two() -> None:
    def more_keys(case: Case) -> set[str]:
        return {"out"} if case.causal and case.seqlen_k > case.seqlen_q else set()

    lengths = search(CASE).other_way_round(lambda case: bool(more_keys(case)))
    assert lengths == ["more queries than keys"]
    known = bug(
        CASE, ("out",), CAUSAL, Condition("lengths", ("more keys than queries",), ("equal", *lengths))
    )
    rest, _ = left(causal, replace(CASE, seqlen_q=90, seqlen_k=70), known)
    assert rest is not None
    assert search(CASE).other_way_round(lambda case: bool(causal(case))) == []


def test_an_entry_that_hides_a_bug_the_other_way_round_does_not_make_it_two() -> None:
    entry = replace(CASE, dout_values="zeros", spikes=(Spike("dout", (0, 0, 0, 0), 1.0),))

    def shows(case: Case) -> bool:
        return case.seqlen_k > case.seqlen_q or (case.seqlen_q > case.seqlen_k and not case.spikes)

    assert search(entry).other_way_round(shows) == []


def test_a_number_of_heads_holds_only_if_ordinary_numbers_do_not_show_the_bug_in_it() -> None:
    case = replace(CASE, heads_kv=3, group=1, dout_values="zeros")

    def fails(case: Case) -> bool:
        """Fail if the last of an odd number of heads has numbers, which of zeros only the third one has."""
        return case.heads_kv % 2 == 1 and (case.dout_values == "normal" or case.heads_kv == 3)

    assert search(case).with_ordinary_numbers("heads_kv", (2, 4, 7), fails) == (2, 4)
    assert search(case).with_ordinary_numbers("heads_kv", (2, 4, 7), lambda case: case.heads_kv == 3) == (
        2,
        4,
        7,
    )


def test_a_bug_of_lengths_that_is_met_at_another_length_still_needs_some() -> None:
    """Else it would explain whatever is wrong in its tensors."""
    certain = bug(replace(CASE, seqlen_k=61), ("lse",), Condition("seqlen_k", (61,), (0, 60, 62, 64)))
    (need,) = met_again(certain, bug(replace(CASE, seqlen_k=62), ("lse",))).needs
    assert (need.fails, need.holds, need.rule) == ((61, 62), (0, 60, 64), None)
    assert need.is_met(replace(CASE, seqlen_k=62))
    assert not need.is_met(replace(CASE, seqlen_k=64))
    above = bug(replace(CASE, seqlen_k=65), ("lse",), Condition("seqlen_k", (65,), (0, 64)))
    (need,) = met_again(above, bug(replace(CASE, seqlen_k=9), ("lse",))).needs
    assert need.is_met(replace(CASE, seqlen_k=9))
    above = bug(replace(CASE, seqlen_k=59), ("lse",), Condition("seqlen_k", (59,), (0, 32, 58)))
    (need,) = met_again(above, bug(replace(CASE, seqlen_k=58), ("lse",))).needs
    assert need.rule == Rule(ABOVE, 32)


def test_a_length_of_which_no_other_is_known_to_hold_may_be_any() -> None:
    unknown = Condition("seqlen_q", (4,), ())
    assert unknown.rule is None
    assert unknown.is_met(CASE)


def test_tensors_that_few_numbers_hide_are_told_by_normal_ones() -> None:
    """A key that is dropped makes dq wrong, unless k is 0; another bug makes dv wrong whatever the lengths are."""

    def wrong(case: Case) -> set[str]:
        dropped = {"out", "dk"} | ({"dq"} if case.k_values == "normal" else set())
        return {"dv"} | (dropped if case.seqlen_k > 64 else set())

    run = runner(wrong)
    runs = runs_of(CLAIMS, judged_raw=lambda law, case, ignored, *_: run(law, case, ignored))
    smallest = Case(seqlen_k=65, k_values="zeros", q_values="zeros")
    found = ConditionSearch(runs, bug(smallest, ("out",)).failure)
    assert found.tensors_of((LONG,), [smallest], lambda: None) == {"out", "dk", "dq"}
    by_numbers = Condition("qk_values", ("zeros",), ("normal",))
    assert "dq" not in found.tensors_of((LONG, by_numbers), [smallest], lambda: None)


def test_a_long_length_that_matters_is_told_by_the_power_of_two_beyond_which_it_does() -> None:
    """Equal lengths, both as long as the longer one, are not tried: they would take too long."""
    long = replace(CASE, seqlen_q=10, seqlen_k=4098)
    found = [*diagnosed(long, lambda case: case.seqlen_k > 1024, CLAIMS)]
    (keys,) = (need for need in found if need.name == "seqlen_k")
    assert (keys.rule, keys.begins_beyond) == (Rule(ABOVE, 1024), 1024)
    assert not any(need.name == UNEQUAL for need in found)
