"""The sequences of calls of the claim ``ragged``: how many queries and keys each has, and the pages that hold its keys.

What is drawn follows from a case's seed, and is written into its fields, so that a report names it and it is shrunk.
"""

import random
from collections.abc import Callable
from typing import Any

from kernels.contract import WITH_PACKED_QUERIES, WITH_PAGES, Capabilities
from strategies.case import DEFAULT_BLOCK, SIMPLEST, Case, changed
from strategies.landmarks import BEYOND
from strategies.pages import page_size_of

FIELDS = ("seqlens_q", "seqlens_k", "rows_behind", "page_size", "block_table", "pool")
"""The fields of a case that say how its sequences differ and where they lie."""
PATTERNS = ("any", "any", "one long", "decode", "alike")
"""How numbers of packed queries are drawn. With "one long", one sequence has all queries, and the others have none.

With "decode", the others have one each, as where a server mixes decoding with prefill. With "alike", each sequence has
as many queries as keys.
"""
BEHIND = (1, 7, 64, 100)
"""How many packed rows may lie behind the last sequence."""
SHARE_BEHIND = 4
"""One of so many packed cases has such rows."""
TILE = 64
"""A single long sequence has one row more than whole tiles of so many rows.

So too short a bound on the longest sequence, as the number of rows less that of the other sequences, lacks a tile.
"""
ALONE = 4
"""So many cases of a single sequence become three of several."""
WITH_CACHE = ("cache", "paged", "append")
"""The kinds of ``ragged`` in which all sequences have as many queries, and a cache of keys."""
DECODING = 3
"""One of so many cases with a cache has one query of each sequence."""
LONG = 12
"""One of so many cases with a cache has a long one."""
LONG_CACHE = 2**13
"""A long cache has room for a few keys more than this: kernels for decoding in parts begin at such lengths."""
GROUP_OF_DECODE = 8
"""The query heads of a key head for which such kernels are made most often."""

Lengths = tuple[int, int]
"""The number of queries and the number of keys of a sequence."""


def lengths_of(claims: Capabilities, case: Case) -> list[Lengths]:
    """Return the lengths of each sequence of the batch.

    Numbers larger than the case's seqlen_q or seqlen_k count as these, and numbers are repeated where there are more
    sequences. A sequence of lengths that the kernel does not claim to take has all of both. Only packed queries may
    differ in number.
    """
    of_q = case.seqlens_q if case.ragged in WITH_PACKED_QUERIES else ()

    def own(given: tuple[int, ...], most: int, b: int) -> int:
        return min(most, given[b % len(given)]) if given else most

    pairs = ((own(of_q, case.seqlen_q, b), own(case.seqlens_k, case.seqlen_k, b)) for b in range(case.batch))
    whole = case.seqlen_q, case.seqlen_k
    return [pair if claims.takes_lengths(*pair, causal=case.causal) else whole for pair in pairs]


def with_sequences(claims: Capabilities, case: Case) -> Case:
    """Return a case whose call is of a kind of ``ragged`` with sequences of lengths that its seed decides."""
    case = with_pages(claims, case)
    if case.ragged in WITH_PACKED_QUERIES:
        return _with_packed_queries(claims, case)
    if case.ragged in WITH_CACHE:
        return changed(case, seqlens_k=drawn_keys(claims, case))
    return case


def with_pages(claims: Capabilities, case: Case) -> Case:
    """Return a case with a page size, a table and pools that its seed decides, if its keys may lie in pages.

    Other fields of sequences have their simplest values.
    """
    plain: dict[str, Any] = {name: SIMPLEST[name] for name in FIELDS}
    if case.ragged not in WITH_PAGES:
        return changed(case, **plain)
    chance = chance_of(case, "pools")
    able = {"apart", *(() if case.fp8_cache != "none" else claims.pools)}
    if case.v_in_k or case.v_head_dim not in (0, case.head_dim):
        able -= {"interleaved"}
    plain |= {
        "page_size": drawn_page_size(claims, case),
        "block_table": chance.choice(("in_order", "shuffled", "shuffled", "shared")),
        "pool": chance.choice(
            [x for x in ("apart", *claims.pools) if x in able and x in claims.pools] or ["apart"]
        ),
    }
    return changed(case, **plain)


def with_several_sequences(case: Case) -> Case:
    """Return a case of a kind of ``ragged`` with several sequences, if it has one, but for some seeds."""
    has_several = case.batch > 1 or case.ragged in ("none", "document") or case.seed % ALONE == 0
    return case if has_several else changed(case, batch=2 + case.seed // ALONE % 3)


def as_decoding(claims: Capabilities, case: Case) -> Case:
    """Return a case with a cache, for some seeds, with as few queries as are claimed: one, as in decoding."""
    rows = claims.length_from(1)
    if case.ragged not in WITH_CACHE or case.seed // 7 % DECODING:
        return case
    is_claimed = claims.takes_lengths(rows, case.seqlen_k, causal=case.causal)
    return changed(case, seqlen_q=rows) if is_claimed else case


def with_long_cache(claims: Capabilities, case: Case) -> Case:
    """Return a case, for some seeds, with one query each of two sequences that have a long cache."""
    if case.ragged not in (*WITH_CACHE, "packed_paged") or case.seed // 5 % LONG:
        return case
    rows = claims.length_from(1)
    keys = LONG_CACHE + BEYOND[case.seed % len(BEYOND)] * claims.seqlen_multiple
    if rows > 1 or keys % claims.seqlen_multiple or not claims.takes_lengths(rows, keys, causal=case.causal):
        return case
    group = GROUP_OF_DECODE if claims.grouped_heads and case.seed % 3 else min(case.group, GROUP_OF_DECODE)
    return changed(case, batch=2, heads_kv=1, group=group, seqlen_q=rows, seqlen_k=keys)


def drawn_keys(claims: Capabilities, case: Case, new: int = 0) -> tuple[int, ...]:
    """Return a number of keys for each sequence, of which ``new`` are its last; some lie near whole tiles or pages."""
    rows, most, tile = case.seqlen_q, case.seqlen_k, tile_of(case, "block_n")
    if case.page_size:
        chance = chance_of(case, "page size")
        tile = chance.choice((page_size_of(claims.page_sizes, most, chance), tile))
    drawn = (length(tile, most, chance_of(case, f"length {b}")) for b in range(case.batch))
    lengths = [max(new, claims.length_from(0), _multiple(claims, n)) for n in drawn]
    return tuple(n if claims.takes_lengths(rows, n, causal=case.causal) else most for n in lengths)


def drawn_page_size(claims: Capabilities, case: Case) -> int:
    """Return one of the claimed numbers of keys of a page."""
    return page_size_of(claims.page_sizes, case.seqlen_k, chance_of(case, "page size"))


def _with_packed_queries(claims: Capabilities, case: Case) -> Case:
    """Return a case with numbers of packed queries that differ, and perhaps rows behind the last sequence."""
    chance = chance_of(case, "pattern")
    pattern, longest = chance.choice(PATTERNS), chance.randrange(case.batch)
    if pattern == "one long" and case.seqlen_q:
        few = changed(case, seqlen_q=(case.seqlen_q - 1) // TILE * TILE + 1)
        case = few if claims.takes_lengths(few.seqlen_q, few.seqlen_k, causal=few.causal) else case
    behind = claims.rows_behind != "none" and chance.randrange(SHARE_BEHIND) == 0
    tiles = tile_of(case, "block_m"), tile_of(case, "block_n")
    most = case.seqlen_q, case.seqlen_k
    pairs = [_drawn(claims, case, tiles, most, pattern, is_long=b == longest, b=b) for b in range(case.batch)]
    of_q, of_k = zip(*pairs, strict=True) if pairs else ((), ())
    return changed(
        case, seqlens_q=tuple(of_q), seqlens_k=tuple(of_k), rows_behind=chance.choice(BEHIND) if behind else 0
    )


def _drawn(
    claims: Capabilities, case: Case, tiles: Lengths, most: Lengths, pattern: str, *, is_long: bool, b: int
) -> Lengths:
    """Return the lengths of sequence ``b``, which are claimed."""
    rows, keys = (
        max(claims.length_from(0), _multiple(claims, length(tile, n, chance_of(case, f"{name} {b}"))))
        for tile, n, name in zip(tiles, most, ("rows", "keys"), strict=True)
    )
    if pattern in ("one long", "decode"):
        rows = most[0] if is_long else claims.length_from(int(pattern == "decode"))
        keys = max(rows, keys) if is_long else keys
    if pattern == "alike" or not claims.may_differ(causal=case.causal):
        rows = keys = min(rows, most[1]) if rows else min(keys, most[0])
    if claims.seqlens == "q_at_most_k":
        rows = min(rows, keys)
    lengths = min(rows, most[0]), min(keys, most[1])
    return lengths if claims.takes_lengths(*lengths, causal=case.causal) else most


def chance_of(case: Case, choice: str) -> random.Random:
    """Return what makes one choice of a case's call, by its seed: the same whatever else the case has."""
    return random.Random(f"{case.seed} {choice}")


def tile_of(case: Case, block: str) -> int:
    """Return the rows of a tile by the launch setting ``block``, or by default if the kernel has none of this name."""
    return int(dict(case.launch).get(block, DEFAULT_BLOCK))


def _multiple(claims: Capabilities, n: int) -> int:
    """Return the longest length up to this one that is a multiple of what the kernel claims."""
    return n - n % claims.seqlen_multiple


def length(tile: int, most: int, chance: random.Random) -> int:
    """Return a random length: 0, 1, one close to whole tiles of so many rows, any length, or ``most``.

    Where there is no whole tile, it is any length more often. Were it ``most``, few sequences would be cut in two.
    """
    any_length = chance.randint(0, most)
    near_tile = chance.randint(1, most // tile) * tile + chance.randint(-1, 1) if most >= tile else any_length
    return min(most, chance.choice((0, 1, near_tile, near_tile, any_length, most)))


def claimed_cuts(
    is_claimed: Callable[[int, int], bool], cuts_q: list[int], cuts_k: list[int]
) -> tuple[list[int], list[int]]:
    """Return the cuts of rows and of keys without those that leave a sequence of lengths that are not claimed."""
    first, *others, last = zip(cuts_q, cuts_k, strict=True)
    kept = [first]
    for cut in others:
        of_this, of_rest = ((b[0] - a[0], b[1] - a[1]) for a, b in ((kept[-1], cut), (cut, last)))
        if is_claimed(*of_this) and is_claimed(*of_rest):
            kept.append(cut)
    rows, keys = zip(*kept, last, strict=True)
    return [*rows], [*keys]
