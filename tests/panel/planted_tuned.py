"""Bugs planted in ``tests.panel.tuned``; ``tests.panel.planted_tuned:NAME`` is the function with the bug NAME.

Most are after reports: of configurations that alone are wrong, and of results that trial runs leave behind.
"""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

TUNED = "tests.panel.tuned"
FORWARD, GRADIENTS = f"{TUNED}:_forward", f"{TUNED}:_gradients"

SEES = 's = tl.where(n[None, :] <= rows[:, None] + seqlen_k - seqlen_q, s, float("-inf"))'
LATER = 's = tl.where(n[None, :] <= rows[:, None] + seqlen_k - seqlen_q - 1, s, float("-inf"))'


def _planted(name: str, what: str, edit: Edit) -> Planted:
    """Return a bug of the function that its name begins with."""
    return Planted(name, what, edit, function=name.partition("__")[0])


PLANTED = (
    _planted(
        "attention__diagonal_of_one_configuration",
        "one of twelve configurations hides the diagonal: the mask of a tile of 32 x 32 with three stages",
        Edit(
            FORWARD,
            SEES,
            f"if (BLOCK_M == 32) & (BLOCK_N == 32) & (STAGES == 3):\n                {LATER}\n"
            f"            else:\n                {SEES}",
        ),
    ),
    _planted(
        "attention__loop_by_key_tile",
        "the causal loop ends by the rows of a key tile: right where both tiles are equal (triton 2020)",
        Edit(FORWARD, "start + BLOCK_M + seqlen_k", "start + BLOCK_N + seqlen_k"),
    ),
    _planted(
        "attention__first_rows_by_key_tile",
        "the rows of a key tile begin by tiles of keys: wrong where tiles differ (intel-xpu 6169)",
        Edit(GRADIENTS, "// BLOCK_M * BLOCK_M", "// BLOCK_N * BLOCK_N + BLOCK_M - BLOCK_N"),
    ),
    _planted(
        "attention__three_stages_lose_a_tile",
        "with three stages the last tile of keys is left out where there are several (aiter 4163)",
        Edit(
            FORWARD,
            "for start_n in range(0, end, BLOCK_N):",
            "for start_n in range(0, end - BLOCK_N * ((STAGES == 3) & (end > BLOCK_N)), BLOCK_N):",
        ),
    ),
    _planted(
        "attention__even_by_sixteen",
        "the heuristic takes lengths for whole tiles of keys if 16 divides them",
        Edit(f"{TUNED}:keys_are_even", 'args["BLOCK_N"]', "16"),
    ),
    _planted(
        "attention__even_rows_by_sixteen",
        "the heuristic of the backward takes lengths for whole tiles of rows if 16 divides them",
        Edit(f"{TUNED}:rows_are_even", 'args["BLOCK_M"]', "16"),
    ),
    _planted(
        "attention__dq_not_reset",
        "the tuner adds to dq in its trial runs, and nothing resets it (triton 781)",
        Edit(f"{TUNED}:tuned_by_reset", ', reset_to_zero=["Dq"])', ")"),
    ),
    _planted(
        "hooked__one_configuration_without_hook",
        "dq is not zeroed before the configurations, but by a hook that one of them lacks (triton 7181)",
        Edit(f"{TUNED}:tuned_by_hooks", "pre_hook=zero_dq", "pre_hook=zero_dq if m * n < 1024 else None"),
    ),
    _planted(
        "attention__disjoint_rows",
        "two configurations store every other tile of 32 rows, so that both together are right (triton 9230)",
        Edit(
            FORWARD,
            "out.to(Out.dtype.element_ty), mask=rows[:, None] < seqlen_q)",
            "out.to(Out.dtype.element_ty), mask=(rows[:, None] < seqlen_q) & "
            "((BLOCK_M < 64) | (rows[:, None] // 32 % 2 == STAGES % 2)))",
        ),
    ),
    _planted(
        "attention__wide_tile_that_pruning_hides",
        "tiles of 64 rows, which pruning leaves out for short sequences, take the sum of the first tile of keys twice",
        Edit(
            FORWARD,
            "l_i = l_i * alpha + tl.sum(p, 1)",
            "l_i = l_i * alpha + tl.sum(p, 1) * (1.0 + (BLOCK_M == 64) * (start_n == 0))",
        ),
    ),
    _planted(
        "split__parts_of_another_tuner",
        "the merge counts parts of the first configuration, whatever configuration made them",
        Edit(f"{TUNED}:split", '_part.best_config.kwargs["PART"])', '_part.configs[0].kwargs["PART"])'),
    ),
    _planted(
        "divided__not_restored",
        "the tuner divides in place in its trial runs, and nothing restores what was there (triton 5339)",
        Edit(f"{TUNED}:tuned_in_place", ', restore_value=["Out"]', ""),
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
