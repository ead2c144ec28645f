"""Bugs of a v that is the first columns of k, planted in ``tests.panel.latent``.

``tests.panel.planted_latent:NAME`` is the function with the bug NAME.
"""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

LATENT = "tests.panel.latent"
LOADED, EAGER, TILED = (f"{LATENT}:{name}" for name in ("loaded", "eager", "tiled"))
OF_ONE = f"{LATENT}:of_one_buffer"
MEMORY = "tests.several.memory"

OF_KEYS = "keys[..., : v.shape[3]] if is_in(v, k)"
"""Where v is taken from what has been loaded of k."""
CLEARED = "(x.masked_fill(number[:, None] >= length, 0.0) for x in (keys, values))"
"""Where rows behind the last key of a sequence are cleared."""
OF_BUFFER = "k[..., : v.shape[3]]"
"""Where v is taken from the only buffer."""
TILES = "            k_tile, v_tile = (x[page, None, :, start : start + size] for x in (k, v))"
"""Where a tile of the cache, or a page, is looked up."""


def _planted(name: str, what: str, edit: Edit, function: str) -> Planted:
    """Return a bug that a function shows, of the claim ``v_in_k``."""
    return Planted(f"v_in_k__{name}", what, edit, function=function)


def _read_by(strides: str) -> Edit:
    """Return an edit by which a v that is the first columns of k is read by other strides, given as Python."""
    return Edit(
        TILED,
        "    lengths = [k.shape[2]]",
        f"    from {MEMORY} import read_by_strides\n\n"
        "    if is_in(v, k):\n"
        f"        v = read_by_strides(v, {strides})\n"
        "    lengths = [k.shape[2]]",
    )


PLANTED = (
    _planted(
        "last_columns",
        "v is the last columns of k, where models have those that are rotated",
        Edit(LOADED, OF_KEYS, "keys[..., keys.shape[3] - v.shape[3] :] if is_in(v, k)"),
        "eager",
    ),
    _planted(
        "rotated_values",
        "v is taken from k once that is rotated",
        Edit(
            EAGER,
            "return heads_of(turned(q, first), turned(keys, start), values, causal, sm_scale)",
            "keys = turned(keys, start)\n"
            "        values = keys[..., : v.shape[3]] if is_in(v, k) else values\n"
            "        return heads_of(turned(q, first), keys, values, causal, sm_scale)",
        ),
        "eager",
    ),
    _planted(
        "dv_added_to_dk",
        "dk has the gradient of v too, as autograd adds it up for a view",
        Edit(
            EAGER,
            "        dq, dk = turned(dq, first, -1.0)",
            "        if is_in(v, k):\n"
            "            dk[..., : v.shape[3]] += dv\n"
            "        dq, dk = turned(dq, first, -1.0)",
        ),
        "eager",
    ),
    _planted(
        "dv_left_out",
        "dv is 0, as if k alone were an argument",
        Edit(
            EAGER,
            "return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)",
            "return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype) * (not is_in(v, k))",
        ),
        "eager",
    ),
    _planted(
        "scores_of_the_columns_of_v",
        "scores are products of those columns alone that v has",
        Edit(
            EAGER,
            "keys, values = loaded(k, v)",
            "keys, values = loaded(k, v)\n"
            "        if is_in(v, k):\n"
            "            keys = torch.where(torch.arange(k.shape[3], device=k.device) < v.shape[3], keys, 0.0)",
        ),
        "eager",
    ),
    _planted(
        "k_rotated_in_place",
        "k is rotated in its own memory, after v has been loaded",
        Edit(
            EAGER,
            "keys, values = loaded(k, v)",
            "keys, values = loaded(k, v)\n        if is_in(v, k):\n            k.copy_(turned(k, start))",
        ),
        "eager",
    ),
    _planted(
        "columns_that_fill_no_vector",
        "columns of v that do not fill a vector of 32 are 0",
        Edit(
            LOADED,
            OF_KEYS,
            "torch.where(torch.arange(v.shape[3], device=k.device) < v.shape[3] // 32 * 32, "
            "keys[..., : v.shape[3]], 0.0) if is_in(v, k)",
        ),
        "eager",
    ),
    _planted(
        "values_scaled",
        "sm_scale is multiplied into the keys, and v is taken from these",
        Edit(
            TILED,
            "s = rows @ keys.mT * sm_scale",
            "s = rows @ keys.mT * sm_scale\n"
            "            values = values * sm_scale if is_in(v, k) else values",
        ),
        "tiled",
    ),
    _planted(
        "values_rounded_with_the_scale",
        "v is taken from keys that were scaled, rounded to bfloat16, and scaled back",
        Edit(
            LOADED,
            OF_KEYS,
            "((keys * 0.3).bfloat16().float() / 0.3)[..., : v.shape[3]] if is_in(v, k)",
        ),
        "tiled",
    ),
    _planted(
        "values_behind_the_end",
        "rows behind the last key are cleared for the scores alone, and 0 * NaN is NaN",
        Edit(TILED, CLEARED, CLEARED.replace("(x.", "(x if x is values and is_in(v, k) else x.")),
        "tiled",
    ),
    _planted(
        "rows_as_wide_as_v",
        "the rows of v are taken to be as far apart as v has columns",
        _read_by("(*v.stride()[:2], v.shape[3], 1)"),
        "tiled",
    ),
    _planted(
        "pages_as_large_as_those_of_v",
        "sequences, or pages, are taken to be as far apart as those of a contiguous v",
        _read_by("(v[0].numel(), *v.stride()[1:])"),
        "tiled",
    ),
    _planted(
        "values_of_the_first_head",
        "v is taken from the first head of k, as these models have no other",
        Edit(LOADED, OF_KEYS, "keys[:, :1, :, : v.shape[3]].expand(v.shape) if is_in(v, k)"),
        "tiled",
    ),
    _planted(
        "values_without_a_scale",
        "v is taken from 8-bit numbers that have not been multiplied by their scale",
        Edit(LOADED, OF_KEYS, "k.float()[..., : v.shape[3]] if is_in(v, k)"),
        "tiled",
    ),
    _planted(
        "columns_behind_v_not_appended",
        "of new keys, only the columns that v has are written",
        Edit(
            TILED,
            "append(k, k_new, cache_seqlens, block_table)",
            "columns = v.shape[3] if is_in(v, k) else k.shape[3]\n"
            "            append(k[..., :columns], k_new[..., :columns], cache_seqlens, block_table)",
        ),
        "tiled",
    ),
    _planted(
        "buffer_one_column_on",
        "v is taken from the second column of the buffer on",
        Edit(OF_ONE, OF_BUFFER, "k.roll(-1, 3)[..., : v.shape[3]]"),
        "of_one_buffer",
    ),
    _planted(
        "buffer_from_its_end",
        "v is the last columns of the buffer",
        Edit(OF_ONE, OF_BUFFER, "k[..., k.shape[3] - v.shape[3] :]"),
        "of_one_buffer",
    ),
    _planted(
        "buffer_without_the_last_column",
        "the last column of v is 0",
        Edit(LOADED, OF_KEYS, "torch.nn.functional.pad(keys[..., : v.shape[3] - 1], (0, 1)) if is_in(v, k)"),
        "of_one_buffer",
    ),
    _planted(
        "buffer_of_the_page_before",
        "the values of a page are those of the page before it in the sequence",
        Edit(
            TILED,
            TILES,
            f"{TILES}\n"
            "            if block_table is not None and at:\n"
            "                v_tile = v[int(block_table[b, at // size - 1]), None]",
        ),
        "of_one_buffer",
    ),
    _planted(
        "buffer_of_the_first_head",
        "the values of all heads are those of the first",
        Edit(OF_ONE, OF_BUFFER, "k[:, :1, :, : v.shape[3]].expand(*k.shape[:3], -1)"),
        "of_one_buffer",
    ),
    _planted(
        "buffer_of_the_first_sequence",
        "the values of all sequences are those of the first, if there are no pages",
        Edit(
            TILED,
            TILES,
            f"{TILES}\n"
            "            if block_table is None:\n"
            "                v_tile = v[:1, :, start : start + size]",
        ),
        "of_one_buffer",
    ),
)
"""Bugs that show only if v is the first columns of k."""


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
