"""The cases of a law have all levels of the claimed fields, then all pairs of levels, in few cases."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from kernels.contract import Capabilities
from kernels.registry import load
from strategies.axes import axes_of
from strategies.case import Case
from strategies.cases import Space
from strategies.design import Design
from strategies.limits import is_affordable
from tests.unit.support.drawing import sample

PLAIN = Capabilities()
VARLEN = load("varlen").capabilities


def spaces_of(claims: Capabilities, device_type: str = "cpu") -> list[Space]:
    return [
        Space(capabilities=claims, dtype=dtype, device_type=device_type, variants=True, key_padding=True)
        for dtype in claims.dtypes
    ]


def steered(design: Design, number: int) -> Iterator[Case]:
    """Yield so many cases of each dtype, as a run tries them."""
    drawn = [sample(space.strategy(), number) for space in design.spaces]
    for place in range(number):
        for cases in drawn:
            yield design.steered(place, cases[place])


@pytest.mark.parametrize("claims", [PLAIN, VARLEN], ids=["plain", "varlen"])
def test_every_level_and_every_pair_is_in_a_row(claims: Capabilities) -> None:
    design = Design(spaces_of(claims))
    levels = {(axis.name, level) for axis in design.axes for level in axis.levels}
    rows = [frozenset(design.row(i).items()) for i in range(400)]
    assert frozenset.union(*rows) == levels
    possible = {
        frozenset((design.pairs.levels[i], design.pairs.levels[j]))
        for i, j in combinations(range(len(levels)), 2)
        if design.pairs.possible[i] >> j & 1
    }
    named = {frozenset((axis.name, level) for axis, level in pair) for pair in possible}
    assert named <= {frozenset(pair) for row in rows for pair in combinations(row, 2)}


def test_a_plain_kernel_needs_hardly_more_rows_than_the_two_largest_fields_have_pairs() -> None:
    design = Design([Space(capabilities=PLAIN, dtype="float32")])
    number = 0
    while number == 0 or any(design.pairs.untried):
        design.row(number)
        number += 1
    largest = sorted(len(axis.levels) for axis in design.axes)[-2:]
    # Every fourth row has usual levels.
    assert number <= 1.5 * largest[0] * largest[1] * 4 / 3


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("claims", [PLAIN, VARLEN], ids=["plain", "varlen"])
def test_cases_with_the_levels_of_rows_are_claimed_and_affordable(
    claims: Capabilities, device_type: str
) -> None:
    design = Design(spaces_of(claims, device_type))
    for case in steered(design, 60):
        assert claims.admits(case), case
        assert is_affordable(case, **design.spaces[0].limits), case


def test_most_cases_have_all_levels_of_their_rows() -> None:
    design = Design(spaces_of(PLAIN, "cuda"))
    wanted = had = 0
    for i, space in enumerate(design.spaces):
        for place, case in enumerate(sample(space.strategy(), 90)):
            row = design.row(3 * place + i)
            given = design.given(case, row)
            wanted += len(row)
            had += sum(axis.level(given) == row[axis.name] for axis in design.axes if axis.name in row)
    assert had > 0.95 * wanted


def test_the_first_case_and_every_other_stay_as_they_are_drawn() -> None:
    design = Design(spaces_of(PLAIN))
    cases = sample(design.spaces[0].strategy(), 9)
    kept = [place for place, case in enumerate(cases) if design.steered(place, case) is case]
    assert kept == [0, 2, 4, 6, 8]


def test_what_models_use_most_comes_at_once_and_often() -> None:
    """Equal lengths in whole tiles, causal, plain layouts, the default scale and normal numbers in one case."""
    cases = list(steered(Design(spaces_of(replace(PLAIN, layouts=("contiguous", "bnhd", "gap")))), 90))
    usual = [
        case
        for case in cases
        if case.causal
        and case.seqlen_q == case.seqlen_k
        and case.seqlen_q % 128 == 0
        and case.head_dim in (64, 128)
        and {*case.layouts} in ({"contiguous"}, {"bnhd"})
        and case.sm_scale is None
        and {case.q_values, case.k_values, case.v_values, case.dout_values} == {"normal"}
        and not case.spikes
    ]
    assert len(usual) > 0.04 * len(cases)
    assert {case.head_dim for case in usual} == {64, 128}
    assert cases.index(usual[0]) < 30


def test_laws_begin_with_different_levels() -> None:
    """So that all laws together try each value of a field in their first examples."""
    claims = replace(PLAIN, head_dims=tuple(range(16, 16 * 13, 16)))
    designs = [Design(spaces_of(claims), first=first) for first in range(0, 12, 3)]
    assert {design.row(i)["head_dim"] for design in designs for i in range(3)} == {*claims.head_dims}


def test_a_design_is_the_same_in_every_process() -> None:
    one, other = (Design(spaces_of(PLAIN), seed="a night") for _ in range(2))
    other.row(50)
    assert [one.row(i) for i in range(60)] == [other.row(i) for i in range(60)]


def test_when_all_pairs_are_tried_other_rows_try_them_again() -> None:
    design = Design([Space(capabilities=replace(PLAIN, head_dims=(64,), layouts=("bnhd",)), dtype="float16")])
    rows = [frozenset(design.row(i).items()) for i in range(300)]
    assert len({*rows[150:]} - {*rows[:150]}) > 20


@pytest.mark.parametrize("claims", [PLAIN, VARLEN], ids=["plain", "varlen"])
def test_a_case_gets_each_level_of_each_axis(claims: Capabilities) -> None:
    spaces = spaces_of(claims, "cuda")
    space = spaces[0]
    cases = sample(space.strategy(), 10)
    for axis in axes_of(space, claims.dtypes):
        for level in axis.levels:
            for case in cases:
                assert axis.level(axis.give(case, level)) == level, (axis.name, level, case)


def test_a_decode_kernel_has_one_query_in_all_cases() -> None:
    claims = replace(PLAIN, max_seqlen_q=1)
    assert {case.seqlen_q for case in steered(Design(spaces_of(claims)), 30)} <= {0, 1}


@pytest.mark.parametrize("multiple", [1, 16, 48])
def test_lengths_stay_multiples_of_what_is_claimed(multiple: int) -> None:
    claims = replace(PLAIN, seqlen_multiple=multiple)
    for case in steered(Design(spaces_of(claims)), 30):
        assert case.seqlen_q % multiple == case.seqlen_k % multiple == 0


def test_rows_have_no_pair_that_no_case_can_have() -> None:
    design = Design(spaces_of(replace(VARLEN, window_right=(0, 8))))
    number = design.pairs.number
    for i in range(120):
        row = design.row(i)
        chosen = [number[item] for item in row.items() if item in number]
        if not 3 <= i % 12 < 6:  # the others have usual levels
            assert all(design.pairs.possible[x] >> y & 1 for x, y in combinations(chosen, 2)), row


def test_large_cases_have_the_sizes_in_their_order() -> None:
    spaces = [Space(capabilities=PLAIN, dtype=dtype, large=True) for dtype in PLAIN.dtypes]
    sizes = spaces[0].scales
    shared = Design(spaces, first=2)
    assert [shared.row(i)["size"] for i in range(len(sizes))] == [*sizes[2:], *sizes[:2]]
    alone = [Design([space], first=at, step=len(spaces)) for at, space in enumerate(spaces)]
    assert [design.row(place)["size"] for place in range(2) for design in alone] == [
        *sizes[: 2 * len(spaces)]
    ]
