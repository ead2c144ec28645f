"""Planted bugs of ``flash_v2_atomic``'s backward pass."""

from kernels.mutants.mutant import Edit, Mutant

NAME = "flash_v2_atomic"
KERNEL = "kernels.flash_v2_atomic:_backward_kernel"
LAUNCH = "kernels.flash_v2_atomic:backward"

SEEN = "seen = ((first_row - start_m)[:, None] <= rows[None, :]) & in_tile[None, :] & in_keys[:, None]"
RETURNED = "dq_sum.mul_(float(sm_scale)).to(q.dtype)"
INSIDE = "inside = in_tile[:, None]"


def _bug(name: str, what: str, *edits: Edit, subtle: bool = False) -> Mutant:
    return Mutant(name, what, edits, kernel=NAME, subtle=subtle)


ATOMIC = (
    _bug(
        "atomic_dq_not_zeroed",
        "dq starts from memory as it was",
        Edit(LAUNCH, "torch.zeros(q.shape", "torch.empty(q.shape"),
    ),
    _bug(
        "atomic_dq_overwritten",
        "key tiles overwrite each other's dq",
        Edit(KERNEL, "tl.atomic_add(", "tl.store("),
        Edit(KERNEL, ', sem="relaxed"', ""),
    ),
    _bug(
        "atomic_dq_in_the_input_dtype",
        "each tile's part of dq is rounded to the input's dtype before it is added",
        Edit(
            KERNEL,
            "dq_part = dot(tl.trans(ds), k_tile, None, PRECISION)",
            "dq_part = dot(tl.trans(ds), k_tile, None, PRECISION).to(q_tile.dtype).to(tl.float32)",
        ),
        subtle=True,
    ),
    _bug(
        "atomic_dq_of_one_head",
        "every query head of a group adds to the dq of the first",
        Edit(
            KERNEL,
            "advance(dq_ptrs, row_base * head_dim, ALIGNED)",
            "advance(dq_ptrs, (row_base - member * seqlen_q) * head_dim, ALIGNED)",
        ),
    ),
    _bug(
        "atomic_dq_unscaled",
        "dq lacks sm_scale",
        Edit(LAUNCH, RETURNED, "dq_sum.to(q.dtype)"),
    ),
    _bug(
        "atomic_dq_past_the_end",
        "rows past seqlen_q add their 0 to what lies behind dq, or to the next head's",
        Edit(KERNEL, INSIDE, "inside = (in_tile | (rows >= 0))[:, None]"),
    ),
    _bug(
        "atomic_dq_last_row_lost",
        "the last row of each query tile adds nothing to dq",
        Edit(KERNEL, INSIDE, "inside = (in_tile & (rows != BLOCK_LOOP - 1))[:, None]"),
        subtle=True,
    ),
    _bug(
        "atomic_first_tile_after_the_diagonal",
        "under a causal mask, the query tile on the diagonal is left out",
        Edit(KERNEL, "// BLOCK_LOOP\n    tiles_q", "// BLOCK_LOOP + 1\n    tiles_q"),
    ),
    _bug(
        "atomic_diagonal_masked",
        "the last key of every row is masked",
        Edit(KERNEL, SEEN, SEEN.replace("<=", "<")),
    ),
    _bug(
        "atomic_delta_of_first_member",
        "every query head of a group takes delta of the first",
        Edit(KERNEL, "delta + row_base", "delta + row_base - member * seqlen_q"),
    ),
)
