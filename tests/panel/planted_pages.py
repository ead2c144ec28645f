"""Bugs planted in ``tests.panel.paged``; ``tests.panel.planted_pages:NAME`` is the function with the bug NAME."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

PAGED = "tests.panel.paged"
EAGER, TILED, GATHERED = f"{PAGED}:eager", f"{PAGED}:tiled", f"{PAGED}:gathered"

PLANTED = (
    Planted(
        "ragged__pages_of_the_first",
        "every sequence has the pages of the first",
        Edit(EAGER, "block_table[b, :used]", "block_table[0, :used].clamp(0, len(k) - 1)"),
    ),
    Planted(
        "ragged__last_page_full",
        "the last page of a sequence is taken as full",
        Edit(GATHERED, "[None, :, :length]", "[None]"),
    ),
    Planted(
        "ragged__corner_of_the_longest",
        "the corner of a causal mask is that of the longest sequence",
        Edit(TILED, "(length - q.shape[2])", "(max(lengths) - q.shape[2])"),
        function="tiled",
    ),
    Planted(
        "ragged__rows_of_the_table_adjacent",
        "rows of the table are taken to be adjacent",
        Edit(
            EAGER,
            "block_table[b, :used]",
            "block_table.as_strided(block_table.shape, (block_table.shape[1], 1))[b, :used].clamp(0, len(k) - 1)",
        ),
    ),
    Planted(
        "ragged__pool_contiguous",
        "the heads of a page are taken to lie one after another, each with all its rows",
        Edit(GATHERED, "x[pages]", "x.as_strided(x.shape, torch.empty(x.shape).stride())[pages]"),
    ),
    Planted(
        "ragged__page_0_where_there_is_one",
        "a sequence of one page has page 0",
        Edit(EAGER, "block_table[b, :used].long()", "block_table[b, :used].long() * (used > 1)"),
    ),
    Planted(
        "ragged__pages_in_order",
        "the pages of a sequence are taken to follow its first",
        Edit(
            TILED,
            "int(block_table[b, at // page_size])",
            "min(int(block_table[b, 0]) + at // page_size, len(k) - 1)",
        ),
        function="tiled",
    ),
    Planted(
        "ragged__pages_of_16_keys",
        "keys are looked up as if every page had 16",
        Edit(
            TILED,
            "int(block_table[b, at // page_size])",
            "int(block_table[b, min(at // 16, block_table.shape[1] - 1)].clamp(0, len(k) - 1))",
        ),
        function="tiled",
    ),
    Planted(
        "ragged__partly_filled_page_left_out",
        "a last page that is not full is left out",
        Edit(TILED, "range(0, length, page_size)", "range(0, length - page_size + 1, page_size)"),
        function="tiled",
    ),
    Planted(
        "ragged__one_key_less_on_a_border",
        "the last key of a sequence whose pages are all full is left out",
        Edit(GATHERED, "[None, :, :length]", "[None, :, : length - (0 < length == rows.shape[1])]"),
    ),
    Planted(
        "ragged__at_most_four_pages",
        "only the first four pages of a sequence are visited",
        Edit(TILED, "range(0, length, page_size)", "range(0, min(length, 4 * page_size), page_size)"),
        function="tiled",
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
