"""What a report says beyond numbers: each sentence is said if the data shows it, and only then."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract import Capabilities
from kernels.contract.parsing import parse_claims
from strategies.case import TENSORS, Case, Spike
from tests.harness.bugs.failure import Explanation, Field
from tests.harness.clock import BudgetSpent, meter
from tests.harness.diagnosis.explanation import causes, explain, fields
from tests.harness.report.folder import can_draw, draw
from tests.harness.running.runs import Seen
from tests.harness.trial.pattern import ComparedTensor, known_numbers, sentences
from tests.harness.trial.pattern import picture as picture_of

EXACT = torch.randn(2, 4, 96, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BLOCKS = {"block_m": 64, "block_n": 32}


def compared(actual: Tensor, tensor: str = "out", expected: Tensor = EXACT) -> ComparedTensor:
    bound = torch.full_like(expected, 1e-3)
    ratio = ((actual - expected).abs() / bound).nan_to_num(math.inf)
    return ComparedTensor(tensor, actual, expected, bound, ratio)


def told(actual: Tensor, tensor: str = "out") -> list[str]:
    return sentences([compared(actual, tensor)], BLOCKS, known_numbers(0.3, 3, 0.25))


def with_noise(*where: slice | int) -> Tensor:
    """Wrong there, by amounts that have nothing in common."""
    actual = EXACT.clone()
    actual[where] += 1.0 + torch.rand(actual[where].shape, dtype=torch.float64)
    return actual


EVERY = slice(None)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (
            with_noise(EVERY, EVERY, slice(64, None)),
            ["only queries from 64 on (a multiple of block_m, 64 and of block_n, 32)"],
        ),
        (with_noise(EVERY, EVERY, slice(33, None)), ["only queries from 33 on"]),
        (with_noise(EVERY, EVERY, slice(5)), ["only queries up to 4"]),
        (with_noise(EVERY, EVERY, 95), ["only the last query, 95"]),
        (with_noise(EVERY, EVERY, EVERY, 3), ["only column 3"]),
        (with_noise(EVERY, slice(2, None)), ["only query heads 2 and 3"]),
        (with_noise(EVERY, slice(1, 3)), ["only query heads 1 and 2"]),
        (with_noise(EVERY, EVERY, slice(7, 60, 26)), ["only queries 7, 33 and 59"]),
        (with_noise(1), ["only the last batch element, 1"]),
        (with_noise(), []),
        (2.0 * EXACT, ["every wrong element is 2 times what it should be (2)"]),
        (EXACT * math.log(2.0), ["every wrong element is 0.6931 times what it should be (ln 2)"]),
        (EXACT * 0.3, ["every wrong element is 0.3 times what it should be (sm_scale)"]),
        (EXACT * 1.23, ["every wrong element is 1.23 times what it should be"]),
        (0.0 * EXACT, ["every wrong element is 0"]),
        (EXACT * math.nan, ["every wrong element is NaN"]),
    ],
    ids=lambda x: "wrong" if isinstance(x, Tensor) else "-".join(x)[:40],
)
def test_what_wrong_elements_have_in_common(actual: Tensor, expected: list[str]) -> None:
    assert told(actual) == [f"out: {text}" for text in expected]


def test_rows_of_gradients_of_keys_are_keys() -> None:
    assert told(with_noise(EVERY, EVERY, 95), "dk") == ["dk: only the last key, 95"]


@pytest.mark.parametrize(
    ("bound", "group", "name"),
    [(1e-3, 3, " (2)"), (1e-3, 2, ""), (0.2, 3, "")],
    ids=["sharp", "two names fit", "not sharp"],
)
def test_a_factor_is_named_where_it_is_known_well_and_by_one_name(
    bound: float, group: int, name: str
) -> None:
    c = replace(compared(2.0 * EXACT), bound=torch.full_like(EXACT, bound))
    assert sentences([c], BLOCKS, known_numbers(0.3, group, 0.0)) == [
        f"out: every wrong element is 2 times what it should be{name}"
    ]


def test_no_factor_is_told_of_what_is_wrong_by_hardly_more_than_its_bound() -> None:
    sign = (
        torch.rand(EXACT.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).round() * 2
        - 1
    )
    assert told(EXACT + 1.5e-3 * sign) == []


def test_elements_that_could_not_tell_are_no_witnesses() -> None:
    """A row in which both values are 0 does not show whether the kernel treats it rightly."""
    expected = EXACT.clone()
    expected[:, :, :64] = 0.0
    actual = expected.clone()
    actual[:, :, 64:] += 1.0 + torch.rand(2, 4, 32, 8, dtype=torch.float64)
    assert sentences([compared(actual, expected=expected)], BLOCKS, {}) == []


def test_what_is_right_beside_it_is_named() -> None:
    judged = [compared(with_noise(), "dq"), compared(EXACT, "dk"), compared(EXACT, "dv")]
    assert sentences(judged, BLOCKS, {}) == ["dq is wrong; dk, dv as expected"]


def test_a_picture_has_the_largest_error_of_all_heads() -> None:
    made = picture_of(compared(with_noise(1, 2, 64, 3)))
    ratio = torch.tensor(made["ratio"])
    assert (made["tensor"], made["side"], tuple(ratio.shape)) == ("out", "query", (96, 8))
    assert ratio.nonzero().tolist() == [[64, 3]]


def test_a_matplotlib_that_cannot_be_imported_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert not can_draw()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib, which is not installed")
    pictures = [picture_of(compared(with_noise(EVERY, EVERY, 95))), picture_of(compared(with_noise(), "dk"))]
    draw(tmp_path / "error.png", "a title", pictures, BLOCKS)
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG")


CLAIMS = Capabilities(
    head_dims=(16, 64, 72),
    key_padding=True,
    dropout=(0.0, 0.1),
    window=(0, 2),
    launch={"block_m": (64, 128)},
)
CASE = Case(
    heads_kv=2,
    group=2,
    seqlen_q=3,
    seqlen_k=65,
    head_dim=72,
    causal=True,
    sm_scale=-1.0,
    key_padding="right",
    dropout_p=0.1,
    window=2,
    k_layout="gap",
    launch=(("block_m", 128),),
)


@pytest.mark.parametrize(
    ("fails", "name", "held", "claim"),
    [
        (lambda c: c.group > 1, "group", "1", "grouped_heads=false"),
        (lambda c: c.seqlen_k > 64, "seqlen_k", "0", ""),
        (lambda c: c.seqlen_q != c.seqlen_k, "lengths", "both 65", "causal_unequal_lengths=false"),
        (lambda c: c.head_dim == 72, "head_dim", "16", "head_dims=16,64"),
        (lambda c: c.causal, "causal", "False", ""),
        (lambda c: c.scale < 0, "sm_scale", "default", "sm_scale=positive"),
        (lambda c: c.key_padding != "none", "key_padding", "none", "key_padding=false"),
        (lambda c: c.dropout_p > 0, "dropout_p", "0.0", "dropout=0"),
        (lambda c: c.window > 0, "window", "0", "window=0"),
        (
            lambda c: c.k_layout == "gap",
            "k_layout",
            "contiguous",
            "layouts=contiguous,bnhd,packed,offset,expanded,expanded_rows,huge",
        ),
        (lambda c: c.dtype == "float32", "dtype", "float16", ""),
        (lambda c: dict(c.launch)["block_m"] == 128, "block_m", "64", ""),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_field_that_matters_is_found(
    fails: Callable[[Case], bool], name: str, held: str, claim: str
) -> None:
    assert fails(CASE)
    found = {field.name: field for field in fields(CASE, fails, CLAIMS)}
    assert held in found[name].holds
    assert found[name].claim == claim
    others = {field.name for field in found.values() if field.matters} - {name}
    assert others <= {"seqlen_q", "seqlen_k", "lengths"}
    if claim:
        assert not parse_claims([claim], CLAIMS).admits(CASE)


COLUMNS = Case(head_dim=72, spikes=(Spike("q", (0, 0, 0, 40), 3.0), Spike("k", (0, 0, 0, 24), 3.0)))
"""Its entries are set in different columns; they are in the same one if head_dim is 16."""


def columns(case: Case) -> list[int]:
    return [spike.index[3] % case.head_dim for spike in case.spikes]


def head_dim_of(fails: Callable[[Case], bool], case: Case = COLUMNS) -> Field:
    assert fails(case)
    return next(field for field in fields(case, fails, CLAIMS) if field.name == "head_dim")


def test_head_dim_does_not_matter_if_entries_set_in_other_columns_cure_a_case_too() -> None:
    found = head_dim_of(lambda c: len({*columns(c)}) != 1)
    assert (found.fails, found.holds) == (("64",), ())


def test_head_dim_matters_if_normal_numbers_tell_so() -> None:
    found = head_dim_of(lambda c: c.head_dim > 16 and len({*columns(c)}) != 1)
    assert found.holds == ("16",)
    of_last = replace(COLUMNS, spikes=(Spike("q", (0, 0, 0, 70), 3.0),))
    found = head_dim_of(lambda c: max(columns(c), default=c.head_dim) > 64, of_last)
    assert found.holds == ("16", "64")


def test_head_dim_matters_if_no_entry_that_is_set_moves() -> None:
    low = replace(COLUMNS, spikes=(Spike("q", (0, 0, 0, 3), 3.0),))
    assert head_dim_of(lambda c: c.head_dim > 16 and bool(c.spikes), low).holds == ("16",)


ZEROS: dict[str, Any] = {f"{tensor}_values": "zeros" for tensor in TENSORS}
TILED = Case(
    **ZEROS,
    seqlen_q=129,
    seqlen_k=33,
    head_dim=72,
    dtype="float16",
    launch=(("block_m", 128), ("block_n", 32), ("splits", 2)),
)
TILED_CLAIMS = Capabilities(
    head_dims=(1, 16, 64, 72), launch={"block_m": (64, 128), "block_n": (32, 64), "splits": (1, 2)}
)


@pytest.mark.parametrize(
    ("case", "fails", "expected"),
    [
        (replace(CASE, k_layout="contiguous", **ZEROS), lambda c: c.group > 1, ["group"]),
        (CASE, lambda c: c.group > 1, []),
        (
            replace(TILED, v_layout="bnhd", heads_kv=2),
            lambda c: c.heads_kv > 1 and c.v_layout == "bnhd",
            ["v_layout"],
        ),
        (
            replace(CASE, k_layout="contiguous", **ZEROS),
            lambda c: c.causal and c.scale < 0,
            ["causal", "sm_scale"],
        ),
        (CASE, lambda c: c.causal and c.scale < 0, ["causal"]),
        (CASE, lambda c: c.k_layout == "gap", ["k_layout"]),
        (replace(TILED, v_layout="expanded"), lambda c: c.v_layout == "expanded", ["v_layout"]),
        (replace(CASE, v_layout="expanded"), lambda c: c.v_layout == "expanded", []),
        (CASE, lambda c: c.dtype == "float32", []),
        (CASE, lambda c: True, []),
        (TILED, lambda c: c.dtype == "float16", ["dtype"]),
        (replace(TILED, sm_scale=-1.0), lambda c: c.dtype == "float16" and c.scale < 0, []),
        (TILED, lambda c: c.head_dim == 72, ["odd_head_dim"]),
        (TILED, lambda c: c.head_dim > 16, ["head_dim"]),
        (replace(TILED, k_values="ones"), lambda c: c.head_dim > 16, []),
        (replace(TILED, head_dim=16), lambda c: c.head_dim > 1, []),
        (replace(TILED, launch=()), lambda c: c.head_dim > 16, []),
        (replace(TILED, launch=(), seqlen_q=1, seqlen_k=1), lambda c: c.head_dim > 16, ["head_dim"]),
        (TILED, lambda c: c.seqlen_k == 33, []),
        (TILED, lambda c: c.seqlen_k % 32, ["key_tail"]),
        (TILED, lambda c: c.seqlen_k > dict(c.launch)["block_n"], ["key_tiles"]),
        (TILED, lambda c: c.seqlen_q > dict(c.launch)["block_m"], ["query_tiles"]),
        (TILED, lambda c: c.seqlen_q > 100, []),
        (replace(TILED, seqlen_k=128), lambda c: c.seqlen_k >= 4 * dict(c.launch)["block_n"], ["key_tiles"]),
        (TILED, lambda c: c.scale != 1.0, ["sm_scale"]),
        (TILED, lambda c: abs(c.scale) < 1.0, []),
        (TILED, lambda c: dict(c.launch)["splits"] > 1, ["splits"]),
        (replace(TILED, seqlen_k=0), lambda c: c.seqlen_k == 0, ["no_keys"]),
        (Case(seqlen_k=33), lambda c: c.seqlen_k % 32, []),
    ],
)
def test_what_a_failure_points_to(case: Case, fails: Callable[[Case], bool], expected: list[str]) -> None:
    assert fails(case)
    claims = TILED_CLAIMS if case.dtype == TILED.dtype else CLAIMS
    found = causes(case, list(fields(case, fails, claims)), claims.launch)
    assert [cause for _, cause in found if cause != "lengths"] == expected


def test_a_feature_that_more_numbers_can_do_without_is_not_named() -> None:
    """A few numbers may be right by luck without dropout, although larger cases are wrong without it too."""
    claims = replace(CLAIMS, head_dims=(16,))
    case = Case(head_dim=16, causal=True, dropout_p=0.1, **ZEROS)

    def by_luck(c: Case) -> bool:
        return c.causal and (c.dropout_p > 0 or c.v_values == "normal")

    assert explain(case, by_luck, None, claims).causes == ("causal",)
    assert explain(case, lambda c: c.causal and c.dropout_p > 0, None, claims).causes == (
        "causal",
        "dropout_p",
    )


def test_a_size_is_named_where_other_numbers_fail_at_it_too() -> None:
    """Another size has other numbers, and these may be what makes it fail or hold."""
    case = Case(head_dim=16, seqlen_k=0, **ZEROS)
    claims = Capabilities(head_dims=(16,))
    assert explain(case, lambda c: c.seqlen_k == 0, None, claims).causes == ("no_keys",)
    assert explain(case, lambda c: c.seqlen_k == 0, None, claims, lengths_tell=False).causes == ()
    assert explain(case, lambda c: c.seqlen_k == 0 and c.v_values == "zeros", None, claims).causes == ()


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda c: c.seqlen_q > c.seqlen_k, True),
        (lambda c: c.causal and c.seqlen_q > c.seqlen_k, True),
        (lambda c: c.seqlen_q >= 3 and c.seqlen_k == 1, False),  # holds with 3 queries and 2 keys
    ],
)
def test_unequal_lengths_matter_only_if_others_fail_too(
    fails: Callable[[Case], bool], expected: bool
) -> None:
    told = fields(Case(seqlen_q=3, seqlen_k=1, causal=True), fails, Capabilities())
    assert any(field.name == "lengths" for field in told) == expected


def test_a_scale_is_named_where_the_default_one_was_taken_for_it() -> None:
    case = Case(head_dim=1, sm_scale=0.5, **ZEROS)
    claims = Capabilities(head_dims=(1, 16))
    assert explain(case, lambda c: c.scale != c.head_dim**-0.5, None, claims).causes == ("sm_scale",)


def test_a_dtype_is_not_named_where_it_takes_special_numbers() -> None:
    claims = Capabilities(head_dims=(16,), dtypes=("float16", "float32"))
    case = Case(head_dim=16, dtype="float16", **ZEROS)

    def of_zeros(c: Case) -> bool:
        return c.dtype == "float16" and c.v_values == "zeros"

    assert explain(case, of_zeros, None, claims).causes == ()
    assert explain(case, lambda c: c.dtype == "float16", None, claims).causes == ("dtype",)


def test_nothing_is_pointed_to_when_the_budget_is_spent_before_the_end() -> None:
    claims = replace(CLAIMS, head_dims=(16,))
    case = Case(head_dim=16, causal=True, **ZEROS)
    calls = 0

    def counted(c: Case) -> bool:
        nonlocal calls
        calls += 1
        return c.causal

    assert explain(case, counted, None, claims).causes == ("causal",)
    spend = meter(60.0, calls=calls - 1)

    def fails(c: Case) -> bool:
        spend()
        return c.causal

    assert explain(case, fails, None, claims).causes == ()


def test_an_explanation_in_lines() -> None:
    explanation = Explanation(
        sentences=("out: only column 3",),
        fields=(
            Field("group", "2", fails=("3",), holds=("1",), claim="grouped_heads=false"),
            Field("batch", "1", fails=("2",), holds=()),
        ),
        causes=("group", "splits"),
    )
    assert explanation.lines() == [
        "points to: grouped heads, splits",
        "out: only column 3",
        "group: fails with 2, 3; holds with 1",
        "fails all the same with other values of batch",
        "group 2 was never meant? --claims grouped_heads=false",
    ]


def test_a_larger_case_is_looked_at_where_it_fails_alike() -> None:
    small = Case(seqlen_k=65, v_values="zeros", spikes=(Spike("v", (0, 0, 0, 0), 1.0),))
    looked: list[Case] = []

    def look(case: Case) -> Seen | None:
        looked.append(case)
        return Seen(("seen",), ()) if case.batch == 1 else None

    found = explain(small, lambda case: True, look, Capabilities(head_dims=(16, 64)))
    *_, larger, again, once_more = looked
    assert found.sentences == (f"a larger case, {larger}:", "seen")
    assert larger.v_values == "normal"
    assert larger.seqlen_k > 65
    assert not larger.spikes
    assert again == once_more == small


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ([Seen((), ()), None], "the same case does not fail on every run"),
        (
            [Seen((), ({"ratio": 2.0},)), Seen((), ({"ratio": 3.0},))],
            "the same case fails by other numbers on every run",
        ),
    ],
    ids=["comes and goes", "ever other"],
)
def test_a_failure_that_is_not_the_same_on_every_run(answers: list[Seen | None], sentence: str) -> None:
    seen = iter([Seen((), ()), *answers])
    found = explain(Case(), lambda case: True, lambda case: next(seen), Capabilities(head_dims=(16,)))
    assert found.sentences == (sentence,)


def test_of_a_crash_that_comes_and_goes_nothing_else_is_told() -> None:
    answers = iter([True, False])
    found = explain(CASE, lambda case: next(answers), None, CLAIMS)
    assert found == Explanation(("the same case does not fail on every run",))


def test_what_goes_away_with_any_change_points_to_nothing() -> None:
    varied = list(fields(TILED, lambda case: False, TILED_CLAIMS))
    assert all(field.matters for field in varied)
    assert causes(TILED, varied, TILED_CLAIMS.launch) == []


def test_what_is_known_when_the_budget_is_spent_is_told() -> None:
    spend = meter(60.0, calls=3)

    def fails(case: Case) -> bool:
        spend()
        return True

    found = explain(Case(), fails, lambda case: Seen((), ()), Capabilities())
    assert [field.name for field in found.fields] == ["batch"]
    with pytest.raises(BudgetSpent):
        spend()
