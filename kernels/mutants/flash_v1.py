"""Planted bugs of the first version: what it keeps in memory between key blocks, and what it does to it there."""

from kernels.mutants.mutant import Edit, Mutant

FORWARD = "kernels.flash_v1:_forward_kernel"
BACKWARD = "kernels.flash_v1:_backward_kernel"
LAUNCH = "kernels.flash_v1:forward"
LAUNCH_BACKWARD = "kernels.flash_v1:backward"

FIRST = "first = tl.maximum(start_n - (seqlen_k - seqlen_q), 0) // BLOCK_M"
LAST = "last_key = tl.full([BLOCK_M], seqlen_k - 1, tl.int32)"
FLOAT32 = "acc = torch.empty(q.shape, dtype=torch.float32, device=q.device)"
OF_DQ = "dq_tile = dot(tl.trans(ds), k_tile, dq_tile, PRECISION)"


def _planted(name: str, what: str, where: str, old: str, new: str, *, subtle: bool = False) -> Mutant:
    return Mutant(f"v1_{name}", what, (Edit(where, old, new),), kernel="flash_v1", subtle=subtle)


FLASH_V1 = (
    # out, l and m between key blocks
    _planted(
        "out_not_rescaled",
        "the out of earlier key blocks is not brought to the new maximum",
        FORWARD,
        "(l_i * alpha)[:, None]",
        "l_i[:, None]",
    ),
    _planted(
        "out_not_weighted",
        "the out of earlier key blocks is not multiplied by their sum",
        FORWARD,
        "(l_i * alpha)[:, None]",
        "alpha[:, None]",
    ),
    _planted(
        "divided_by_the_old_sum",
        "out is divided by the sum of the key blocks before, but for the first",
        FORWARD,
        "tl.where(l_new == 0.0, 1.0, l_new)",
        "tl.where(l_i == 0.0, l_new, l_i)",
    ),
    _planted(
        "maximum_not_stored",
        "m stays what the key block before found",
        FORWARD,
        "tl.store(m_ptrs, m_new, mask=in_rows)",
        "tl.store(m_ptrs, tl.where(m_i == NEG_INF, m_new, m_i), mask=in_rows)",
    ),
    _planted(
        "out_kept_in_the_inputs_dtype",
        "out is rounded to the inputs' dtype at every key block",
        LAUNCH,
        FLOAT32,
        FLOAT32.replace("torch.float32", "q.dtype"),
        subtle=True,
    ),
    _planted(
        "sum_not_initialised",
        "l is scratch memory as it was",
        LAUNCH,
        "l = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device).zero_()",
        "l = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)",
    ),
    _planted(
        "maximum_from_zero",
        "m starts at 0: rows of very negative scores underflow",
        LAUNCH,
        "fill_(-math.inf)",
        "zero_()",
    ),
    _planted("lse_in_base_2", "lse is a logarithm to base 2", LAUNCH, " * LN2.value", ""),
    # Blocks and masks
    _planted(
        "first_block_late",
        "query blocks that see a key block in part are left out",
        FORWARD,
        FIRST,
        FIRST.replace("0) // BLOCK_M", "0) + BLOCK_M - 1").replace("= tl", "= (tl") + ") // BLOCK_M",
    ),
    _planted(
        "padding_scored", "the key after the last is not masked", FORWARD, LAST, LAST.replace(" - 1", "")
    ),
    _planted(
        "one_row_sees_one_more",
        "row 7 of a query block sees a key too many",
        FORWARD,
        "last_key = start_m + rows + (seqlen_k - seqlen_q)",
        "last_key = start_m + rows + (seqlen_k - seqlen_q) + tl.where(rows == 7, 1, 0)",
        subtle=True,
    ),
    _planted(
        "backward_top_left",
        "the backward pass masks top-left",
        BACKWARD,
        "last_key = start_m + rows + (seqlen_k - seqlen_q)",
        "last_key = start_m + rows",
    ),
    # dq, dk and dv
    _planted(
        "dq_overwritten",
        "dq is that of the last key block alone",
        BACKWARD,
        OF_DQ,
        OF_DQ.replace("dq_tile, PREC", "None, PREC"),
    ),
    _planted(
        "dq_kept_in_the_inputs_dtype",
        "dq is rounded to the inputs' dtype at every key block",
        BACKWARD,
        OF_DQ,
        # In a tensor of that dtype the product would find a sum of another type, which Triton refuses.
        f"{OF_DQ}.to(q_tile.dtype)",
        subtle=True,
    ),
    _planted("dq_not_scaled", "dq is not scaled", LAUNCH_BACKWARD, "acc * sm_scale", "acc"),
    _planted(
        "delta_of_first_member",
        "the heads of a group share the delta of their first",
        BACKWARD,
        "tl.load(delta + of_rows,",
        "tl.load(delta + head * group * seqlen_q + start_m + rows,",
    ),
    _planted(
        "last_member_dropped",
        "dk and dv leave out the last head of a group of four or more, and it has no dq",
        BACKWARD,
        "range(group * blocks)",
        "range((group - group // 4) * blocks)",
    ),
)
