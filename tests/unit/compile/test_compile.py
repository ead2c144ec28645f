"""The compile tests: which items they compile, and what they report."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from kernels import registry
from tests.compile.items import Item, items, launches_triton, pairs
from tests.compile.limits import SPILLS, UNCLAIMED, declared, limits
from tests.compile.targets import TARGETS

AXES = {"a": (1, 2, 3), "b": "xy", "c": (True, False), "d": range(4)}


def meetings(rows: list[dict[str, Any]]) -> set[Any]:
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def test_every_pair_meets() -> None:
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    rows = pairs(AXES, AXES)
    assert meetings(rows) == meetings(every)
    assert 3 * 4 <= len(rows) < len(every) / 2


def test_pairs_of_what_is_new() -> None:
    rows = pairs(AXES, "b")
    every = {(name, value, other) for name in "acd" for value in AXES[name] for other in "xy"}
    assert {(name, row[name], row["b"]) for row in rows for name in "acd"} == every
    assert len(rows) == 2 * 4


def test_items_of_a_kernel() -> None:
    capabilities = registry.load("flash_v2").capabilities
    some, every = (items("flash_v2", capabilities, every=x) for x in (False, True))
    assert set(some) < set(every)
    assert len(set(some)) == len(some) < 50
    assert {(item.target, item.masked) for item in some} == set(itertools.product(TARGETS, (False, True)))
    for name, values in capabilities.launch.items():
        met = {(item.target, dict(item.launch)[name]) for item in some if item.launch}
        assert met == set(itertools.product(TARGETS, values))


def test_which_kernels_are_triton_s() -> None:
    assert [
        spec for spec in ("flash_v2", "ring", "sdpa_flash", "flex_attention") if launches_triton(spec)
    ] == [
        "flash_v2",
        "ring",
    ]


def test_what_a_table_declares() -> None:
    words = Item("k", "sm_90", "float16", 64, True, False, (("block_m", 64),)).words
    assert declared({"sm_90 block_m=64": 1, "sm_90": 2}, words) == 1
    assert declared({"sm_90 default": 1, "causal unaligned": 2}, words) == 2
    assert declared({"sm_8": 1}, words) is None


def test_limits_are_those_of_kernels_that_there_are() -> None:
    assert {*SPILLS, *UNCLAIMED} <= registry.REGISTERED.keys()


@pytest.mark.parametrize(
    ("table", "kernel", "listed_as"),
    [
        (UNCLAIMED, "varlen", "flash_v2"),
        (SPILLS, "varlen", "varlen"),
        (UNCLAIMED, "flash_v2_persistent", "flash_v2_persistent"),
        (UNCLAIMED, "flash_v1", None),
    ],
)
def test_what_is_made_of_flash_v2_has_its_limits(
    table: Mapping[str, Mapping[str, object]], kernel: str, listed_as: str | None
) -> None:
    assert limits(table, kernel) == (table[listed_as] if listed_as else {})
