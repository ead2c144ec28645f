"""Planted bugs of ``flash_v2_persistent``: its tasks, its slices, its cast to e5m2."""

from kernels.mutants.mutant import Edit, Mutant

NAME = "flash_v2_persistent"
KERNEL = "kernels.flash_v2_persistent:_forward_kernel"
CAST = "kernels.flash_v2_persistent:to_e5m2"
SETTINGS = "kernels.flash_v2_persistent:_Settings"
LAUNCH = "kernels.flash_v2_persistent:forward"

TASKS = "tl.range(tl.program_id(0), heads * tiles, tl.num_programs(0), disable_licm=True)"
SCALED = "acc[index] * alpha[:, None]"


def _bug(name: str, what: str, *edits: Edit, subtle: bool = False) -> Mutant:
    return Mutant(name, what, edits, kernel=NAME, subtle=subtle)


PERSISTENT = (
    _bug(
        "persistent_last_task_left_out",
        "the last task is never done",
        Edit(KERNEL, TASKS, TASKS.replace("heads * tiles", "heads * tiles - 1")),
    ),
    _bug(
        "persistent_one_task_each",
        "every program does its first task alone",
        Edit(KERNEL, TASKS, TASKS.replace("tl.num_programs(0)", "heads * tiles")),
    ),
    _bug(
        "persistent_tiles_by_heads",
        "tile and head of a task are told apart by the number of tiles",
        Edit(KERNEL, "(task % heads).to(tl.int64)", "(task % tiles % heads).to(tl.int64)"),
    ),
    _bug(
        "persistent_head_of_the_batch",
        "every batch element reads the first",
        Edit(KERNEL, "batch = head // heads_q", "batch = head // heads"),
    ),
    _bug(
        "persistent_first_slice_everywhere",
        "every slice reads the first columns of v",
        Edit(KERNEL, "tile * v_step + index * SLICE", "tile * v_step + 0 * SLICE"),
    ),
    _bug(
        "persistent_first_slice_rescaled_alone",
        "slices but the first are not brought to the new maximum",
        Edit(KERNEL, SCALED, f"({SCALED} if index == 0 else acc[index])"),
    ),
    _bug(
        "persistent_last_column_of_a_slice_dropped",
        "the last column of each slice of v is 0",
        Edit(
            KERNEL,
            "columns_inside(index * SLICE + slice_cols, head_dim, v, ALIGNED)",
            "columns_inside(index * SLICE + slice_cols, head_dim, v, False) & (slice_cols < SLICE - 1)",
        ),
        Edit(
            KERNEL,
            "load_tile(slice_ptrs, in_tile, in_slice, cut, MASK_COLS)",
            "load_tile(slice_ptrs, in_tile, in_slice, cut, True)",
        ),
        subtle=True,
    ),
    _bug(
        "persistent_slice_stored_past_head_dim",
        "every slice is stored as if it were the first",
        Edit(
            KERNEL,
            "columns_inside(index * SLICE + slice_cols, head_dim, out, ALIGNED)",
            "columns_inside(slice_cols, head_dim, out, ALIGNED)",
        ),
    ),
    _bug(
        "persistent_e5m2_truncates",
        "the cast of v to e5m2 drops bits",
        Edit(
            CAST,
            "v, limited).to(torch.float8_e5m2)",
            "v, limited).half().view(torch.int16).bitwise_and(-256).view(torch.float16).to(torch.float8_e5m2)",
        ),
        subtle=True,
    ),
    _bug(
        "persistent_e5m2_overflows",
        "values beyond the largest e5m2 become infinite",
        Edit(CAST, "torch.where(v.isinf(), v, limited)", "v"),
    ),
    _bug(
        "persistent_e5m2_infinity_lost",
        "infinities of v become the largest e5m2",
        Edit(CAST, "torch.where(v.isinf(), v, limited)", "limited"),
    ),
    _bug(
        "persistent_e5m2_whatever_was_asked_for",
        "v is rounded to e5m2 though it was to stay as it is",
        Edit(SETTINGS, 'self.v_dtype == "float8_e5m2"', "True"),
    ),
)
