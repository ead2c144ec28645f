"""Bugs of NaN and infinity; ``tests.panel.planted_nonfinite:NAME`` is the function with the bug NAME.

Those of ``nonfinite=strict`` are planted in functions that claim it, and are no bugs without it.
"""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

ADDED = "tests.panel.nonfinite"
SCORES = "q.float() @ k.mT * sm_scale, v"

OF_STRICT = (
    Planted(
        "nonfinite__added_mask",
        "masks are added to the scores of a tile",
        Edit(
            "tests.panel.masks:tiled",
            "s = s.masked_fill(~seen[rows, tile], -torch.inf)",
            "s = s + torch.where(seen[rows, tile], 0.0, -torch.inf)",
        ),
        function="tiled",
    ),
    Planted(
        "nonfinite__through_a_window",
        "a window hides no score that is NaN",
        Edit(
            "tests.panel.masks:eager",
            "masked(s, seen)",
            "masked(s, seen | (s.isnan() & (window > 0)))",
        ),
    ),
)

OF_SEEN = (
    Planted(
        "nonfinite__nan_counts_as_0",
        "a score of NaN counts as 0",
        Edit(
            f"{ADDED}:products",
            SCORES,
            "torch.nan_to_num(q.float() @ k.mT * sm_scale, 0.0, torch.inf, -torch.inf), v",
        ),
        function="added_mask",
    ),
    Planted(
        "nonfinite__finite_sentinel",
        "a key whose score is -inf counts as one with a score of -60",
        Edit(
            f"{ADDED}:products",
            SCORES,
            "torch.nan_to_num(q.float() @ k.mT * sm_scale, torch.nan, torch.inf, -60.0), v",
        ),
        function="added_mask",
    ),
    Planted(
        "nonfinite__of_another_head",
        "a score of NaN makes that of all heads NaN",
        Edit(
            f"{ADDED}:products",
            SCORES,
            "torch.where(((s := q.float() @ k.mT * sm_scale).isnan()).any(1, keepdim=True), torch.nan, s), v",
        ),
        function="added_mask",
    ),
)

PLANTED = (*OF_STRICT, *OF_SEEN)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
