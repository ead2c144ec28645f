"""Sequences of a case have lengths that are claimed, and those that are drawn show what their kind is wrong with."""

from dataclasses import replace
from typing import Any

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.sequences import (
    GROUP_OF_DECODE,
    LONG_CACHE,
    TILE,
    as_decoding,
    lengths_of,
    with_long_cache,
    with_pages,
    with_sequences,
    with_several_sequences,
)

ALL = Capabilities(ragged=("cache", "packed", "paged", "append", "document", "packed_paged"))
SEEDS = range(300)
CASE = Case(batch=3, seqlen_q=140, seqlen_k=300, dtype="float16")


def drawn(kind: str, claims: Capabilities = ALL, **fields: Any) -> list[Case]:
    """Return cases of a kind with the sequences that their seeds decide."""
    return [with_sequences(claims, replace(CASE, ragged=kind, seed=seed, **fields)) for seed in SEEDS]


def test_lengths_end_with_the_case() -> None:
    case = replace(CASE, ragged="packed", seqlens_q=(3, 0), seqlens_k=(500,))
    assert lengths_of(ALL, case) == [(3, 300), (0, 300), (3, 300)]
    assert lengths_of(ALL, replace(case, seqlens_q=(), seqlens_k=())) == [(140, 300)] * 3


def test_only_packed_queries_differ_in_number() -> None:
    case = replace(CASE, ragged="paged", seqlens_q=(3,), seqlens_k=(5, 7, 9))
    assert lengths_of(ALL, case) == [(140, 5), (140, 7), (140, 9)]


def test_a_sequence_of_lengths_that_are_not_claimed_has_all_rows_and_keys() -> None:
    claims = replace(ALL, seqlens="q_at_most_k")
    case = replace(CASE, ragged="packed", seqlens_q=(9, 9), seqlens_k=(8, 9), batch=2)
    assert lengths_of(claims, case) == [(140, 300), (9, 9)]


@pytest.mark.parametrize(
    "claims",
    [
        {},
        {"seqlens": "q_at_most_k"},
        {"min_seqlen": 1},
        {"seqlen_multiple": 4},
        {"max_seqlen_q": 140, "min_seqlen_k": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["cache", "packed", "paged", "append", "packed_paged"])
def test_drawn_lengths_are_claimed(kind: str, claims: dict[str, Any]) -> None:
    narrow = replace(ALL, **claims)
    for case in drawn(kind, narrow):
        own = case.seqlens_q if kind in ("packed", "packed_paged") else (case.seqlen_q,) * 3
        pairs = [*zip(own, case.seqlens_k, strict=True)]
        assert lengths_of(narrow, case) == pairs
        assert all(narrow.takes_lengths(*pair, causal=False) for pair in pairs)
        assert narrow.admits(case)
        assert with_sequences(narrow, case) == case


def test_packed_sequences_are_as_servers_have_them() -> None:
    for kind in ("packed", "packed_paged"):
        cases = drawn(kind)
        assert any(0 in case.seqlens_q and max(case.seqlens_q) > 64 for case in cases)
        assert any(sorted(case.seqlens_q) == [1, 1, 140] for case in cases)
        assert any(case.seqlens_q == case.seqlens_k for case in cases)
        assert {case.rows_behind > 0 for case in cases} == {True, False}
        assert any(max(case.seqlens_q) < case.seqlen_q for case in cases)
    assert not any(case.rows_behind for case in drawn("packed", replace(ALL, rows_behind="none")))


def test_a_single_long_sequence_shows_a_bound_that_is_a_few_rows_short() -> None:
    long = [
        case for case in drawn("packed") if sorted(case.seqlens_q)[:2] == [0, 0] and max(case.seqlens_q) > 1
    ]
    short = [case for case in long if -(-(sum(case.seqlens_q) - 2) // TILE) < -(-max(case.seqlens_q) // TILE)]
    assert len(short) > len(long) / 2


def test_pages_vary_as_far_as_they_are_claimed() -> None:
    cases = drawn("paged")
    assert {case.block_table for case in cases} == {"in_order", "shuffled", "shared"}
    assert {case.pool for case in cases} == {"apart", "interleaved", "padded"}
    assert {case.page_size for case in cases} == {*ALL.page_sizes}
    assert {case.pool for case in drawn("paged", replace(ALL, pools=("padded",)))} == {"padded"}
    assert {case.pool for case in drawn("paged", v_head_dim=8)} == {"apart", "padded"}
    plain = with_pages(ALL, replace(cases[0], ragged="cache"))
    assert plain == replace(CASE, ragged="cache")


def test_some_cases_decode_over_a_long_cache() -> None:
    given = [replace(CASE, batch=1, ragged="cache", seed=seed) for seed in SEEDS]
    cases = [with_long_cache(ALL, with_several_sequences(case)) for case in given]
    long = [case for case in cases if case.seqlen_k > LONG_CACHE]
    assert len(long) > len(cases) / 20
    assert all((case.batch, case.seqlen_q, case.heads_kv) == (2, 1, 1) for case in long)
    assert any(case.group == GROUP_OF_DECODE for case in long)
    assert {case.batch for case in cases} == {1, 2, 3, 4}
    assert not any(with_long_cache(replace(ALL, min_seqlen=16), x).seqlen_k > LONG_CACHE for x in given)
    assert {as_decoding(ALL, case).seqlen_q for case in given} == {1, 140}
