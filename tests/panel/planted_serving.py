"""Bugs planted in ``tests.panel.padded_rows``, ``split_cache`` and ``packed``, after reports of packed and split calls.

``tests.panel.planted_serving:NAME`` is the function with the bug NAME.
"""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

ROWS, SPLIT = "tests.panel.padded_rows", "tests.panel.split_cache"
ZEROS = "torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)"

PLANTED = (
    Planted(
        "rows_behind__gradients_unwritten",
        "gradients of rows behind the last sequence are what was in memory (TransformerEngine, PR 3205)",
        Edit(f"{ROWS}:_Packed", ZEROS, ZEROS.replace("zeros", "empty")),
        function="of_fixed_size",
    ),
    Planted(
        "rows_behind__out_unwritten",
        "out of rows behind the last sequence is what was in memory (FlashAttention, issue 1228)",
        Edit(
            f"{ROWS}:_Packed",
            "torch.zeros(*q.shape[:3], v.shape[3]",
            "torch.empty(*q.shape[:3], v.shape[3]",
        ),
        function="of_fixed_size",
    ),
    Planted(
        "rows_behind__of_the_last_sequence",
        "rows and keys behind the last sequence count as its own",
        Edit(
            f"{ROWS}:of_fixed_size",
            "parts = [(slice(*rows), slice(*keys)) for rows, keys in cuts]",
            "parts = [(slice(*rows), slice(*keys)) for rows, keys in cuts]\n"
            "        parts[-1] = (slice(parts[-1][0].start, q.shape[2]), slice(parts[-1][1].start, k.shape[2]))",
        ),
        function="of_fixed_size",
    ),
    Planted(
        "ragged__parts_by_the_longest_of_the_batch",
        "the number of parts follows from the longest sequence of the batch (FlashAttention, PR 2450)",
        Edit(f"{SPLIT}:in_own_parts", "parts_of(length))", "parts_of(max(lengths)))"),
        function="in_own_parts",
    ),
    Planted(
        "ragged__parts_by_all_keys_of_the_batch",
        "the number of parts follows from all keys of the batch (FlashMLA, issue 212)",
        Edit(f"{SPLIT}:in_own_parts", "parts_of(length))", "parts_of(sum(lengths)))"),
        function="in_own_parts",
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
