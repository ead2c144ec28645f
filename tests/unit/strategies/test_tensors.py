"""The tensors of a case follow from the case alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kernels.contract import DTYPES, LAYOUTS
from strategies.case import TENSORS, Case, Spike
from strategies.cases import cases
from strategies.layouts import are_first_columns
from strategies.tensors import tensors
from tests.unit.support.drawing import CLAIMS, bits, quick

CASE = Case(
    batch=2,
    heads_kv=2,
    group=3,
    seqlen_q=5,
    seqlen_k=7,
    head_dim=8,
    dtype="bfloat16",
    q_layout="bnhd",
    k_layout="gap",
    v_layout="packed",
    seed=11,
)


def entries(case: Case, margin: float = float("nan")) -> dict[str, torch.Tensor]:
    windows = tensors(case, "cpu", margin)
    return {name: getattr(windows, name).tensor for name in TENSORS}


def changed_tensors(case: Case, other: Case) -> set[str]:
    ours, theirs = entries(case), entries(other)
    return {name for name in TENSORS if not torch.equal(bits(ours[name]), bits(theirs[name]))}


def test_tensors_have_the_shapes_and_dtype_of_the_case() -> None:
    for name, tensor in entries(CASE).items():
        assert tensor.shape == CASE.shape(name)
        assert tensor.dtype == torch.bfloat16


def test_tensors_follow_from_the_case_alone() -> None:
    state = torch.random.get_rng_state()
    assert not changed_tensors(CASE, CASE)
    assert torch.equal(state, torch.random.get_rng_state())
    assert changed_tensors(CASE, replace(CASE, seed=12)) == set(TENSORS)
    assert not changed_tensors(CASE, replace(CASE, q_layout="huge", v_layout="offset", dout_layout="gap"))


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensors_fields_leave_the_others_alone(name: str) -> None:
    changes: list[dict[str, Any]] = [{f"{name}_values": "wide"}, {f"{name}_layout": "expanded"}]
    for change in changes:
        assert changed_tensors(CASE, replace(CASE, **change)) == {name}


def test_tensors_of_one_family_and_shape_differ() -> None:
    ours = entries(replace(CASE, group=1, seqlen_q=7))
    assert not torch.equal(ours["q"], ours["k"])
    assert not torch.equal(ours["k"], ours["v"])
    assert not torch.equal(ours["q"], ours["dout"])


def test_margin_reaches_every_window() -> None:
    windows = tensors(CASE, "cpu", 9.0)
    for name in TENSORS:
        window = getattr(windows, name)
        assert (window.region[~window.inside()] == 9.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spike_is_set_modulo_the_shape_and_nowhere_else(layout: str) -> None:
    plain = replace(CASE, k_layout=layout)
    spiked = replace(plain, spikes=(Spike("k", (2, 3, 15, 7), 100.0),))
    before, after = entries(plain)["k"], entries(spiked)["k"]
    assert after[0, 1, 1, 7] == 100.0
    batches = slice(None) if layout.startswith("expanded") else 0
    heads = slice(None) if layout.startswith("expanded") else 1
    rows = slice(None) if layout == "expanded_rows" else 1
    expected = before.clone()
    expected[batches, heads, rows, 7] = 100.0
    assert torch.equal(after, expected)
    assert changed_tensors(plain, spiked) == {"k"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_spikes_are_clipped_to_the_dtype_unless_they_are_named(dtype: str) -> None:
    values: tuple[float | str, ...] = (1e39, -1e39, "nan", "inf", "-inf")
    spikes = tuple(Spike("v", (0, 0, 0, i), value) for i, value in enumerate(values))
    row = entries(replace(CASE, dtype=dtype, spikes=spikes))["v"][0, 0, 0]
    maximum = torch.finfo(getattr(torch, dtype)).max
    assert row[:2].tolist() == [maximum, -maximum]
    assert row[2].isnan()
    assert row[3:5].tolist() == [math.inf, -math.inf]


def test_a_spike_in_an_empty_tensor_is_ignored() -> None:
    empty = replace(CASE, seqlen_k=0, spikes=(Spike("k", (0, 0, 0, 0), 1.0), Spike("q", (0, 0, 0, 0), 77.0)))
    assert entries(empty)["k"].numel() == 0
    assert entries(empty)["q"][0, 0, 0, 0] == 77.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "dtype: got 'float64', expected one of"),
        ({"v_values": "odd"}, "family: got 'odd', expected one of"),
        ({"dout_layout": "odd"}, "layout: got 'odd', expected one of"),
        ({"key_padding": "odd"}, "key_padding: got 'odd', expected none or one of"),
        ({"spikes": (Spike("out", (0, 0, 0, 0), 1.0),)}, r"spike\.tensor: got 'out', expected one of"),
        (
            {"spikes": (Spike("q", (0, 0, 0, 0), "NaN"),)},
            r"spike\.value: got 'NaN', expected a number or one of",
        ),
    ],
)
def test_unknown_names_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensors(replace(CASE, **change), "cpu")


@settings(quick, max_examples=60)
@given(cases(CLAIMS, dtype="bfloat16"))
def test_every_drawn_case_has_tensors(case: Case) -> None:
    for name, tensor in entries(case).items():
        assert tensor.shape == case.shape(name)


@pytest.mark.parametrize("start", [4, 5])
def test_masked_keys_are_spoiled_for_every_other_seed(start: int) -> None:
    case = replace(
        CASE, batch=2, seqlen_k=40, key_padding="scattered", k_layout="gap", v_layout="expanded", seed=start
    )
    found = tensors(case, "cpu")
    mask = found.key_padding_mask
    assert mask is not None
    masked = ~mask[:, None, :, None].expand(found.k.tensor.shape)
    assert masked.any()
    assert torch.equal(found.k.tensor.isnan(), masked if start % 2 else torch.zeros_like(masked))
    assert not found.v.tensor.isnan().any()  # the rows of an expanded v share memory
    assert tensors(replace(case, key_padding="none"), "cpu").key_padding_mask is None


IN_K = replace(CASE, v_in_k=True, v_head_dim=5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("v_head_dim", [0, 5])
def test_v_is_the_first_columns_of_k_in_its_memory(v_head_dim: int, layout: str) -> None:
    case = replace(IN_K, v_head_dim=v_head_dim, k_layout=layout, spikes=(Spike("v", (0, 1, 2, 3), 77.0),))
    found = entries(case)
    assert are_first_columns(found["v"], found["k"])
    assert found["v"].shape == case.shape("v")
    assert found["k"][0, 1, 2, 3] == 77.0
    assert changed_tensors(case, replace(case, v_layout="huge", v_values="wide")) == set()
    assert changed_tensors(case, replace(case, k_values="wide")) == {"k", "v"}


def test_v_in_k_changes_neither_k_nor_a_v_with_more_columns_than_k() -> None:
    apart = replace(IN_K, v_in_k=False)
    assert changed_tensors(IN_K, apart) == {"v"}
    assert list(tensors(IN_K, "cpu").own) == ["q", "k", "dout"]
    assert list(tensors(apart, "cpu").own) == list(TENSORS)
    wide = replace(IN_K, v_head_dim=9)
    assert not wide.v_is_of_k
    assert changed_tensors(wide, replace(wide, v_in_k=False)) == set()
