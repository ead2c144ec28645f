"""Bugs planted in ``tests.panel.appended``; ``tests.panel.planted_appended:NAME`` is the function with the bug NAME."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

APPENDED = "tests.panel.appended"
CACHE, PAGES = f"{APPENDED}:in_a_cache", f"{APPENDED}:in_pages"

PLANTED = (
    Planted(
        "ragged__new_keys_not_seen",
        "queries do not see the new keys",
        Edit(PAGES, "cache_seqlens + new\n", "cache_seqlens\n"),
        function="in_pages",
    ),
    Planted(
        "ragged__behind_the_first",
        "new keys are written behind as many keys as the first sequence has, if it has fewer",
        Edit(
            CACHE,
            "k[b, :, length : length + new] = k_new[b]",
            "k[b, :, (at := min(length, int(cache_seqlens[0]))) : at + new] = k_new[b]",
        ),
        function="in_a_cache",
    ),
    Planted(
        "ragged__only_the_first_new_key",
        "only the first of several new keys is written",
        Edit(PAGES, "torch.arange(new, device=q.device)", "torch.zeros(new, device=q.device).long()"),
        function="in_pages",
    ),
    Planted(
        "ragged__one_page_for_all_new",
        "new keys beyond the page of the first one are written to rows of that page",
        Edit(
            PAGES, "block_table.gather(1, at // page_size)", "block_table.gather(1, at[:, :1] // page_size)"
        ),
        function="in_pages",
    ),
    Planted(
        "ragged__new_values_among_the_keys",
        "new values are written into k too, over the new keys",
        Edit(PAGES, "((k, k_new), (v, v_new))", "((k, k_new), (v, v_new), (k, v_new))"),
        function="in_pages",
    ),
    Planted(
        "ragged__cache_not_written",
        "new keys are seen, but are not in the cache after the call",
        Edit(CACHE, "    new = k_new.shape[2]", "    k, v, new = k.clone(), v.clone(), k_new.shape[2]"),
        function="in_a_cache",
    ),
    Planted(
        "ragged__one_row_cleared_behind",
        "the row behind the last new key is cleared too",
        Edit(
            CACHE,
            "        v[b, :, length : length + new] = v_new[b]",
            "        v[b, :, length : length + new + 1] = 0.0\n        v[b, :, length : length + new] = v_new[b]",
        ),
        function="in_a_cache",
    ),
    Planted(
        "ragged__new_keys_backwards",
        "new keys are written with the last one first",
        Edit(
            CACHE,
            "k[b, :, length : length + new] = k_new[b]",
            "k[b, :, length : length + new] = k_new[b].flip(1)",
        ),
        function="in_a_cache",
    ),
    Planted(
        "ragged__heads_in_another_order",
        "new values of the key heads are written in the opposite order",
        Edit(
            CACHE,
            "v[b, :, length : length + new] = v_new[b]",
            "v[b, :, length : length + new] = v_new[b].flip(0)",
        ),
        function="in_a_cache",
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
