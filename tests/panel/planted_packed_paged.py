"""Bugs planted in ``tests.panel.packed_paged``, most of them after reports of servers' kernels.

``tests.panel.planted_packed_paged:NAME`` is the function with the bug NAME.
"""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

MODULE = "tests.panel.packed_paged"
EAGER, TILED = f"{MODULE}:eager", f"{MODULE}:tiled"
PAGES = "block_table[b, : -(-length // k.shape[2])].long()"

PLANTED = (
    Planted(
        "ragged__too_few_programs",
        "the number of tiles forgets that each sequence may end with one that is not full",
        Edit(TILED, "range(q.shape[2] // tile + sequences)", "range(-(-q.shape[2] // tile))"),
        function="tiled",
    ),
    Planted(
        "ragged__longest_is_rows_less_sequences",
        "the longest sequence is taken to leave each other one a query (onnxruntime, PR 28409)",
        Edit(
            EAGER,
            "rows = slice(starts[b], starts[b + 1])",
            "rows = slice(starts[b], min(starts[b + 1],"
            " starts[b] + -(-max(0, q.shape[2] - len(starts) + 2) // 64) * 64))",
        ),
    ),
    Planted(
        "ragged__as_many_keys_as_before_and_one",
        "a sequence has one key more than it had before, as if it decoded (onnxruntime, PR 32493)",
        Edit(
            TILED,
            "length, queries = lengths[b], starts[b + 1] - starts[b]",
            "queries = starts[b + 1] - starts[b]\n"
            "        length = min(lengths[b], max(0, lengths[b] - queries) + 1)",
        ),
        function="tiled",
    ),
    Planted(
        "ragged__keys_by_their_cumulative_numbers",
        "numbers of keys are those of all sequences up to each (vLLM's XPU kernels, PR 115)",
        Edit(
            EAGER,
            "enumerate(cache_seqlens.tolist())",
            "enumerate(cache_seqlens.cumsum(0).clamp(max=block_table.shape[1] * k.shape[2]).tolist())",
        ),
    ),
    Planted(
        "ragged__keys_behind_the_last_without_a_mask",
        "a last page counts as full where there is no causal mask (FlashInfer, issue 3716)",
        Edit(
            TILED,
            "min(page_size, length - at)",
            "min(page_size, length - at) if causal else page_size",
        ),
        function="tiled",
    ),
    Planted(
        "ragged__a_page_more_on_a_border",
        "a sequence whose pages are all full has one page more (pegainfer, issue 291)",
        Edit(
            EAGER,
            PAGES,
            "block_table[b, : length // k.shape[2] + 1].long().clamp(0, len(k) - 1)\n"
            "        length += (length % k.shape[2] == 0) * k.shape[2]",
        ),
    ),
    Planted(
        "ragged__short_sequences_left_out",
        "a sequence of less than a page is answered as if it had no keys (FlashInfer, issue 725)",
        Edit(
            TILED,
            "range(begin, last, page_size)",
            "range(begin, last if b == 0 or length >= page_size else 0, page_size)",
        ),
        function="tiled",
    ),
    Planted(
        "ragged__blocks_of_128",
        "pages of more than 128 keys are looked up as if they had 128 (vLLM on Gaudi, PR 1323)",
        Edit(
            TILED,
            "int(block_table[b, at // page_size])",
            "int(block_table[b, min(at // min(page_size, 128), block_table.shape[1] - 1)].clamp(0, len(k) - 1))",
        ),
        function="tiled",
    ),
    Planted(
        "window__of_the_last_query",
        "a window ends at the last query of a tile for all of its queries (FlashInfer, PR 4137)",
        Edit(TILED, "seen &= here - keys < window", "seen &= here[-1] - keys < window"),
        function="tiled",
    ),
    Planted(
        "ragged__first_heads_of_a_large_group",
        "of a group of more than 16 query heads the first 16 are stored (b12x, PR 24; vLLM, PR 23424)",
        Edit(
            TILED,
            "out[:, :, first:end] = (acc / not_zero(l)).to(q.dtype)",
            "stored = torch.arange(q.shape[1], device=q.device) % group < ROWS\n"
            "        out[:, stored, first:end] = (acc / not_zero(l)).to(q.dtype)[:, stored]",
        ),
        function="tiled",
    ),
    Planted(
        "ragged__corner_of_the_first_sequence",
        "the corner of the causal mask follows from the numbers of queries and keys of the first sequence",
        Edit(TILED, "+ length - queries", "+ lengths[0] - (starts[1] - starts[0]) + 0 * queries"),
        function="tiled",
    ),
    Planted(
        "ragged__sequence_found_by_its_first_row",
        "a tile's sequence is looked up without the tiles that are not full before it",
        Edit(TILED, "starts[x] // tile + x <= program", "starts[x] // tile <= program"),
        function="tiled",
    ),
    Planted(
        "ragged__pages_apart_by_their_size",
        "pages are taken to lie as many rows apart as they have (aiter, PR 3498)",
        Edit(
            EAGER,
            "gathered(x, pages, length) for x in (k, v)",
            "gathered(x.as_strided(x.shape, (x.shape[1] * x.shape[2] * x.shape[3], *x.stride()[1:])), pages, length)"
            " for x in (k, v)",
        ),
    ),
    Planted(
        "ragged__decoding_reads_a_whole_page",
        "a sequence of one query attends to all keys of its last page (vLLM, PR 47305)",
        Edit(
            TILED,
            "min(page_size, length - at)",
            "page_size if queries == 1 and not causal else min(page_size, length - at)",
        ),
        function="tiled",
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
