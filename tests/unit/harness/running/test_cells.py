"""Cells of the space of cases: which ones a case is in, which ones a kernel claims, and how they are counted."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import cases
from tests.harness.report.results import Results
from tests.harness.running.tally import Tally, by_field, cells, claimed, is_judged, remainder
from tests.harness.verdict import Verdict
from tests.unit.support.reports import info, item

SMALL = Capabilities(
    dtypes=("float16",),
    head_dims=(16, 48, 64),
    layouts=("contiguous", "gap"),
    grouped_heads=False,
    sm_scale="positive",
    launch={"block_m": (16, 32)},
)


@pytest.mark.parametrize(
    ("length", "expected"), [(64, "0"), (65, "1"), (127, "63"), (2, "other"), (100, "other")]
)
def test_a_length_is_told_by_what_is_left_after_whole_tiles(length: int, expected: str) -> None:
    assert remainder(length, 64) == expected
    assert f"seqlen_k mod 64={expected}" in cells(Case(seqlen_k=length))


def test_head_dims_that_are_padded_to_the_same_power_of_two_are_one_cell() -> None:
    found = [
        x
        for x in claimed(Capabilities(head_dims=(1, 2, 3, 64, 65, 96, 127, 128)))
        if x.startswith("head_dim")
    ]
    padded = "head_dim=between 64 and 128"
    assert found == [*(f"head_dim={x}" for x in ("1", "2", "between 2 and 4", "64")), padded, "head_dim=128"]
    assert padded in cells(Case(head_dim=80))


@pytest.mark.parametrize("length", [0, 1])
def test_the_lengths_0_and_1_are_cells_of_their_own(length: int) -> None:
    found = cells(Case(seqlen_q=length, seqlen_k=16))
    assert [x for x in found if x.startswith("seqlen_q")] == [f"seqlen_q={length}"]


@settings(max_examples=60)
@given(case=cases(SMALL, dtype="float16"))
def test_every_cell_of_a_drawn_case_is_claimed(case: Case) -> None:
    assert set(cells(case)) <= set(claimed(SMALL))


def test_what_a_kernel_does_not_claim_is_no_cell_of_it() -> None:
    found = set(claimed(SMALL))
    assert {"sm_scale=default", "sm_scale=0.5", "block_m=32", "q_layout=gap", "seqlen_k=0"} <= found
    assert not {"sm_scale=-1.0", "sm_scale=0.0", "group=2", "q_layout=packed", "head_dim=32"} & found
    few = set(claimed(replace(SMALL, min_seqlen=4, max_seqlen_q=8)))
    assert "seqlen_q mod 16=other" in few
    assert "seqlen_q mod 16=15" not in few
    multiples = set(claimed(replace(SMALL, min_seqlen=1, seqlen_multiple=32, backward=False)))
    lengths = [x for x in multiples if x.startswith("seqlen_q mod")]
    assert sorted(lengths) == [
        "seqlen_q mod 128=0",
        "seqlen_q mod 128=other",
        "seqlen_q mod 16=0",
        "seqlen_q mod 32=0",
        "seqlen_q mod 64=0",
        "seqlen_q mod 64=other",
    ]
    assert not any(x.startswith(("dout", "seqlen_q=")) for x in multiples)


def test_values_that_were_never_drawn_have_0_examples_and_fields_of_one_value_are_left_out() -> None:
    found = by_field(claimed(SMALL), {"head_dim=16": 3, "head_dim=32": 4})
    assert found["head_dim"] == {"16": 3, "between 32 and 64": 0, "64": 0}
    assert not {"dtype", "group", "window"} & set(found)


@pytest.mark.parametrize(
    ("law", "cell", "expected"),
    [
        ("forward", "q_values=wide", True),
        ("exact", "q_values=wide", False),
        ("exact", "q_layout=gap", True),
        ("forward", "dout_layout=gap", False),
        ("backward", "dout_layout=gap", True),
        ("rejection", "head_dim=16", False),
    ],
)
def test_an_example_counts_under_laws_that_judge_it(law: str, cell: str, expected: bool) -> None:
    assert is_judged(law, cell) == expected


def test_only_answered_cases_count_and_the_summary_has_the_sum_of_all_items() -> None:
    one, two = Tally(), Tally()
    one.add(Verdict(status="held"), Case(group=2))
    one.add(Verdict(status="refused"), Case(group=3))
    two.add(Verdict(status="broken"), Case(group=2))
    results = Results([info("f"), info("g")])
    for tally, law in ((one, "forward"), (two, "memory"), (two, "rejection")):
        counts = {**item("f", law, "float32"), "tally": tally.to_dict()}
        results.add(json.loads(json.dumps(counts)))
    assert results.coverage()["f"]["group"] == {"1": 0, "2": 2, "3": 0, "4": 0, "5": 0, "8": 0}
    assert results.to_dict({}, [])["coverage"] == results.coverage()
    assert "cells" not in results.to_dict({}, [])["results"][0]
