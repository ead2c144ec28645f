"""Planted bugs of the sliding window, in the second version."""

from kernels.mutants.mutant import Edit, Mutant

FORWARD = "kernels.flash_v2:_forward_kernel"
DQ = "kernels.flash_v2:_dq_kernel"
OF_KEYS = "kernels.flash_v2:gradients_of_keys"
FIRST_TILE = "kernels.tiles:first_tile_of_window"

WINDOW = (
    Mutant(
        "window_one_more",
        "the window is one key wider than it should be",
        (Edit(FORWARD, "- window + 1) if", "- window) if"),),
    ),
    Mutant(
        "window_not_in_dq",
        "dq takes all keys of the tiles that the window cuts",
        (Edit(DQ, "rows + (seqlen_k - seqlen_q - window + 1) if WINDOW else None", "None"),),
    ),
    Mutant(
        "window_first_tile_late",
        "the first tile of keys is left out where the window does not start with it",
        (Edit(FIRST_TILE, "first_key // BLOCK_KEYS", "tl.cdiv(first_key, BLOCK_KEYS)"),),
    ),
    Mutant(
        "window_last_rows_not_in_dk_dv",
        "the last tile of queries that see a key is left out of dk and dv where it is not whole",
        (
            Edit(
                OF_KEYS,
                "tl.cdiv(start_n + BLOCK_KEYS - 1 + window - offset, BLOCK_ROWS)",
                "(start_n + BLOCK_KEYS - 1 + window - offset) // BLOCK_ROWS",
            ),
        ),
    ),
)
