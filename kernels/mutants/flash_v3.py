"""Planted bugs of flash_v3: its descriptors, its loop, its mask."""

from kernels.mutants.mutant import Edit, Mutant

NAME = "flash_v3"
KERNEL = "kernels.flash_v3:_forward_kernel"

FLASH_V3 = (
    Mutant(
        "keys_described_too_short",
        "the descriptor of k leaves out the last key, which loads as 0",
        (
            Edit(
                KERNEL,
                "[seqlen_k, head_dim],\n        [stride_kn.to(tl.int64), 1],",
                "[seqlen_k - 1, head_dim],\n        [stride_kn.to(tl.int64), 1],",
            ),
        ),
        kernel=NAME,
    ),
    Mutant(
        "values_read_from_the_query_head",
        "the head of v is that of q: wrong where heads are grouped",
        (
            Edit(
                KERNEL,
                "v + batch * stride_vb + head_kv * stride_vh",
                "v + batch * stride_vb + head_q * stride_vh",
            ),
        ),
        kernel=NAME,
    ),
    Mutant(
        "tile_without_its_mask",
        "no key is masked, neither past seqlen_k nor past the diagonal",
        (
            Edit(
                KERNEL,
                "scores = tl.where(keys[None, :] <= (last_key - start_n)[:, None], scores, NEG_INF)",
                "",
            ),
        ),
        kernel=NAME,
    ),
    Mutant(
        "mask_not_advanced",
        "the mask of every key tile is that of the first",
        (Edit(KERNEL, "(last_key - start_n)[:, None]", "last_key[:, None]"),),
        kernel=NAME,
    ),
    Mutant(
        "later_query_tiles_stored_a_row_late",
        "a query tile after the first is stored one row further on",
        (
            Edit(
                KERNEL,
                "out_tiles.store([copied_m, 0]",
                "out_tiles.store([copied_m + (start_m > 0).to(tl.int32), 0]",
            ),
        ),
        kernel=NAME,
        subtle=True,
    ),
    Mutant(
        "v3_accumulator_not_rescaled",
        "what was summed relative to an earlier maximum is not brought to the new one",
        (Edit(KERNEL, "acc * alpha[:, None]", "acc"),),
        kernel=NAME,
    ),
    Mutant(
        "maximum_left_out_of_lse",
        "lse is the logarithm of the sum relative to the maximum",
        (Edit(KERNEL, "(m_i + tl.log2(l_i)) * LN2", "tl.log2(l_i) * LN2"),),
        kernel=NAME,
    ),
    Mutant(
        "rows_of_out_as_wide_as_a_tile",
        "out's rows are taken to be as wide as a tile: wrong where head_dim is padded",
        (
            Edit(
                KERNEL,
                "[tl.full([], 1, tl.int64) * head_dim, 1]",
                "[tl.full([], 1, tl.int64) * HEAD_DIM, 1]",
            ),
        ),
        kernel=NAME,
    ),
)
