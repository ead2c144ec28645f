"""Planted bugs of ``flash_v2_staged``'s two stages."""

from kernels.mutants.mutant import Edit, Mutant

NAME = "flash_v2_staged"
KERNEL = "kernels.flash_v2_staged:_forward_kernel"
LAUNCH = "kernels.flash_v2_staged:forward"

RANGE = "range(whole if diagonal else 0, tiles_k if diagonal else whole)"
SEEN = "seen = (tile * BLOCK_LOOP + keys)[None, :] <= rows[:, None]"
WHOLE = "whole = (start_m if CAUSAL else seqlen_k) // BLOCK_LOOP"
TILES = "tiles_k = whole + BLOCK_OWN // BLOCK_LOOP"


def _bug(name: str, what: str, *edits: Edit, subtle: bool = False) -> Mutant:
    return Mutant(name, what, edits, kernel=NAME, subtle=subtle)


STAGED = (
    _bug(
        "staged_no_diagonal",
        "the stage on the diagonal is left out",
        Edit(KERNEL, "tl.static_range(2 if CAUSAL else 1)", "tl.static_range(1)"),
    ),
    _bug(
        "staged_one_tile_on_the_diagonal",
        "the stage on the diagonal takes one key tile, where block_m holds several",
        Edit(KERNEL, TILES, "tiles_k = whole + 1"),
    ),
    _bug(
        "staged_diagonal_from_the_first_key",
        "the stage on the diagonal takes the keys before it once more",
        Edit(KERNEL, RANGE, "range(0, tiles_k if diagonal else whole)"),
    ),
    _bug(
        "staged_first_tile_twice",
        "the first key tile counts twice where several precede the diagonal",
        Edit(KERNEL, RANGE, "range(whole if diagonal else whole // 4 * -1, tiles_k if diagonal else whole)"),
        Edit(
            KERNEL, "k_tile = tl.load(advance(k_ptrs, tile", "k_tile = tl.load(advance(k_ptrs, max(tile, 0)"
        ),
        Edit(
            KERNEL, "v_tile = tl.load(advance(v_ptrs, tile", "v_tile = tl.load(advance(v_ptrs, max(tile, 0)"
        ),
    ),
    _bug(
        "staged_diagonal_unmasked",
        "the tiles on the diagonal are not masked",
        Edit(KERNEL, "if diagonal:", "if diagonal and HEAD_DIM < 0:"),
    ),
    _bug(
        "staged_own_key_masked",
        "no query sees the key of its own place",
        Edit(KERNEL, SEEN, SEEN.replace("<=", "<")),
    ),
    _bug(
        "staged_mask_without_the_tile",
        "every tile on the diagonal is masked as the first",
        Edit(KERNEL, SEEN, "seen = (start_m + keys)[None, :] <= rows[:, None]"),
    ),
    _bug(
        "staged_keys_counted_by_queries",
        "without a mask, as many keys are taken as there are queries",
        Edit(KERNEL, WHOLE, WHOLE.replace("else seqlen_k", "else seqlen_q")),
    ),
    _bug(
        "staged_accumulator_not_rescaled_on_the_diagonal",
        "the stage on the diagonal does not bring the accumulator to the new maximum",
        Edit(KERNEL, "acc * alpha[:, None]", "acc if diagonal else acc * alpha[:, None]"),
    ),
    _bug(
        "staged_lengths_unchecked",
        "lengths that are no whole number of tiles are taken, and rounded down",
        Edit(LAUNCH, "if seqlen_q % block_m:", "if False:"),
    ),
    _bug(
        "staged_unequal_lengths_unchecked",
        "unequal lengths are taken under a causal mask",
        Edit(LAUNCH, "if causal and seqlen_k != seqlen_q:", "if False:"),
    ),
)
