"""Features of a case: each has a value, and a change that gives the case another value."""

from dataclasses import fields
from typing import Any

import pytest

from strategies.case import LAYOUT_FIELDS, Case, Spike
from strategies.features import (
    BLIND,
    DERIVED,
    DIFFERENT,
    EMPTY,
    FEATURES,
    HEADS,
    HIDDEN,
    HUGE,
    MASKED,
    NAN,
    NONE,
    ONE,
    PARTIAL,
    SCORES,
    SEEN,
    SEVERAL,
    SLICES,
    SOME,
    UNEQUAL,
    WHOLE,
    WORK,
    feature,
    laid_out,
    pair_of,
    tiles_of,
    value_of,
    with_no_more_than,
    with_value,
)

CASE = Case(
    batch=2,
    heads_kv=2,
    group=3,
    seqlen_q=40,
    seqlen_k=33,
    causal=True,
    sm_scale=2.0,
    ragged="packed",
    seqlens_q=(3, 0),
    seqlens_k=(0, 5),
    k_layout="gap",
    v_layout="huge",
    q_values="large",
    spikes=(Spike("v", (0, 0, 0, 0), "nan"), Spike("q", (0, 0, 0, 0), 3.0)),
    launch=(("block_m", 16),),
)

CHANGES: dict[str, tuple[Any, Any, Any]] = {
    UNEQUAL: ("more queries than keys", 20, "equal"),
    HUGE: (True, False, False),
    SCORES: ("other", "ordinary", "ordinary"),
    BLIND: (HIDDEN, (33, 40), SEEN),
    HEADS: (6, 4, 4),
    SLICES: (SEVERAL, ONE, ONE),
    MASKED: (SOME, NONE, NONE),
    NAN: (True, False, False),
    **dict.fromkeys((*DIFFERENT.values(), *EMPTY.values()), (True, False, False)),
    "qk_values": ("set", "normal", "normal"),
    "v_values": ("set", "zeros", "zeros"),
    "dout_values": ("normal", "zeros", "zeros"),
    pair_of("v", "k"): ("other", "contiguous", "contiguous"),
    tiles_of(32): (PARTIAL, WHOLE, WHOLE),
    **{x.name: (x.count(CASE), 3, 3) for x in WORK.values()},
}
"""By feature: the value in ``CASE``, the value of a change, and the value after the change."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_gives_the_value_that_is_asked_for(name: str) -> None:
    before, asked, after = CHANGES[name]
    assert value_of(CASE, name) == before
    assert value_of(with_value(CASE, name, asked), name) == after


def test_tiles_of_all_slices_are_counted() -> None:
    counts = {x.name: x.count(CASE) for x in WORK.values() if x.rows == 32}
    assert counts == {"tiles of 32 queries in all": 24, "tiles of 32 keys in all": 8}


def test_every_feature_is_known_by_its_name() -> None:
    plain = {x.name for x in fields(Case)}
    assert FEATURES.keys() == plain | {x.name for x in DERIVED}
    assert all(FEATURES[x.name] is x for x in DERIVED)
    assert set().union(*(x.made_of for x in DERIVED)) <= FEATURES.keys()
    kinds = {x.name for x in DERIVED if not (x.is_pair or x.rows)}
    assert kinds < CHANGES.keys()


def test_a_launch_setting_is_a_feature_too() -> None:
    assert value_of(CASE, "block_m") == 16
    assert dict(with_value(CASE, "block_m", 64).launch) == {"block_m": 64}


def test_layouts_name_their_tensors() -> None:
    assert [feature(name).tensors for name in LAYOUT_FIELDS] == [("q",), ("k",), ("v",), ("dout",)]
    assert laid_out(pair_of("q", "k"), CASE) == ["k"]
    assert laid_out(HUGE, CASE) == ["k", "v"]
    assert [x.name for x in FEATURES.values() if x.is_layout and not x.is_pair] == [*LAYOUT_FIELDS]


def test_what_is_not_needed_is_made_as_simple_as_it_can_be() -> None:
    simple = with_no_more_than([SCORES, pair_of("k", "q")], CASE)
    assert (simple.sm_scale, simple.q_values, simple.k_layout) == (2.0, "large", "gap")
    assert (simple.batch, simple.group, simple.causal, simple.v_layout) == (1, 1, False, "contiguous")
    assert (simple.seqlen_q, simple.seqlen_k, simple.launch) == (40, 33, CASE.launch)
    assert with_no_more_than([HUGE], CASE).k_layout == "gap"
