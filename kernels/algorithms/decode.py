"""Flash-decoding in Triton: few queries against a long key-value cache, forward only.

Tri Dao, Daniel Haziza, Francisco Massa and Grigory Sizov, *Flash-Decoding for long-context inference* (2023);
FlashAttention's split-KV. One query leaves a GPU idle where a program owns a query tile and loops over all the
keys, so the keys are split as well:

1. Each program computes attention of its query tile to one or several splits of the keys, to each of them alone: its
   output, normalised, and its lse. The query heads that share a key head are packed into the tile, so that a key is
   loaded once for all of them.
2. A second kernel merges the splits of each row: out = sum_s w_s out_s with w_s = exp(lse_s - lse) and
   lse = log sum_s exp(lse_s). A split none of whose keys is seen has out 0 and lse -inf: weight 0. A program that has
   all splits of a tile merges them itself, by the same steps.

A cache may be longer than its contents: ``cache_seqlens`` says for each sequence how many keys count, and the
causal corner moves with that number. A cache may also be a pool of pages, as in vLLM's PagedAttention (Kwon et al.,
2023): ``block_table`` says for each sequence which pages hold its keys, and keys are found through it one by one. New
keys of a call are written into the cache before its queries look at it.

Where splits begin depends on the number of keys and on launch settings alone, never on the queries, so that a row has
the same bits whatever else is in the batch. What may depend on the batch is how many splits a program takes: so many
that there are no more programs than run at the same time.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.fp8_products import check_fp8
from kernels.common.launching import (
    check_settings,
    is_aligned,
    is_hopper,
    launch,
    multiprocessors,
    new_results,
    padded_head_dim,
    row_strides,
)
from kernels.common.tiles import (
    INTERPRETED,
    LOG2E,
    NEG_INF,
    advance,
    check_runnable,
    columns_inside,
    dot,
    kernel,
    key_range,
    load_tile,
    normalise,
    offsets_in_pages,
    scales_of_pages,
    softmax_step,
    store_tile,
    tile_pointers,
)
from kernels.common.validation import (
    check_block_table,
    check_cache_seqlens,
    check_inputs,
    check_new,
    check_scales,
)
from kernels.contract import FP8_SCALES, AttentionKernel, Capabilities, flash_arithmetic
from reference.arithmetic import Arithmetic


@kernel
def _decode_kernel(
    q,
    k,
    v,
    out,
    lse,
    partial_out,
    partial_lse,
    cache_seqlens,
    block_table,
    stride_table: tl.int64,
    page_size,
    k_scale,
    v_scale,
    stride_scale,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qm: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_kn: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vn: tl.int64,
    heads_kv,
    group,
    seqlen_q,
    seqlen_k,
    head_dim,
    total_rows: tl.int64,
    splits,
    taken,
    scale_log2,
    CAUSAL: tl.constexpr,
    SCALED_BY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_LOOP: tl.constexpr,
    MERGE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute a query tile over ``taken`` splits of the keys, one after the other.

    partial_out and partial_lse (splits, total_rows) are for the results of the splits, in float32. They are None if a
    program takes all splits; it merges them itself if ``MERGE``, which says that there are several. ``EARLY`` lets the
    kernel that merges them be launched while this one runs.

    One loop goes through the key tiles of all the splits, so that those of the next split are loaded while this one is
    computed. Each split takes as many steps as the longest.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(seqlen_q * group, BLOCK_OWN)
    programs = tl.cdiv(splits, taken)
    first_split = tl.program_id(0) % programs * taken
    tile_m = tl.program_id(0) // programs
    start = tile_m % tiles_m * BLOCK_OWN
    head = tile_m // tiles_m
    batch = (head // heads_kv).to(tl.int64)
    head_kv = (head % heads_kv).to(tl.int64)

    queries, heads_q, in_rows = _packed_rows(start, head_kv, group, seqlen_q, BLOCK_OWN)
    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, q, ALIGNED)
    keys = tl.arange(0, BLOCK_LOOP)
    q_heads = q + (batch * stride_qb + heads_q * stride_qh)[:, None]
    q_ptrs = tile_pointers(q_heads, queries, stride_qm, cols, ALIGNED)
    k_heads = k + head_kv * stride_kh
    v_heads = v + head_kv * stride_vh
    first_rows = keys
    if block_table is None:
        k_heads += batch * stride_kb
        v_heads += batch * stride_vb
    else:
        first_rows = tl.full([BLOCK_LOOP], 0, tl.int32)
        pages = (block_table + batch * stride_table, page_size, stride_kb, stride_kn, stride_vb, stride_vn)
    k_ptrs = tile_pointers(k_heads, first_rows, stride_kn, cols, ALIGNED)
    v_ptrs = tile_pointers(v_heads, first_rows, stride_vn, cols, ALIGNED)

    if cache_seqlens is not None:
        seqlen_k = tl.minimum(tl.maximum(tl.load(cache_seqlens + batch), 0), seqlen_k)
    last_key, _, tiles_seen = key_range(
        start // group, queries, seqlen_q, seqlen_k, CAUSAL, BLOCK_OWN, BLOCK_LOOP
    )
    # Splits begin where they would without a causal mask; else a row's bits would depend on what else is in its tile.
    tiles_k = tl.cdiv(seqlen_k, BLOCK_LOOP)
    least = tiles_k // splits
    longer = tiles_k % splits
    steps = tl.maximum(tl.cdiv(tiles_k, splits), 1)

    if SCALED_BY == "head":
        scale_log2 *= tl.load(k_scale + head_kv)
    q_tile = load_tile(q_ptrs, in_rows, in_cols, True, MASK_COLS)
    first_of_batch = batch * heads_kv * group * seqlen_q
    out_rows = first_of_batch + heads_q * seqlen_q + queries
    m_i, l_i, acc = _empty(BLOCK_OWN, HEAD_DIM)
    merged = _empty(BLOCK_OWN, HEAD_DIM)
    split = first_split
    step = 0
    for _ in range(tl.minimum(taken, splits - first_split) * steps):
        tile = split * least + tl.minimum(split, longer) + step
        idle = (step >= tl.where(split < longer, least + 1, least)) | (tile >= tiles_seen)
        step += 1
        is_last = step == steps
        start_n = tile * BLOCK_LOOP
        in_tile = keys < tl.where(idle, 0, seqlen_k - start_n)
        k_offset = start_n.to(tl.int64) * stride_kn
        v_offset = start_n.to(tl.int64) * stride_vn
        if block_table is not None:
            k_offset, v_offset = offsets_in_pages(pages, start_n + keys, in_tile)
        k_tile = load_tile(advance(k_ptrs, k_offset, ALIGNED), in_tile, in_cols, True, MASK_COLS)
        if SCALED_BY == "page":
            page_scales = (k_scale + head_kv, v_scale + head_kv, stride_scale)
            k_factors, v_factors = scales_of_pages(pages, page_scales, start_n + keys, in_tile)
            k_tile = k_tile.to(tl.float32) * k_factors
        scores = dot(q_tile, tl.trans(k_tile.to(q_tile.dtype)), None, "ieee") * scale_log2
        seen = keys[None, :] <= tl.where(idle, -1, last_key - start_n)[:, None]
        scores = tl.where(seen, scores, NEG_INF)
        p, alpha, m_i, l_i = softmax_step(scores, m_i, l_i)
        v_tile = load_tile(advance(v_ptrs, v_offset, ALIGNED), in_tile, in_cols, True, MASK_COLS)
        if SCALED_BY == "page":
            v_tile = v_tile.to(tl.float32) * v_factors
        acc = dot(p.to(q_tile.dtype), v_tile.to(q_tile.dtype), acc * alpha[:, None], "ieee")
        if (MERGE or partial_out is not None) and is_last:
            split_out, split_lse = normalise(acc, m_i, l_i)
            if SCALED_BY == "head":
                split_out *= tl.load(v_scale + head_kv)
            if MERGE:
                merged = _merge_step(split_out, split_lse, merged)
            else:
                split_rows = split * total_rows + out_rows
                split_ptrs = tile_pointers(partial_out, split_rows, head_dim, cols, ALIGNED)
                store_tile(split_ptrs, split_out, in_rows, in_cols, MASK_COLS)
                tl.store(partial_lse + split_rows, split_lse, mask=in_rows)
            m_i, l_i, acc = _empty(BLOCK_OWN, HEAD_DIM)
        split += is_last.to(tl.int32)
        step = tl.where(is_last, 0, step)

    if partial_out is None:
        if MERGE:
            m_i, l_i, acc = merged
        out_tile, lse_rows = normalise(acc, m_i, l_i)
        if SCALED_BY == "head" and not MERGE:
            out_tile *= tl.load(v_scale + head_kv)
        out_ptrs = tile_pointers(out, out_rows, head_dim, cols, ALIGNED)
        store_tile(out_ptrs, out_tile, in_rows, in_cols, MASK_COLS)
        tl.store(lse + out_rows, lse_rows, mask=in_rows)


@triton.jit
def _empty(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the maximum, the sum and the accumulator of rows that have seen nothing yet."""
    m_i = tl.full([ROWS], NEG_INF, tl.float32)
    l_i = tl.full([ROWS], 0.0, tl.float32)
    return m_i, l_i, tl.full([ROWS, HEAD_DIM], 0.0, tl.float32)


@triton.jit
def _merge_step(split_out, split_lse, merged):
    """Take one step of a softmax over the splits, in which a split's lse is its score."""
    m_i, l_i, acc = merged
    p, alpha, m_i, l_i = softmax_step((split_lse * LOG2E)[:, None], m_i, l_i)
    return m_i, l_i, acc * alpha[:, None] + p * split_out


@triton.jit
def _packed_rows(first_row, head_kv, group, seqlen_q, ROWS: tl.constexpr):
    """Return query and query head of ``ROWS`` rows of those that share a key head, and which of the rows there are.

    Rows are (query, member of the group) pairs, and the members of one query are next to each other.
    """
    rows = first_row + tl.arange(0, ROWS)
    return rows // group, head_kv * group + rows % group, rows < seqlen_q * group


@kernel
def _merge_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    total_rows: tl.int64,
    splits,
    head_dim,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the splits of some rows, in order.

    ``SPLITS`` of them are loaded before the first is merged. One after the other, each would take the whole latency of
    the memory. If ``EARLY``, this kernel may begin before the one that computes the splits ends, and waits for it.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
    in_rows = rows < total_rows
    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, partial_out, ALIGNED)
    merged = _empty(BLOCK_OWN, HEAD_DIM)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for first in range(0, splits, SPLITS):
        loaded = ()
        for index in tl.static_range(SPLITS):
            split_rows = (first + index) * total_rows + rows
            inside = in_rows & (first + index < splits)
            split_lse = tl.load(partial_lse + split_rows, mask=inside, other=NEG_INF)
            split_ptrs = tile_pointers(partial_out, split_rows, head_dim, cols, ALIGNED)
            split_out = load_tile(split_ptrs, inside, in_cols, True, MASK_COLS)
            loaded += ((split_out, split_lse),)  # type: ignore[assignment]  # an unrolled loop, in which it grows
        for index in tl.static_range(SPLITS):
            split_out, split_lse = loaded[index]
            merged = _merge_step(split_out, split_lse, merged)

    m_i, l_i, acc = merged
    out_tile, lse_rows = normalise(acc, m_i, l_i)
    store_tile(tile_pointers(out, rows, head_dim, cols, ALIGNED), out_tile, in_rows, in_cols, MASK_COLS)
    tl.store(lse + rows, lse_rows, mask=in_rows)


@kernel
def _append_kernel(
    added,
    cache,
    cache_seqlens,
    block_table,
    stride_table: tl.int64,
    page_size,
    stride_ab: tl.int64,
    stride_ah: tl.int64,
    stride_an: tl.int64,
    stride_cb: tl.int64,
    stride_ch: tl.int64,
    stride_cn: tl.int64,
    heads_kv,
    new,
    seqlen_k,
    head_dim,
    HEAD_DIM: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
):
    """Copy a tile of the ``new`` rows of a sequence and head into a cache, behind the rows that the sequence has."""
    tiles = tl.cdiv(new, BLOCK_OWN)
    rows = tl.program_id(0) % tiles * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // heads_kv
    head_kv = head % heads_kv
    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, added, ALIGNED)

    keys = tl.load(cache_seqlens + batch) + rows
    inside = (rows < new) & (keys >= 0) & (keys < seqlen_k)
    rows_of_head = added + batch * stride_ab + head_kv * stride_ah
    added_ptrs = tile_pointers(rows_of_head, rows, stride_an, cols, ALIGNED)
    offsets = batch * stride_cb + keys.to(tl.int64)[:, None] * stride_cn
    if block_table is not None:
        pages = (block_table + batch * stride_table, page_size, stride_cb, stride_cn, stride_cb, stride_cn)
        offsets, _ = offsets_in_pages(pages, keys, inside)
    first_rows = tl.full([BLOCK_OWN], 0, tl.int32)
    cache_ptrs = tile_pointers(cache + head_kv * stride_ch, first_rows, stride_cn, cols, ALIGNED)
    tile = load_tile(added_ptrs, inside, in_cols, True, MASK_COLS)
    store_tile(advance(cache_ptrs, offsets, ALIGNED), tile, inside, in_cols, MASK_COLS)


LAUNCH: Mapping[str, tuple[Any, ...]] = {
    "block_m": (16, 64),
    "block_n": (64, 128),
    "splits": (1, 2, 3, 7),
}
"""Launch settings: packed rows of a query tile, keys of a key tile, and into how many splits the keys are cut.
``splits`` may also be any other positive integer."""

PAGE_SIZES = (16, 32, 64, 128, 256)
"""The numbers of keys that a page may have."""

APPENDED_ROWS = 16
"""Rows of a tile of new keys."""

MERGED_ROWS = 16 if INTERPRETED.value else 2
"""Rows that a program merges."""

MERGED_SPLITS = 2 if INTERPRETED.value else 16
"""Splits of a head_dim of 128 or less that a program loads at a time to merge them; of a larger one, half as many."""

KEYS_OF_ONE_SPLIT = 256
"""The most keys that are one split if ``splits`` is not given; a merge would take longer than it saves."""

KEYS_PER_SPLIT = 128
"""Keys of each split if ``splits`` is not given and no more than ``MOST_SPLITS`` splits come of it."""

MOST_SPLITS = 16
"""The most splits if ``splits`` is not given. One sequence with eight key heads then has 128 programs, nearly one for
each of the 132 multiprocessors of an H200."""

_LARGEST_TILE = {512: (16, 64)}
"""Largest (BLOCK_OWN, BLOCK_LOOP) that does not spill registers, by bytes in a row of HEAD_DIM elements. Larger launch
settings are cut down; every tile fits rows that have no entry."""

_LARGEST_FMA_TILE = (16, 16)
"""The largest (BLOCK_OWN, BLOCK_LOOP) for float32, whose products are unrolled into multiply-adds."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    block_m: int = 16,
    block_n: int = 64,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention of q (batch, heads_q, seqlen_q, head_dim) to a cache k, v (batch, heads_kv, seqlen_k, head_dim).

    Arguments, results and errors are those of ``flash_v2.forward``, without dropout, window and out_dtype.

    cache_seqlens (batch,) int32 says how many keys of each sequence count, 0 to seqlen_k; those behind are
    never read. Under a causal mask query i of sequence b sees key j when ``j <= i + cache_seqlens[b] -
    seqlen_q``. Without it, all seqlen_k keys count. Its numbers are checked on the CPU alone, as the launcher does not
    wait for a GPU: there, those out of range count as the nearest in range.

    With a block_table (batch, pages of a sequence) int32, k and v are (pages, heads_kv, page_size, head_dim), with a
    page_size of ``PAGE_SIZES``, and cache_seqlens has to be given. Key j of sequence b is row ``j % page_size`` of page
    ``block_table[b, j // page_size]``; there are as many keys at most as the entries of a sequence hold. Entries behind
    its last key are never read; on the CPU, those before are checked.

    k_new and v_new (batch, heads_kv, new, head_dim) are written into the cache behind the first cache_seqlens[b] keys
    of each sequence b, which then has so many more; no other input is written. A page that they are written to must
    belong to one sequence alone. On a GPU, those for which a cache has no room are left out.

    With k_scale and v_scale (heads_kv,) float32, k and v are float8_e4m3fn, and stand for their products with the scale
    of their head. They are cast to q's dtype, which is exact; scores and out are then multiplied by the scales. Beside
    a block_table, scales may also be (pages, heads_kv): each key and value is multiplied by that of its page, and cast.

    Raises:
        TypeError, ValueError: a cache_seqlens, block_table, k_new, v_new, k_scale or v_scale of another type, shape,
            dtype or device; lengths or pages out of range, on the CPU; a block_table or k_new without cache_seqlens;
            one of k_new and v_new, or of k_scale and v_scale, alone; splits below 1.
        NotImplementedError: a page size that is not in ``PAGE_SIZES``.

    ``LAUNCH`` has the launch settings; without ``splits``, there is one split for ``KEYS_OF_ONE_SPLIT`` keys or fewer,
    else one for every ``KEYS_PER_SPLIT`` keys, up to ``MOST_SPLITS``.
    """
    stored, scaled_by = None, "none"
    if k_scale is not None or v_scale is not None:
        scaled_by = check_scales(k_scale, v_scale, k, paged=block_table is not None)
        check_fp8(q)
        stored = torch.float8_e4m3fn
    check_inputs(q, k, v, causal, sm_scale, paged=block_table is not None, stored=stored)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, page_size, _ = k.shape
    new = check_new(k_new, v_new, k, batch, has_lengths=cache_seqlens is not None)
    seqlen_k, stride_table = page_size, 0
    if block_table is not None:
        check_block_table(block_table, q, k, cache_seqlens, PAGE_SIZES, new)
        seqlen_k, stride_table = block_table.shape[1] * page_size, block_table.stride(0)
    elif cache_seqlens is not None:
        check_cache_seqlens(cache_seqlens, q, seqlen_k - new)
    if cache_seqlens is not None:
        cache_seqlens = cache_seqlens.contiguous()
    if splits is None:
        splits = 1
        if seqlen_k > KEYS_OF_ONE_SPLIT:
            splits = min(math.ceil(seqlen_k / KEYS_PER_SPLIT), MOST_SPLITS)
    if type(splits) is not int or splits < 1:
        raise ValueError(f"splits: got {splits!r}, expected a positive integer")
    blocks = {name: values for name, values in LAUNCH.items() if name != "splits"}
    check_settings({"block_m": block_m, "block_n": block_n}, blocks)
    check_runnable(q)
    out, lse = new_results(q, q.dtype)
    group = heads_q // max(heads_kv, 1)
    constants = _constants(block_m, block_n, q)
    if k_new is not None and v_new is not None and cache_seqlens is not None:
        columns = {name: constants[name] for name in ("HEAD_DIM", "MASK_COLS")}
        for added, cache in ((k_new, k), (v_new, v)):
            launch(
                _append_kernel,
                batch * heads_kv * math.ceil(new / APPENDED_ROWS),
                *(added, cache, cache_seqlens, block_table, stride_table, page_size),
                *row_strides(added, cache),
                *(heads_kv, new, seqlen_k, head_dim),
                ALIGNED=is_aligned(added, cache),
                BLOCK_OWN=APPENDED_ROWS,
                **columns,
            )
        cache_seqlens = cache_seqlens + new
    tiles = batch * heads_kv * math.ceil(seqlen_q * group / constants["BLOCK_OWN"])
    taken = _taken(splits, tiles, q.device)
    programs = math.ceil(splits / taken)
    partial_out, partial_lse = None, None
    if programs > 1:
        shape = (splits * batch, heads_q, seqlen_q, head_dim)
        partial_out = torch.empty(*shape, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(*shape[:3], dtype=torch.float32, device=q.device)
    total_rows = batch * heads_q * seqlen_q
    aligned = is_aligned(*(x for x in (q, k, v, out, partial_out) if x is not None))
    early = programs > 1 and is_hopper(q.device)
    launch(
        _decode_kernel,
        tiles * programs,
        *(q, k, v, out, lse, partial_out, partial_lse),
        *(cache_seqlens, block_table, stride_table, page_size),
        *(k_scale, v_scale, 0 if k_scale is None else k_scale.stride(0)),
        *row_strides(q, k, v),
        *(heads_kv, group, seqlen_q, seqlen_k, head_dim, total_rows),
        *(splits, taken, sm_scale * LOG2E.value),
        CAUSAL=causal,
        SCALED_BY=scaled_by,
        ALIGNED=aligned,
        MERGE=programs == 1 and splits > 1,
        EARLY=early,
        **constants,
    )
    if partial_out is not None:
        launch(
            _merge_kernel,
            math.ceil(total_rows / MERGED_ROWS),
            *(partial_out, partial_lse, out, lse, total_rows, splits, head_dim),
            HEAD_DIM=constants["HEAD_DIM"],
            MASK_COLS=constants["MASK_COLS"],
            ALIGNED=aligned,
            BLOCK_OWN=MERGED_ROWS,
            SPLITS=MERGED_SPLITS if constants["HEAD_DIM"] <= 128 else MERGED_SPLITS // 2,
            EARLY=early,
            num_warps=4,
            **({"launch_pdl": True} if early else {}),
        )
    return out, lse


def _taken(splits: int, tiles: int, device: torch.device) -> int:
    """Return how many splits a program takes, for programs of so many query tiles to run at the same time.

    Two programs run on a multiprocessor. If three in four multiprocessors have a query tile to themselves, a second
    program is worth less than a merge in registers. A CPU counts as eight multiprocessors.
    """
    processors = 8
    if device.type != "cpu":
        processors = multiprocessors(device)
    if 4 * tiles >= 3 * processors:
        return splits
    return math.ceil(splits / (2 * processors // max(tiles, 1)))


def _constants(block_m: int, block_n: int, q: Tensor) -> dict[str, Any]:
    """Return the constants that ``_decode_kernel`` is compiled with for q."""
    padded = padded_head_dim(q.shape[3])
    row_bytes = padded * q.element_size()
    own, loop = block_m, block_n
    largest = _LARGEST_FMA_TILE if q.dtype == torch.float32 else _LARGEST_TILE.get(row_bytes, (own, loop))
    if not INTERPRETED.value:
        own, loop = min(own, largest[0]), min(loop, largest[1])
    return {
        "HEAD_DIM": padded,
        "MASK_COLS": padded != q.shape[3],
        "BLOCK_OWN": own,
        "BLOCK_LOOP": loop,
        "num_warps": 8 if own == 64 or row_bytes == 1024 else 4,
        "num_stages": 3 if row_bytes <= 256 else 2,
    }


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    """Return FlashAttention-2's arithmetic with the merging of the splits."""
    arithmetic = flash_arithmetic(dtype, device, launch)
    splits = launch.get("splits", MOST_SPLITS)
    return replace(arithmetic, tile_max=launch.get("block_n", 64), merged=splits)


KERNEL = AttentionKernel(
    name="decode",
    forward=forward,
    capabilities=Capabilities(
        head_dims=tuple(range(1, 257)),
        v_in_k=(False, True),
        backward=False,
        batch_invariant=True,
        ragged=("cache", "paged", "append"),
        page_sizes=PAGE_SIZES,
        fp8_cache=tuple(FP8_SCALES),
        launch=LAUNCH,
        arithmetic=_arithmetic,
    ),
)
