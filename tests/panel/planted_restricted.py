"""Bugs planted in functions that answer a part of the contract, which show where that part is claimed.

``tests.panel.planted_restricted:NAME`` is the function with the bug NAME.
"""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

MODULE = "tests.panel.restricted"


def _in(edited: str, name: str, what: str, old: str, new: str, *, function: str = "") -> Planted:
    """Return a bug of ``function``: ``new`` in place of ``old`` in it, or in a function ``edited`` that it calls."""
    return Planted(name, what, Edit(f"{MODULE}:{edited}", old, new), function=function or edited)


PLANTED = (
    _in(
        "scale_built_in",
        "default_scale__of_head_dim_64",
        "the scale is that of a head_dim of 64",
        "sm_scale=built_in",
        "sm_scale=0.125",
    ),
    _in(
        "scale_built_in",
        "default_scale__squared",
        "scores of a causal call are scaled twice",
        "sm_scale=built_in",
        "sm_scale=built_in * (built_in if causal else 1.0)",
    ),
    _in("two_scales", "two_scales__of_the_first", "both scales are 1/8", "1.0: 1.0", "1.0: 0.125"),
    _in("two_scales", "two_scales__a_little_off", "the scale 1/8 is 0.124", "0.125: 0.125", "0.125: 0.124"),
    _in(
        "one_query",
        "max_seqlen_q__last_key_not_seen",
        "a query does not see its own key, if there are others",
        "slice(0, k.shape[2])",
        "slice(0, max(1, k.shape[2] - 1))",
    ),
    _in(
        "one_query",
        "max_seqlen_q__part_of_a_tile_lost",
        "keys behind the last whole tile of 16 are not read",
        "slice(0, k.shape[2])",
        "slice(0, k.shape[2] - k.shape[2] % 16 or k.shape[2])",
    ),
    _in(
        "few_queries",
        "max_seqlen_q__first_rows_returned",
        "the rows of the padding are returned",
        "rows = slice(8 - q.shape[2], None)",
        "rows = slice(0, q.shape[2])",
    ),
    _in(
        "few_queries",
        "max_seqlen_q__corner_of_the_tile",
        "fewer than eight queries see a key too few",
        "(0, 0, 8 - q.shape[2], 0)",
        "(0, 0, 8 - q.shape[2] - (q.shape[2] < 7), q.shape[2] < 7)",
    ),
    _in(
        "prefill",
        "seqlens__keys_before_not_counted",
        "the causal mask begins at the first key",
        "return (out[:, :, before:], lse[:, :, before:]) if causal else (out, lse)",
        "return (out[:, :, :q.shape[2]], lse[:, :, :q.shape[2]]) if causal and before else (out, lse)",
    ),
    _in(
        "prefill",
        "seqlens__first_key_lost",
        "where there are keys before the queries, the first of them is not seen",
        "out, lse = float32(rows, k, v,",
        "out, lse = float32(rows, k, v.masked_fill(torch.arange(k.shape[2])[:, None] < (before > 0), 0.0),",
    ),
    _in(
        "many_keys",
        "min_seqlen_k__tile_read_twice",
        "the first key behind the tile is that of the tile's end",
        "x[:, :, 40:]), 2)",
        "x[:, :, 39:40], x[:, :, 41:]), 2)[:, :, : x.shape[2]]",
    ),
    _in(
        "many_keys",
        "min_seqlen_k__order_of_tiles",
        "the tile is put behind all other keys under a causal mask",
        "torch.cat((x[:, :, :40], x[:, :, 40:]), 2)",
        "torch.cat((x[:, :, 40:], x[:, :, :40]), 2)",
    ),
    _in(
        "_GradientsIfCausal",
        "backward__without_a_mask",
        "the gradients are those without a mask",
        "causal=True",
        "causal=False",
        function="causal_gradients",
    ),
    _in(
        "_GradientsIfCausal",
        "backward__of_the_default_scale",
        "the gradients are those of the default scale",
        "sm_scale=ctx.sm_scale",
        "sm_scale=leaves[0].shape[-1] ** -0.5",
        function="causal_gradients",
    ),
    _in(
        "pages_alone",
        "dense__pages_of_the_first_sequence",
        "every sequence has the pages of the first",
        '"block_table": block_table}',
        '"block_table": block_table if block_table is None else block_table[:1].expand_as(block_table)}',
    ),
    _in(
        "pages_alone",
        "dense__length_of_the_longest",
        "every sequence is as long as the longest",
        '"cache_seqlens": cache_seqlens,',
        '"cache_seqlens": cache_seqlens * 0 + cache_seqlens.amax(),',
    ),
    _in(
        "packed_alone",
        "dense__keys_begin_with_their_rows",
        "the keys of a sequence begin where its rows do",
        '"cu_seqlens_k": cu_seqlens_k}',
        '"cu_seqlens_k": cu_seqlens_q}',
    ),
    _in(
        "packed_alone",
        "dense__last_sequence_sees_all",
        "the last two sequences are one",
        '{"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}',
        "{n: x if len(x) < 3 else torch.cat((x[:-2], x[-1:])) "
        'for n, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))}',
    ),
    _in(
        "cache_alone",
        "dense__length_of_the_first",
        "every sequence is as long as the first",
        "of_filled_parts(q, k, v, cache_seqlens,",
        "of_filled_parts(q, k, v, cache_seqlens[:1].expand_as(cache_seqlens),",
    ),
    _in(
        "cache_alone",
        "dense__last_key_of_the_cache",
        "a full cache is read without its last key",
        "of_filled_parts(q, k, v, cache_seqlens,",
        "of_filled_parts(q, k, v, cache_seqlens.clamp(max=k.shape[2] - (k.shape[2] > 1)),",
    ),
    _in(
        "at_its_address",
        "layouts__heads_beside_each_other",
        "entries are looked for as if the heads lay beside each other",
        "(rows * heads * head_dim, head_dim, heads * head_dim, 1)",
        "(rows * heads * head_dim, rows * head_dim, head_dim, 1)",
        function="rows_first",
    ),
    _in(
        "rows_first",
        "layouts__heads_of_v_in_another_order",
        "the heads of v are read in another order",
        "at_its_address(x) for x in (q, k, v)",
        "at_its_address(x) if x is not v else at_its_address(x).flip(1) for x in (q, k, v)",
    ),
    _in(
        "wide_tiles",
        "min_seqlen__last_tile_lost",
        "the last tile of keys is not read",
        "return float32(q, k, v,",
        "return float32(q, k[:, :, :-128], v[:, :, :-128],",
    ),
    _in(
        "wide_tiles",
        "min_seqlen__fifth_tile_lost",
        "the fifth tile of v is that of zeros",
        "return float32(q, k, v,",
        "v = v.clone()\n    v[:, :, 512:640] = 0\n    return float32(q, k, v,",
    ),
)
"""Two bugs of each function."""


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
