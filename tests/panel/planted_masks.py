"""Bugs planted in ``tests.panel.masks``; ``tests.panel.planted_masks:NAME`` is the function with the bug NAME."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

MASKS = "tests.panel.masks"
SEEN, TILES = f"{MASKS}:seen_keys", f"{MASKS}:key_tiles"

PLANTED = (
    Planted(
        "window__one_key_more",
        "a window has one key more than it is said to have",
        Edit(SEEN, "here - keys < window", "here - keys <= window"),
    ),
    Planted(
        "window__from_the_row",
        "a window ends at the key with the number of the row, also where the lengths differ",
        Edit(SEEN, "here - keys < window", "rows - keys < window"),
    ),
    Planted(
        "window__needs_causal",
        "a window is left out without a causal mask",
        Edit(SEEN, "if window:", "if window and causal:"),
    ),
    Planted(
        "window__at_most_64",
        "a window of more than 64 keys is taken for one of 64",
        Edit(SEEN, "here - keys < window", "here - keys < min(window, 64)"),
    ),
    Planted(
        "window__first_tile_of_last_row",
        "the first tile of a window is that of the last row of a tile of rows",
        Edit(TILES, "first_row - window + 1", "last_row - window + 1"),
        function="tiled",
    ),
    Planted(
        "window_right__one_key_more",
        "a window to the right has one key more than it is said to have",
        Edit(SEEN, "keys - here < window_right", "keys - here <= window_right"),
    ),
    Planted(
        "window_right__needs_window",
        "a window to the right is left out if there is none to the left",
        Edit(SEEN, "if window_right:", "if window_right and window:"),
    ),
    Planted(
        "window_right__from_the_row",
        "a window to the right begins at the key with the number of the row, also where the lengths differ",
        Edit(SEEN, "keys - here < window_right", "keys - rows < window_right"),
    ),
    Planted(
        "window_right__last_tile_of_first_row",
        "the last tile of a window to the right is that of the first row of a tile of rows",
        Edit(TILES, "last_row + window_right", "first_row + window_right"),
        function="tiled",
    ),
    Planted(
        "window_right__by_whole_tiles",
        "a window to the right is rounded up to whole tiles of 16 keys",
        Edit(SEEN, "keys - here < window_right", "keys - here < -(-window_right // 16) * 16"),
    ),
    Planted(
        "chunk__from_the_row",
        "the chunk of a row is counted from its number, also where the lengths differ",
        Edit(SEEN, "here // chunk == keys // chunk", "rows // chunk == keys // chunk"),
    ),
    Planted(
        "chunk__sees_the_one_before",
        "a row sees the chunk before its own as well, and those after it",
        Edit(SEEN, "here // chunk == keys // chunk", "(here // chunk - keys // chunk).clamp(min=0) <= 1"),
    ),
    Planted(
        "chunk__of_powers_of_2",
        "the size of a chunk is rounded down to a power of 2",
        Edit(
            SEEN,
            "here // chunk == keys // chunk",
            "here // (1 << chunk.bit_length() - 1) == keys // (1 << chunk.bit_length() - 1)",
        ),
    ),
    Planted(
        "chunk__last_tile_of_first_row",
        "the last tile of a chunk is that of the first row of a tile of rows",
        Edit(TILES, "(last_row // chunk + 1) * chunk", "(first_row // chunk + 1) * chunk"),
        function="tiled",
    ),
    Planted(
        "chunk__needs_causal",
        "chunks are left out without a causal mask",
        Edit(SEEN, "if chunk:", "if chunk and causal:"),
    ),
    Planted(
        "first_keys__one_key_less",
        "the last of the first keys is hidden",
        Edit(SEEN, "keys < first_keys", "keys < first_keys - 1"),
    ),
    Planted(
        "first_keys__before_causal_rows",
        "rows before the first keys see them under a causal mask",
        Edit(SEEN, "return seen | (keys < prefix)", "return seen | (keys < max(prefix, first_keys))"),
    ),
    Planted(
        "first_keys__in_tiles_of_the_window",
        "the first keys are seen only where their tile is visited anyway",
        Edit(
            TILES,
            "always = max(min(first_keys, last_row + 1) if causal else first_keys, prefix)",
            "always = prefix",
        ),
        function="tiled",
    ),
    Planted(
        "first_keys__hidden_by_chunks",
        "chunks hide the first keys",
        Edit(SEEN, "seen |= keys < first_keys", "seen |= (keys < first_keys) & (not chunk)"),
    ),
    Planted(
        "first_keys__of_one_tile",
        "at most the first 64 keys are always seen",
        Edit(SEEN, "keys < first_keys", "keys < min(first_keys, 64)"),
    ),
    Planted(
        "prefix__one_key_more",
        "the prefix has one key more than it is said to have",
        Edit(SEEN, "keys < prefix", "keys < prefix + (prefix > 0)"),
    ),
    Planted(
        "prefix__hidden_by_causal",
        "a causal mask hides the prefix",
        Edit(
            SEEN,
            "return seen | (keys < prefix)",
            "return seen | (keys < prefix) & ((keys <= here) | (not causal))",
        ),
    ),
    Planted(
        "prefix__in_tiles_before_the_diagonal",
        "the prefix is seen only where its tile is visited anyway",
        Edit(TILES, "if causal else first_keys, prefix)", "if causal else first_keys, 0)"),
        function="tiled",
    ),
    Planted(
        "prefix__hidden_by_a_window",
        "a window hides the prefix",
        Edit(SEEN, "return seen | (keys < prefix)", "return seen | (keys < prefix) & (not window)"),
    ),
    Planted(
        "prefix__of_the_first_rows",
        "only the first 64 rows see the prefix",
        Edit(SEEN, "return seen | (keys < prefix)", "return seen | (keys < prefix) & (rows < 64)"),
    ),
)
"""At least five bugs of each part of a pattern."""

COMBINED = (
    Planted(
        "window__with_first_keys_and_causal",
        "under a causal mask, first keys make a window one key shorter",
        Edit(SEEN, "here - keys < window", "here - keys < window - (causal and first_keys > 0)"),
    ),
    Planted(
        "chunk__with_grouped_heads_and_unequal_lengths",
        "with grouped heads the chunk of a row is counted from its number",
        Edit(
            SEEN,
            "here // chunk == keys // chunk",
            "(here if q.shape[1] == k.shape[1] else rows) // chunk == keys // chunk",
        ),
    ),
)
"""Bugs that show only if three things come together."""


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, (*PLANTED, *COMBINED))
