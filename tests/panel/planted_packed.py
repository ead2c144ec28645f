"""Bugs planted in ``tests.panel.packed``; ``tests.panel.planted_packed:NAME`` is the function with the bug NAME."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

PACKED = "tests.panel.packed"
EAGER, SEEN = f"{PACKED}:eager", f"{PACKED}:seen_keys"

PLANTED = (
    Planted(
        "ragged__documents_of_the_queries",
        "keys are in the documents that the queries are cut into",
        Edit(SEEN, "documents(begins_k, k)", "documents(begins_k if cu_seqlens_k is None else begins_q, k)"),
    ),
    Planted(
        "ragged__corner_of_the_first_document",
        "the masks of all documents are aligned as that of the first is",
        Edit(SEEN, "offsets[of_rows]", "offsets[0]"),
    ),
    Planted(
        "window__of_the_packed_rows",
        "a window is counted in the packed tensors, whose lengths differ as those of no document do",
        Edit(
            SEEN,
            "seen &= here - keys < window",
            "seen &= torch.arange(-len(rows), 0).to(rows)[:, None] - torch.arange(-len(keys), 0).to(keys) < window",
        ),
    ),
    Planted(
        "window__over_documents",
        "a window takes the place of the mask that keeps documents apart",
        Edit(SEEN, "seen &= here - keys < window", "seen = here - keys < window"),
    ),
    Planted(
        "window_right__of_the_longest_document",
        "a window to the right is aligned as if each document had the most keys more than queries",
        Edit(SEEN, "keys - here < window_right", "keys - rows[:, None] - offsets.max() < window_right"),
    ),
    Planted(
        "chunk__of_the_packed_keys",
        "chunks of keys are counted from the begin of the packed tensor",
        Edit(SEEN, "keys // chunk", "torch.arange(len(keys)).to(keys) // chunk"),
    ),
    Planted(
        "key_padding__by_the_place_in_the_document",
        "whether a key is padded is looked up by its place in its document",
        Edit(
            EAGER,
            "key_padding_mask[:, None, None, :]",
            "key_padding_mask[:, documents(cuts(k, cu_seqlens_k), k)[1]][:, None, None, :]",
        ),
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
