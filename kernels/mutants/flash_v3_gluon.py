"""Planted bugs of flash_v3_gluon, which runs on a Hopper GPU alone. None leaves a barrier waiting for ever."""

from kernels.mutants.mutant import Edit, Mutant

NAME = "flash_v3_gluon"
PRODUCE = "kernels.flash_v3_gluon:_produce"
CONSUME = "kernels.flash_v3_gluon:_consume"
HIDE = "kernels.flash_v3_gluon:_hide"
STEP = "kernels.flash_v3_gluon:_softmax_step"
TASKS = "kernels.flash_v3_gluon:_Tasks"
FORWARD = "kernels.flash_v3_gluon:forward"


def _planted(name: str, what: str, edit: Edit) -> Mutant:
    return Mutant(name, what, (edit,), kernel=NAME, device="cuda")


FLASH_V3_GLUON = (
    _planted(
        "producer_ignores_the_group",
        "k and v are copied from head 0 of each batch",
        Edit(PRODUCE, "head_kv = head // s.tasks.group", "head_kv = head * 0"),
    ),
    _planted(
        "values_copied_in_the_other_order",
        "tiles of v come from the first to the last, tiles of k from the last to the first",
        Edit(
            PRODUCE,
            "s.v_ring.fill(loaded + i, s.v, [batch, head_kv, row, 0])",
            "s.v_ring.fill(loaded + i, s.v, [batch, head_kv, i * s.tasks.BLOCK_KEYS, 0])",
        ),
    ),
    _planted(
        "consumers_share_their_query_rows",
        "every consumer is given the rows of the first",
        Edit(PRODUCE, "start_m + consumer * ROWS", "start_m"),
    ),
    _planted(
        "diagonal_off_by_one",
        "a key is masked where it is the last that the row sees",
        Edit(HIDE, "keys[None, :] <= ", "keys[None, :] < "),
    ),
    _planted(
        "cut_tile_taken_for_whole",
        "the first of the tiles that an edge cuts is not masked, unless it is the last of all",
        Edit(CONSUME, "if tiles - 1 - i >= whole:", "if tiles - 1 - i > whole:"),
    ),
    _planted(
        "gluon_sum_not_rescaled",
        "l is not brought to the new maximum",
        Edit(STEP, "l_i * alpha + gl.sum(p, 1)", "l_i + gl.sum(p, 1)"),
    ),
    _planted(
        "output_not_rescaled",
        "the output is not brought to the new maximum",
        Edit(
            CONSUME,
            "acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, of_out))[:, None]\n",
            "acc = acc * 1.0\n",
        ),
    ),
    _planted(
        "lse_of_the_first_batch",
        "lse is stored by head alone: all batches write that of the first",
        Edit(CONSUME, "(batch * s.tasks.heads_q + head)", "head"),
    ),
    _planted(
        "negative_scale_taken_for_positive",
        "the maximum is scaled whatever the sign of sm_scale: where negative, what is masked weighs most",
        Edit(FORWARD, "POSITIVE=scale_log2 >= torch.finfo(torch.float32).tiny", "POSITIVE=True"),
    ),
    _planted(
        "tasks_aligned_top_left",
        "which key tiles a task walks is taken from a mask aligned at the top left",
        Edit(TASKS, "start_m + self.seqlen_k - self.seqlen_q", "start_m"),
    ),
)
