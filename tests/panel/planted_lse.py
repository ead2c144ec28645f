"""Bugs planted in ``tests.panel.lse_forms``; ``tests.panel.planted_lse:NAME`` is the function with the bug NAME."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

FORMS = "tests.panel.lse_forms"
CONVERTED, TRANSPOSED, TILED = f"{FORMS}:converted", f"{FORMS}:transposed", f"{FORMS}:tiled"
INFINITE, HAS_KEYS = f"{FORMS}:infinite", "seen_keys(q, k, causal).any(-1)"
PACKED, NO_KEYS = "tests.panel.packed:like_flash_attention_2", "lse.isneginf()"
TO_BASE_2 = "lse_of(s, seen) * LOG2_E"

PLANTED = (
    Planted(
        "lse_base__natural",
        "lse is natural although base 2 is claimed",
        Edit(CONVERTED, TO_BASE_2, "lse_of(s, seen)"),
        function="converted",
    ),
    Planted(
        "lse_base__converted_twice",
        "lse is multiplied by log2(e) twice",
        Edit(CONVERTED, TO_BASE_2, f"{TO_BASE_2} * LOG2_E"),
        function="converted",
    ),
    Planted(
        "lse_base__only_causal",
        "lse is in base 2 under a causal mask, and natural without one",
        Edit(CONVERTED, TO_BASE_2, "lse_of(s, seen) * (LOG2_E if causal else 1.0)"),
        function="converted",
    ),
    Planted(
        "lse_base__natural_sum",
        "the maximum of a row is in base 2, and the logarithm of its sum is natural",
        Edit(TILED, "l.detach().log2()", "l.detach().log()"),
        function="tiled",
    ),
    Planted(
        "lse_base__empty_rows_0",
        "lse is 0 in rows that see no key",
        Edit(CONVERTED, TO_BASE_2, f"({TO_BASE_2}).nan_to_num(neginf=0.0)"),
        function="converted",
    ),
    Planted(
        "lse_base__in_bfloat16",
        "lse is converted in bfloat16",
        Edit(CONVERTED, TO_BASE_2, "(lse_of(s, seen).bfloat16() * LOG2_E).float()"),
        function="converted",
    ),
    Planted(
        "lse_layout__reshaped",
        "lse is reshaped to the claimed shape instead of transposed",
        Edit(TRANSPOSED, ".transpose(1, 2)", ".reshape(q.shape[0], q.shape[2], q.shape[1])"),
        function="transposed",
    ),
    Planted(
        "lse_layout__not_transposed",
        "lse has its heads before its rows although the claim says otherwise",
        Edit(TRANSPOSED, ".transpose(1, 2)", ""),
        function="transposed",
    ),
    Planted(
        "lse_layout__heads_reversed",
        "the heads of lse are in reverse order",
        Edit(TRANSPOSED, ".transpose(1, 2)", ".transpose(1, 2).flip(2)"),
        function="transposed",
    ),
    Planted(
        "lse_layout__of_the_first_head",
        "every head has the lse of the first",
        Edit(TRANSPOSED, ".transpose(1, 2)", "[:, :1].expand_as(lse).transpose(1, 2)"),
        function="transposed",
    ),
    Planted(
        "lse_layout__only_causal",
        "without a causal mask, lse is reshaped instead of transposed",
        Edit(
            TILED,
            "lse.transpose(1, 2).contiguous()",
            "lse.transpose(1, 2) if causal else lse.reshape(q.shape[0], q.shape[2], q.shape[1])",
        ),
        function="tiled",
    ),
    Planted(
        "lse_of_no_keys__of_one_key",
        "lse is +inf in rows that see a single key, too",
        Edit(INFINITE, HAS_KEYS, "seen_keys(q, k, causal).sum(-1) > 1"),
        function="infinite",
    ),
    Planted(
        "lse_of_no_keys__without_queries_ahead",
        "under a causal mask, the lse of rows that see no key is -inf",
        Edit(INFINITE, HAS_KEYS, f"({HAS_KEYS} | causal)"),
        function="infinite",
    ),
    Planted(
        "lse_of_no_keys__not_a_number",
        "the lse of rows that see no key is NaN",
        Edit(INFINITE, "lse, torch.inf)", "lse, torch.nan)"),
        function="infinite",
    ),
    Planted(
        "lse_of_no_keys__of_all_rows",
        "lse is +inf in all rows of a head where one row sees no key",
        Edit(PACKED, NO_KEYS, f"{NO_KEYS}.any(-1, keepdim=True)"),
        function="like_flash_attention_2",
    ),
    Planted(
        "lse_of_no_keys__only_dense",
        "the lse of rows that see no key is -inf in calls with packed sequences",
        Edit(PACKED, NO_KEYS, f"{NO_KEYS} & ('cu_seqlens_q' not in options)"),
        function="like_flash_attention_2",
    ),
)
"""At least five bugs of each claim."""


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
