"""Bugs planted in ``tests.panel.rotated``: ``tests.panel.planted_rotated:NAME`` is the function with the bug NAME."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

ROTATED = "tests.panel.rotated"
ROWS, EAGER, FUSED, APPENDED = (f"{ROTATED}:{name}" for name in ("rotated", "eager", "fused", "appended"))
OF_BOTH = "rotated(q, first, *tables), rotated(k, torch.zeros_like(first), *tables)"

PLANTED = (
    Planted(
        "rotary__halves_for_interleaved",
        "columns are paired with those of the other half in any case",
        Edit(EAGER, "rotary_sin, rotary_interleaved\n", "rotary_sin, False\n"),
    ),
    Planted(
        "rotary__interleaved_for_halves",
        "neighbouring columns are a pair in any case",
        Edit(EAGER, "rotary_sin, rotary_interleaved\n", "rotary_sin, True\n"),
    ),
    Planted(
        "rotary__opposite_angles",
        "rows are rotated by the negative angles",
        Edit(
            ROWS, "(x1 * cos - x2 * sin, x2 * cos + x1 * sin)", "(x1 * cos + x2 * sin, x2 * cos - x1 * sin)"
        ),
    ),
    Planted(
        "rotary__one_sign",
        "the sine has the same sign in both columns of a pair",
        Edit(ROWS, "x1 * cos - x2 * sin", "x1 * cos + x2 * sin"),
    ),
    Planted(
        "rotary__queries_from_0",
        "positions of queries count from 0 where there are more keys",
        Edit(EAGER, "k.shape[2] - q.shape[2]", "0"),
    ),
    Planted(
        "rotary__keys_not_rotated",
        "keys are not rotated",
        Edit(EAGER, OF_BOTH, "rotated(q, first, *tables), k"),
    ),
    Planted(
        "rotary__keys_by_offset_of_queries",
        "positions of keys begin where those of queries do",
        Edit(EAGER, "torch.zeros_like(first)", "first"),
    ),
    Planted(
        "rotary__all_columns",
        "as many columns as there are are rotated, by the angles of the first ones again",
        Edit(
            ROWS,
            "    half = cos.shape[1]\n",
            "    half = max(cos.shape[1], x.shape[3] // 2)\n"
            "    cos, sin = (t.repeat(1, 2)[:, :half] if t.shape[1] < half else t for t in (cos, sin))\n"
            "    half = cos.shape[1]\n",
        ),
    ),
    Planted(
        "rotary__half_of_the_pairs",
        "the second half of the pairs is not rotated",
        Edit(
            ROWS,
            "    turning, rest =",
            "    cos[..., (half + 1) // 2 :], sin[..., (half + 1) // 2 :] = 1.0, 0.0\n    turning, rest =",
        ),
    ),
    Planted(
        "rotary__queries_twice",
        "queries are rotated twice",
        Edit(
            EAGER,
            OF_BOTH,
            OF_BOTH.replace(
                "rotated(q, first, *tables)", "rotated(rotated(q, first, *tables), first, *tables)", 1
            ),
        ),
    ),
    Planted(
        "rotary__from_position_1",
        "positions count from 1, up to the last one of the tables",
        Edit(
            ROWS,
            "x.shape[2], device=x.device)",
            "1, x.shape[2] + 1, device=x.device).clamp(max=len(cos) - 1)",
        ),
    ),
    Planted(
        "rotary__tile_of_32_positions",
        "positions count anew from each tile of 32 rows",
        Edit(
            ROWS,
            "torch.arange(x.shape[2], device=x.device)",
            "torch.arange(x.shape[2], device=x.device) % 32",
        ),
    ),
    Planted(
        "rotary__dq_not_rotated_back",
        "the backward returns the gradient of the rotated q",
        Edit(FUSED, "turned(dq, first, -1.0)", "dq"),
        function="fused",
    ),
    Planted(
        "rotary__dk_rotated_forward",
        "the backward rotates the gradient of k as it rotates k",
        Edit(FUSED, "turned(dk, start, -1.0)", "turned(dk, start, 1.0)"),
        function="fused",
    ),
    Planted(
        "rotary__q_rotated_in_place",
        "q is overwritten by what it becomes",
        Edit(
            FUSED,
            "return out.to(q.dtype), lse[..., 0]",
            "q.copy_(heads.q)\n        return out.to(q.dtype), lse[..., 0]",
        ),
        function="fused",
    ),
    Planted(
        "rotary__backward_of_rows_as_passed",
        "the backward makes the weights anew from keys that it does not rotate",
        Edit(
            FUSED,
            "turned(k, start, 1.0), v, o.causal",
            "k, v, o.causal",
        ),
        function="fused",
    ),
    Planted(
        "rotary__position_of_the_first_sequence",
        "new keys of all sequences are rotated by the positions of the first one",
        Edit(
            APPENDED, "rotated(k_new, cache_seqlens, *tables)", "rotated(k_new, cache_seqlens[:1], *tables)"
        ),
        function="appended",
    ),
    Planted(
        "rotary__new_keys_not_rotated",
        "new keys are written as they are passed",
        Edit(APPENDED, "rotated(k_new, cache_seqlens, *tables)", "k_new"),
        function="appended",
    ),
    Planted(
        "rotary__queries_from_the_old_end",
        "queries have positions from the end of the old keys on, however many are new",
        Edit(APPENDED, "cache_seqlens + k_new.shape[2] - q.shape[2]", "cache_seqlens"),
        function="appended",
    ),
    Planted(
        "rotary__cache_rotated_again",
        "all keys of a page are rotated in the cache, also the old ones",
        Edit(
            APPENDED,
            "        k_new = rotated(k_new, cache_seqlens, *tables)\n",
            "        k_new = rotated(k_new, cache_seqlens, *tables)\n"
            "        k.copy_(rotated(k, torch.zeros_like(cache_seqlens[:1]), *tables))\n",
        ),
        function="appended",
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
