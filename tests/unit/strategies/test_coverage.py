"""What a run says it has tried is what a count of its cases gives."""

from itertools import combinations, product
from typing import Any

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import Space
from strategies.coverage import Coverage, Tried, told
from strategies.design import Design
from tests.unit.support.drawing import sample

CLAIMS = Capabilities(
    head_dims=(16, 64), layouts=("contiguous", "bnhd"), grouped_heads=False, sm_scale="default"
)
SPACES = [Space(capabilities=CLAIMS, dtype=dtype) for dtype in CLAIMS.dtypes]


def coverage() -> Coverage:
    return Coverage([Design(SPACES)])


def levels(case: Case) -> dict[str, Any]:
    """Return the levels of a case, counted here by themselves."""
    equal = case.seqlen_q == case.seqlen_k
    length = "whole tiles" if equal and case.seqlen_q and case.seqlen_q % 128 == 0 else "equal"
    if not equal:
        length = "fewer queries" if case.seqlen_q < case.seqlen_k else "more queries"
        length = "one query" if case.seqlen_q == 1 else length
    alike = case.q_layout == case.k_layout == case.v_layout
    families = {case.q_values, case.k_values, case.v_values, case.dout_values}
    return {
        "dtype": case.dtype,
        "causal": case.causal,
        "head_dim": case.head_dim,
        "layout": case.q_layout if alike else None,
        "batch": case.batch,
        "heads_kv": case.heads_kv,
        "numbers": "normal" if families == {"normal"} and not case.spikes else "others",
        "lengths": length,
    }


def test_what_is_told_is_what_a_count_gives() -> None:
    cases = [case for space in SPACES for case in sample(space.strategy(), 15)]
    found = [levels(case) for case in cases]
    pairs = {
        ((x, one[x]), (y, one[y]))
        for one in found
        for x, y in combinations(one, 2)
        if None not in (one[x], one[y])
    }
    tried = coverage().tried(map(coverage().levels_of, cases))
    assert tried.pairs[0] == len(pairs)
    assert tried.levels[0] == len({(x, one[x]) for one in found for x in one if one[x] is not None})


def test_what_a_law_sets_itself_was_not_tried_by_its_cases() -> None:
    case, number = Case(seqlen_q=128, seqlen_k=128, head_dim=64), coverage()
    names = [
        {number.names[i][0] for i in number.levels_of(case, sets)} for sets in ((), ("numbers", "lengths"))
    ]
    assert names[0] - names[1] == {"numbers", "lengths"}


def test_all_is_tried_by_every_combination() -> None:
    number = coverage()
    numbers = [[number.number[axis.name, level] for level in axis.levels] for axis in number.axes.values()]
    tried = number.tried(product(*numbers))
    assert tried.levels == (len(number.names),) * 2
    assert tried.pairs[0] == tried.pairs[1]
    assert tried.triples[0] == tried.triples[1]
    assert told(tried).startswith(
        f"every value, {tried.pairs[0]:,} of {tried.pairs[0]:,} pairs, 100 % of triples"
    )


def test_what_no_case_had_is_named() -> None:
    case = Case(seqlen_q=128, seqlen_k=128, head_dim=64, causal=True)
    number = coverage()
    line = told(number.tried([number.levels_of(case)]))
    assert line.startswith("8 of ")
    assert "head_dim 16" in line
    assert "layout bnhd" in line
    assert "head_dim 64" not in line


def test_levels_are_kept_only_if_three_of_them_are_new() -> None:
    number = coverage()
    one = number.levels_of(Case(seqlen_q=128, seqlen_k=128, head_dim=64))
    other = number.levels_of(Case(seqlen_q=128, seqlen_k=128, head_dim=16))
    assert [number.is_new(x) for x in (one, one, other, one, other)] == [True, False, True, False, False]


def test_nothing_to_combine_leaves_triples_out() -> None:
    assert told(Tried((2, 2), (1, 1), (0, 0), ())) == "every value, 1 of 1 pairs"
