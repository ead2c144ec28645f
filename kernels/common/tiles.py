"""What Triton attention kernels share: how they are compiled, and the steps that they take on one tile.

A tile is a block (rows, columns) of the (seqlen, head_dim) matrix of one head. Its shape is fixed when the
kernel is compiled, rows a power of two and columns ``head_dim`` padded to one, so it may reach over the edges
of the matrix; there loads give 0 and stores do nothing.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU; decided when this module is imported.

Triton's own interpreter is wrong in bfloat16 and in 8 bits: ``tests.harness.interpreter.repaired`` repairs it.
"""

NEG_INF = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def check_runnable(q: Tensor) -> None:
    """Raise RuntimeError for a tensor on the CPU outside of the interpreter."""
    if q.device.type == "cpu" and not INTERPRETED.value:
        raise RuntimeError(
            "q: on the CPU, where Triton only runs interpreted: set TRITON_INTERPRET=1 before importing this"
        )


def kernel(fn: Callable[..., None], jit: Callable[..., Any] = triton.jit) -> Any:
    """Apply ``triton.jit``, or Gluon's, so that values of arguments that are not ``tl.constexpr`` never recompile.

    By default an integer that is 1 or divisible by 16, and a pointer divisible by 16, compile anew, in every
    combination. This decorator loses the wide loads and stores that come with it; the flag ``ALIGNED`` of
    ``tile_pointers`` brings them back.
    """
    parameters = inspect.signature(fn).parameters.values()
    runtime = [p.name for p in parameters if p.annotation is not tl.constexpr]
    return jit(fn, do_not_specialize=runtime, do_not_specialize_on_alignment=runtime)


@triton.jit
def tile_pointers(base, rows, row_stride, cols, ALIGNED: tl.constexpr):
    """Return pointers to a tile of the matrix that ``base`` points to, whose columns are adjacent.

    ``ALIGNED`` promises that base and row_stride are multiples of 16 bytes.
    """
    row_ptrs = base + (rows.to(tl.int64) * row_stride)[:, None]
    if ALIGNED:
        row_ptrs = tl.multiple_of(row_ptrs, [16, 16])
    return row_ptrs + cols[None, :]


@triton.jit
def columns_inside(cols, head_dim, base, ALIGNED: tl.constexpr):
    """Return which columns are in the matrix. ``ALIGNED`` promises that its rows are a multiple of 16 bytes wide."""
    inside = cols < head_dim
    if ALIGNED:
        inside = tl.max_constancy(inside, [128 // base.dtype.element_ty.primitive_bitwidth])
    return inside


@triton.jit
def advance(pointers, offset, ALIGNED: tl.constexpr):
    """Return pointers ``offset`` elements further on, where the offset is a sum of whole strides."""
    pointers += offset
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    return pointers


@triton.jit
def offsets_in_pages(pages, keys, in_keys):
    """Return where the rows of ``keys`` lie in a pool of pages of k and in one of v, (keys, 1) int64 in elements.

    ``pages`` is (table, page_size, k's strides of a page and of a row, v's strides of both); key j is row
    j % page_size of page table[j // page_size]. The table is read only where ``in_keys``; elsewhere the page is 0.
    """
    table, page_size, stride_kp, stride_kn, stride_vp, stride_vn = pages
    page = tl.load(table + keys // page_size, mask=in_keys, other=0).to(tl.int64)
    row = (keys % page_size).to(tl.int64)
    k_offsets = page * stride_kp + row * stride_kn
    v_offsets = page * stride_vp + row * stride_vn
    return k_offsets[:, None], v_offsets[:, None]


@triton.jit
def scales_of_pages(pages, scales, keys, in_keys):
    """Return the scales of the pages that hold ``keys``, for k and for v, (keys, 1) float32 each; 0 outside in_keys.

    ``pages`` is as in ``offsets_in_pages``, and ``scales`` points to that of page 0 for k and for v, with the elements
    from one page to the next.
    """
    k_scale, v_scale, stride = scales
    page = tl.load(pages[0] + keys // pages[1], mask=in_keys, other=0).to(tl.int64)
    k_scales = tl.load(k_scale + page * stride, mask=in_keys, other=0.0)
    v_scales = tl.load(v_scale + page * stride, mask=in_keys, other=0.0)
    return k_scales[:, None], v_scales[:, None]


@triton.jit
def load_tile(pointers, in_rows, in_cols, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """Load a tile, with 0 outside of in_rows if ``MASK_ROWS``, and outside of in_cols if ``MASK_COLS``."""
    if MASK_ROWS and MASK_COLS:
        tile = tl.load(pointers, mask=in_rows[:, None] & in_cols[None, :], other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=in_rows[:, None], other=0.0)
    elif MASK_COLS:
        tile = tl.load(pointers, mask=in_cols[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_described(tiles, batch, head, row):
    """Load the tile of a head that begins at ``row``, of which a tensor descriptor has (1, 1, rows, columns) blocks.

    What lies past the edges of the tensor is 0.
    """
    tile = tiles.load([batch.to(tl.int32), head.to(tl.int32), row, 0])
    return tl.reshape(tile, (tile.shape[2], tile.shape[3]))


@triton.jit
def store_tile(pointers, tile, in_rows, in_cols, MASK_COLS: tl.constexpr):
    """Cast the tile to the type that the pointers point to, and store its part inside in_rows and in_cols."""
    mask = in_rows[:, None]
    if MASK_COLS:
        mask = mask & in_cols[None, :]
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a @ b in float32, or a @ b if acc is None."""
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def softmax_step(scores, m_i, l_i):
    """Take one step of the online softmax in base 2 (Milakov and Gimelshein 2018, algorithm 3).

    scores (rows, keys) is -inf where a key is not seen; m_i and l_i (rows,) are the running maximum and sum.
    Returns the weights relative to the new maximum, the factor that brings earlier weights to the new maximum, the
    new m_i and the new l_i.
    """
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is nan.
    shift = tl.where(m_new == NEG_INF, 0.0, m_new)
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def normalise(acc, m_i, l_i):
    """Return out and the natural logarithm lse after the last ``softmax_step``; a row without keys gets 0 and -inf."""
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    return acc / l_i[:, None], (m_i + tl.log2(l_i)) * LN2


@triton.jit
def soft_capped(scores, softcap):
    """Return softcap * tanh(scores / softcap), with both in base 2; tanh(x) is 1 - 2 / (1 + exp(2 x))."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores / softcap * (2.0 * LOG2E))))


@triton.jit
def slope_of_cap(capped, softcap):
    """Return the derivative of capped scores by scaled products, 1 - tanh^2."""
    return 1.0 - (capped / softcap) * (capped / softcap)


@triton.jit
def weights(scores, row_lse):
    """Return P from scaled scores and lse, both in base 2; nan where either is nan."""
    # lse is rounded, so it may lie below the largest score, and far below a huge one. P is then at most 1 all the same.
    return tl.exp2(tl.minimum(scores - row_lse, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def dropout_factors(dropout, member, rows, keys):
    """Return the factors of dropout: keep_scale, or 0 where word 0 of Philox 4x32-10 is below the threshold.

    ``dropout`` is (seed, threshold, keep_scale, head), of which ``launching.dropout_arguments`` makes the first
    three; the counter of Philox (Salmon et al. 2011) is (keys, rows, head + member), heads being counted over the
    whole batch. rows and keys are (rows, 1) and (1, keys), or (1, rows) and (keys, 1). ``reference.dropout`` draws
    the very same bits.
    """
    seed, threshold, keep_scale, head = dropout
    k0 = seed.to(tl.uint32)
    k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    c2 = (head + member).to(tl.uint32)
    c0 = keys.to(tl.uint32)
    c1 = rows.to(tl.uint32)
    c3 = c2 ^ c2  # 0
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        # These sums are meant to wrap around, which a debug run of Triton would otherwise report as an overflow.
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return tl.where(c0 >= threshold.to(tl.uint32), keep_scale, 0.0)


@triton.jit
def key_range(
    start_m,
    rows,
    seqlen_q,
    seqlen_k,
    CAUSAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Return what the query tile ``rows``, which starts at row start_m, sees of the keys.

    Returns the last key that each row sees, the number of leading key tiles that every row sees as a whole, and the
    number of leading key tiles that any row sees at least in part.
    """
    last_key = tl.full([BLOCK_ROWS], seqlen_k - 1, tl.int32)
    whole = seqlen_k // BLOCK_KEYS
    tiles = tl.cdiv(seqlen_k, BLOCK_KEYS)
    if CAUSAL:
        offset = seqlen_k - seqlen_q
        last_key = rows + offset
        whole = tl.minimum(tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS, whole)
        tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)
    return last_key, whole, tiles


@triton.jit
def reach(places, before, after, chunk, seqlen_q, seqlen_k):
    """Return the first and the last key that a pattern lets rows see, told by ``places``, the keys on their diagonals.

    A row with key d on its diagonal sees key j if d - before < j < d + after, and if both are in the same chunk of
    ``chunk`` keys; what is None hides nothing. So the diagonals of the rows that see key j are within reach of j, with
    before and after swapped. Keys and diagonals are from -seqlen_q to seqlen_k.
    """
    first = tl.minimum(places, -seqlen_q)
    last = tl.maximum(places, seqlen_k)
    if before is not None:
        first = places - before + 1
    if after is not None:
        last = places + after - 1
    if chunk is not None:
        # The remainder of a negative number may be negative.
        begin = places - (places % chunk + chunk) % chunk
        first = tl.maximum(first, begin)
        last = tl.minimum(last, begin + chunk - 1)
    return first, last


@triton.jit
def seen_range(
    start_m,
    rows,
    seqlen_q,
    seqlen_k,
    window,
    window_right,
    chunk,
    PATTERN: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Return what the query tile ``rows``, which starts at row start_m, sees of the keys under a mask's pattern.

    ``window``, ``window_right`` and ``chunk`` are those of ``reference.mask_pattern``, each None if there is none, and
    at most seqlen_q + seqlen_k. Without PATTERN they are not read, and a row sees all keys that ``key_range`` leaves.

    Returns the first and the last key that each row sees, the number of leading key tiles that no row sees, the number
    of those that are either not seen or seen as a whole, and the number of those up to the last one that any row sees.
    Under a pattern no tile counts as seen as a whole.
    """
    last_key, whole, tiles = key_range(start_m, rows, seqlen_q, seqlen_k, CAUSAL, BLOCK_ROWS, BLOCK_KEYS)
    first_key = tl.full([BLOCK_ROWS], 0, tl.int32)
    first = 0
    if PATTERN:
        offset = seqlen_k - seqlen_q
        first_key, end = reach(rows + offset, window, window_right, chunk, seqlen_q, seqlen_k)
        last_key = tl.minimum(last_key, end)
        # The first and the last visible key never decrease from a row to the next, so the ends of the tile bound them.
        begin, _ = reach(start_m + offset, window, window_right, chunk, seqlen_q, seqlen_k)
        _, end = reach(start_m + BLOCK_ROWS - 1 + offset, window, window_right, chunk, seqlen_q, seqlen_k)
        tiles = tl.minimum(tl.cdiv(tl.maximum(end + 1, 0), BLOCK_KEYS), tiles)
        first = tl.minimum(tl.maximum(begin, 0) // BLOCK_KEYS, tiles)
        whole = first
    return first_key, last_key, first, whole, tiles
