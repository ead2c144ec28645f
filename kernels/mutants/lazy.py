"""Planted bugs of ``flash_v2_lazy``'s lazy rescaling."""

from kernels.mutants.mutant import Edit, Mutant

NAME = "flash_v2_lazy"
STEP = "kernels.flash_v2_lazy:lazy_softmax_step"
KERNEL = "kernels.flash_v2_lazy:_forward_kernel"

STAYS = "stays = top - m_i <= LAG"
KEPT = "m_new = tl.where(stays, m_i, top)"
ALPHA = "alpha = tl.exp2(m_i - shift)"
RESCALED = "acc *= alpha[:, None]"
BRANCH = "if tl.max(moved.to(tl.int32), 0) > 0:"


def _bug(name: str, what: str, *edits: Edit, subtle: bool = False) -> Mutant:
    return Mutant(name, what, edits, kernel=NAME, subtle=subtle)


LAZY = (
    _bug(
        "lazy_accumulator_not_rescaled",
        "the accumulator is not brought to a reference that moved",
        Edit(KERNEL, RESCALED, "acc = acc"),
    ),
    _bug(
        "lazy_sum_not_rescaled",
        "the sum is not brought to a reference that moved, though the accumulator is",
        Edit(STEP, "l_i * alpha", "l_i"),
    ),
    _bug(
        "lazy_rescaled_if_all_rows_moved",
        "a tile's accumulator is rescaled only if the reference of every row moved",
        Edit(KERNEL, BRANCH, BRANCH.replace("tl.max", "tl.min")),
        subtle=True,
    ),
    _bug(
        "lazy_rescaled_if_the_first_row_moved",
        "the first row of a tile decides for all rows whether the accumulator is rescaled",
        Edit(KERNEL, BRANCH, "if tl.max(tl.where(rows == start_m, moved, False).to(tl.int32), 0) > 0:"),
        subtle=True,
    ),
    _bug(
        "lazy_reference_moves_unnoticed",
        "where rescaling is skipped, new weights are relative to the new maximum, and earlier ones to the old one",
        Edit(STEP, KEPT, "m_new = top"),
        Edit(STEP, ALPHA, "alpha = tl.where(stays, 1.0, tl.exp2(m_i - shift))"),
        Edit(
            STEP, "return p, ~stays, alpha, m_new,", "return p, ~stays, alpha, tl.where(stays, m_i, m_new),"
        ),
    ),
    _bug(
        "lazy_lse_of_the_maximum",
        "the largest score is returned as the reference, to which the weights are not relative",
        Edit(STEP, "alpha, m_new,", "alpha, top,"),
    ),
    _bug(
        "lazy_threshold_is_256",
        "the threshold is 256 rather than its logarithm, so that weights overflow",
        Edit(STEP, "<= LAG", "<= 256"),
        subtle=True,
    ),
    _bug(
        "lazy_threshold_of_a_fall",
        "the distance is taken with the wrong sign, so that no reference ever moves",
        Edit(STEP, STAYS, "stays = m_i - top <= LAG"),
    ),
    _bug(
        "lazy_empty_row_is_nan",
        "a row that has seen no key yet takes the distance of -inf from -inf",
        Edit(STEP, "shift = tl.where(m_new == NEG_INF, 0.0, m_new)", "shift = m_new"),
    ),
)
