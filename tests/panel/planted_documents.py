"""Bugs planted in ``tests.panel.documents``; ``tests.panel.planted_documents:NAME`` is the function with bug NAME."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

DOCUMENTS = "tests.panel.documents"
EAGER, PLACES, SEEN = f"{DOCUMENTS}:eager", f"{DOCUMENTS}:places", f"{DOCUMENTS}:seen_keys"

PLANTED = (
    Planted(
        "ragged__documents_of_the_first_element",
        "the documents of the first batch element are those of all",
        Edit(EAGER, "seen_keys(document_ids, causal", "seen_keys(document_ids[:1], causal"),
    ),
    Planted(
        "ragged__lower_numbers_are_seen",
        "numbers are compared as if they rose from each document to the next under a causal mask",
        Edit(SEEN, "own == other", "own >= other"),
    ),
    Planted(
        "ragged__numbers_of_the_next_keys",
        "the numbers of keys are read one place too far",
        Edit(SEEN, "document_ids[:, None, None, :]", "document_ids[:, None, None, :].roll(-1, -1)"),
    ),
    Planted(
        "ragged__numbers_in_float16",
        "numbers are cast to the dtype of a mask that is added to scores, where large ones are the same",
        Edit(SEEN, "own == other", "own.half() == other.half()"),
    ),
    Planted(
        "ragged__document_0_is_padding",
        "a document with the number 0 is taken for padding",
        Edit(SEEN, "own == other", "(own == other) & (own > 0)"),
    ),
    Planted(
        "ragged__borders_inside_a_tile",
        "all 16 keys of a tile have the number of its first one",
        Edit(
            SEEN, "seen = own == other", "seen = own == other[..., torch.arange(other.shape[-1]) // 16 * 16]"
        ),
    ),
    Planted(
        "causal__in_place_of_documents",
        "a causal mask takes the place of the mask that keeps documents apart",
        Edit(SEEN, "seen &= keys <= rows", "seen = torch.ones_like(seen).tril()"),
    ),
    Planted(
        "window__or_documents",
        "a row sees what is in its document or in the window, where it must be in both",
        Edit(SEEN, "seen &= rows - keys < window", "seen |= rows - keys < window"),
    ),
    Planted(
        "window_right__over_documents",
        "a window to the right takes the place of the mask that keeps documents apart",
        Edit(
            SEEN, "seen &= keys - rows < window_right", "seen = torch.ones_like(seen).tril(window_right - 1)"
        ),
    ),
    Planted(
        "chunk__of_the_batch_element",
        "chunks are counted from the begin of the batch element",
        Edit(
            SEEN,
            "rows // chunk == keys // chunk",
            "(place := torch.arange(at.shape[1]).to(at))[:, None] // chunk == place // chunk",
        ),
    ),
    Planted(
        "chunk__from_where_numbers_rise",
        "places are counted on from a document to the next if that has a lower number",
        Edit(PLACES, "!= document_ids", "> document_ids"),
    ),
    Planted(
        "key_padding__in_place_of_documents",
        "a mask of padded keys takes the place of the mask that keeps documents apart",
        Edit(EAGER, "seen & key_padding_mask", "(seen | (document_ids is not None)) & key_padding_mask"),
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
