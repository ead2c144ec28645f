"""Planted bugs of dropout, in the first and the second version."""

from kernels.mutants.mutant import Edit, Mutant

V1_FORWARD = "kernels.flash_v1:_forward_kernel"
V1_BACKWARD = "kernels.flash_v1:_backward_kernel"
FORWARD = "kernels.flash_v2:_forward_kernel"
ATTEND = "kernels.flash_v2:attend"
DQ = "kernels.flash_v2:_dq_kernel"
OF_KEYS = "kernels.flash_v2:gradients_of_keys"
FACTORS = "kernels.tiles:dropout_factors"
ARGUMENTS = "kernels.launching:dropout_arguments"

Z = "dropout_factors(dropout, 0, rows[:, None], start_n + keys[None, :])"

DROPOUT = (
    Mutant(
        "dropout_of_the_tile",
        "the mask depends on where in its tile a key is",
        (Edit(ATTEND, "rows[:, None], start_n + keys[None, :])", "rows[:, None], keys[None, :])"),),
    ),
    Mutant(
        "dropout_rows_and_keys_swapped",
        "dk and dv take the mask of the pair the other way about",
        (
            Edit(
                OF_KEYS,
                "start_m + rows[None, :], keys[:, None])",
                "keys[:, None], start_m + rows[None, :])",
            ),
        ),
    ),
    Mutant(
        "dropout_of_first_member",
        "dk and dv take the mask of the first head of a group for all of them",
        (Edit(OF_KEYS, "dropout_factors(dropout, member,", "dropout_factors(dropout, 0,"),),
    ),
    Mutant(
        "dropout_by_head_alone",
        "dq takes the mask of the first batch element",
        (Edit(DQ, "keep_scale, head) if", "keep_scale, head_q) if"),),
    ),
    Mutant(
        "dropout_not_scaled",
        "what is kept is not divided by 1 - p",
        (Edit(FORWARD, "threshold, keep_scale, head)", "threshold, 1.0, head)"),),
    ),
    Mutant(
        "dropout_not_scaled_in_dq",
        "dP is not divided by 1 - p in dq",
        (Edit(DQ, "threshold, keep_scale, head)", "threshold, 1.0, head)"),),
    ),
    Mutant("dropout_not_in_dp", "dP is not dropped in dk", (Edit(OF_KEYS, "dp *= z", "dp *= 1.0"),)),
    Mutant(
        "dropout_in_ds",
        "dS is made of the dropped weights in dk",
        (Edit(OF_KEYS, "ds = p * (dp", "ds = dropped * (dp"),),
    ),
    Mutant(
        "dropout_before_the_sum",
        "dropped weights are left out of the softmax sum",
        (
            Edit(
                ATTEND,
                f"p *= {Z}",
                f"z = {Z}\n                l_i -= tl.sum(tl.where(z == 0.0, p, 0.0), 1)\n                p *= z",
            ),
        ),
    ),
    Mutant(
        "dropout_of_nine_rounds",
        "Philox of nine rounds: as random, but not the mask that is documented",
        (Edit(FACTORS, "tl.static_range(10)", "tl.static_range(9)"),),
    ),
    Mutant(
        "dropout_seed_of_32_bits",
        "the upper word of the seed is lost",
        (Edit(FACTORS, "k1 = (seed.to(tl.uint64) >> 32)", "k1 = (seed.to(tl.uint64) >> 63)"),),
    ),
    Mutant(
        "dropout_threshold_rounded",
        "the threshold counts in 2^-8",
        (Edit(ARGUMENTS, "round(dropout_p * 2**32)", "round(dropout_p * 2**8) * 2**24"),),
        subtle=True,
    ),
    Mutant(
        "v1_dropout_of_another_mask_in_backward",
        "the backward pass takes the mask of the next seed",
        (
            Edit(
                "kernels.flash_v1:backward",
                "dropout_arguments(dropout_p, dropout_seed)",
                "dropout_arguments(dropout_p, dropout_seed + 1)",
            ),
        ),
        kernel="flash_v1",
    ),
    Mutant(
        "v1_dropout_not_scaled",
        "what is kept is not divided by 1 - p",
        (Edit(V1_FORWARD, "threshold, keep_scale, head)", "threshold, 1.0, head)"),),
        kernel="flash_v1",
    ),
    Mutant(
        "v1_dropout_not_in_dv",
        "dv is made of all weights",
        (Edit(V1_BACKWARD, "dot(dropped.to(do_tile.dtype)", "dot(p.to(do_tile.dtype)"),),
        kernel="flash_v1",
    ),
    Mutant(
        "v1_dropout_of_the_block",
        "the mask depends on where in its block a row is",
        (
            Edit(
                V1_FORWARD,
                "start_m + rows[:, None], start_n + keys[None, :]",
                "rows[:, None], start_n + keys[None, :]",
            ),
        ),
        kernel="flash_v1",
    ),
)
