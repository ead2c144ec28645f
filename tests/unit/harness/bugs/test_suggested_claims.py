"""Claims are offered that would be true, as far as failing cases tell that were drawn by themselves."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.features import with_value
from tests.harness.bugs.bug import Bug, Condition, Occurrences
from tests.harness.bugs.failure import Failure
from tests.harness.bugs.suggested_claims import excluding
from tests.harness.report.conclusion import DistinctBug, with_offers
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CAUSAL, GROUP, UNEQUAL
from tests.unit.support.stubs import runs_of

CLAIMS = Capabilities(head_dims=(16, 64))
CASE = Case(seqlen_q=70, seqlen_k=90, group=2, heads_kv=2, causal=True)


def test_the_claim_that_excludes_all_that_fail_and_the_fewest_that_hold() -> None:
    failing = [replace(CASE, seqlen_q=n) for n in (3, 5)]
    held = [replace(CASE, seqlen_q=90), replace(CASE, causal=False)]
    assert list(excluding([UNEQUAL], failing, held, CLAIMS)) == ["causal_unequal_lengths=false"]
    assert list(excluding([GROUP], failing, [replace(CASE, group=1)], CLAIMS)) == ["grouped_heads=false"]


def test_a_claim_that_leaves_nothing_is_not_offered() -> None:
    assert list(excluding([GROUP], [CASE], [CASE], CLAIMS)) == []
    assert list(excluding([CAUSAL], [CASE], [replace(CASE, causal=False)], CLAIMS)) == []


def test_layouts_that_held_are_left() -> None:
    need = Condition("k_layout", ("gap",), ("contiguous",))
    held = [CASE, replace(CASE, k_layout="bnhd")]
    assert list(excluding([need], [replace(CASE, k_layout="gap")], held, CLAIMS)) == [
        "layouts=contiguous,bnhd"
    ]


def test_a_list_that_leaves_nearly_nothing_is_not_offered() -> None:
    need = Condition("k_layout", ("gap",), ("contiguous",))
    failing = [replace(CASE, k_layout="gap")]
    held = [CASE, *(replace(CASE, seed=n, v_layout="gap") for n in range(20))]
    assert list(excluding([need], failing, held, CLAIMS)) == []
    assert list(excluding([need], failing, held[:8], CLAIMS)) == ["layouts=contiguous"]


def offers(
    drawn: Iterable[Case], shrunk: Iterable[Case], answered: Sequence[Case] = (), need: Condition = GROUP
) -> tuple[str, ...]:
    found = Finding(claim="so", kind="error", tensor="out", tensors=("out",))
    failure = Failure("k.py:f", (), "forward", CASE, kernel="k", finding=found, environment={})
    one = Bug(failure, ("out",), (need,), offers=("grouped_heads=false",))
    seen = Occurrences()
    for case in drawn:
        seen.add("forward", case, "out")
    seen.keep(("forward", case) for case in shrunk)
    runs = runs_of(CLAIMS)
    return with_offers(DistinctBug(one, seen), runs, answered, lambda: None).offers


def test_cases_of_one_shrinking_do_not_support_an_offer() -> None:
    shrunk = [replace(CASE, seqlen_k=n) for n in range(1, 9)]
    drawn = [replace(CASE, seed=n) for n in range(3)]
    assert offers(drawn[:2], shrunk) == ()
    assert offers(drawn, shrunk) == ("--claims grouped_heads=false: all 3 failing cases are excluded",)


def test_cases_of_one_shrinking_can_refute_an_offer() -> None:
    drawn = [replace(CASE, seed=n) for n in range(3)]
    assert offers(drawn, [replace(CASE, group=1)]) == ()


def test_what_all_failing_cases_have_in_common_is_offered_where_the_first_ones_said_something_else() -> None:
    need = Condition("k_layout", ("gap",), ("contiguous",))
    drawn = [
        with_value(replace(CASE, group=1), layout, "gap") for layout in ("q_layout", "k_layout", "v_layout")
    ]
    told = ("--claims layouts=contiguous: all 3 failing cases are excluded",)
    assert offers(drawn, (), [*drawn, CASE], need) == told
    assert offers(drawn, (), drawn, need) == ()
