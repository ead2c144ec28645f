"""Bugs planted in ``tests.panel.eight_bits``: ``tests.panel.planted_eight_bits:NAME`` is the one called NAME."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

EIGHT_BITS = "tests.panel.eight_bits"
HEADS, PAGES = f"{EIGHT_BITS}:of_heads", f"{EIGHT_BITS}:of_pages"
SCALES = f"{EIGHT_BITS}:scales_of_keys"

PLANTED = (
    Planted(
        "fp8_cache__values_by_scales_of_keys",
        "values are multiplied by the scales of keys",
        Edit(HEADS, "v_scale[None, :, None, None]", "k_scale[None, :, None, None]"),
        function="of_heads",
    ),
    Planted(
        "fp8_cache__scale_of_head_0",
        "the scale of the first head is that of all",
        Edit(HEADS, "k_scale[None, :, None, None]", "k_scale[0]"),
        function="of_heads",
    ),
    Planted(
        "fp8_cache__divided",
        "keys are divided by their scales",
        Edit(HEADS, "k.float() * k_scale", "k.float() / k_scale"),
        function="of_heads",
    ),
    Planted(
        "fp8_cache__values_not_scaled",
        "values are not multiplied by their scales",
        Edit(HEADS, "(v.float() * v_scale[None, :, None, None])", "v.float()"),
        function="of_heads",
    ),
    Planted(
        "fp8_cache__page_0_for_all",
        "the scales of a sequence's first page are those of all its pages",
        Edit(SCALES, "scale[pages]", "scale[pages[:1]].expand(len(pages), -1)"),
        function="of_pages",
    ),
    Planted(
        "fp8_cache__scales_in_order",
        "the scales of pages are taken in the order of the pool, not by the table",
        Edit(SCALES, "scale[pages]", "scale[: len(pages)]"),
        function="of_pages",
    ),
    Planted(
        "fp8_cache__pages_of_16_keys",
        "every page has its scales for 16 keys, and the next page's follow",
        Edit(
            SCALES,
            "repeat_interleave(page_size, 0)[:length]",
            "repeat_interleave(16, 0).repeat(-(-page_size // 16), 1)[:length]",
        ),
        function="of_pages",
    ),
    Planted(
        "fp8_cache__square_of_the_scale",
        "keys are scaled twice",
        Edit(
            PAGES,
            "keys * scales_of_keys(",
            "keys * scales_of_keys(k_scale, pages, k.shape[2], length) * scales_of_keys(",
        ),
        function="of_pages",
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
