"""Operator mutants of our kernels that the suite does not tell from the original, each with the reason.

A mutant is named by its function and by its edit between the lines before and after it. If any of these lines change,
the mutant has another name, and has to be argued anew. A mutant that compiles to the same Triton IR as the original
needs no entry.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """The reason why some mutants survive. ``device`` is the device type for which it holds, "" if for both."""

    reason: str
    changes: tuple[str, ...]
    device: str = ""


EQUIVALENT = (
    Argument(
        "Query tiles without a row that sees a key of the window are masked; a loop over fewer than 0 is empty.",
        (
            """\
gradients_of_keys
  # Row i sees key j if i < j + window - offset. All tiles are masked, up to the last row that sees a key.
- end = tl.cdiv(start_n + BLOCK_KEYS - 1 + window - offset, BLOCK_ROWS)
+ end = tl.cdiv(start_n + BLOCK_KEYS + window - offset, BLOCK_ROWS)
  tiles_q = tl.maximum(tl.minimum(end, tiles_q), first)""",
            """\
gradients_of_keys
  end = tl.cdiv(start_n + BLOCK_KEYS - 1 + window - offset, BLOCK_ROWS)
- tiles_q = tl.maximum(tl.minimum(end, tiles_q), first)
+ pass
  diagonal = tiles_q""",
            """\
gradients_of_keys
  end = tl.cdiv(start_n + BLOCK_KEYS - 1 + window - offset, BLOCK_ROWS)
- tiles_q = tl.maximum(tl.minimum(end, tiles_q), first)
+ tiles_q = tl.minimum(end, tiles_q)
  diagonal = tiles_q""",
            """\
gradients_of_keys
  end = tl.cdiv(start_n + BLOCK_KEYS - 1 + window - offset, BLOCK_ROWS)
- tiles_q = tl.maximum(tl.minimum(end, tiles_q), first)
+ tiles_q = tl.maximum(end, first)
  diagonal = tiles_q""",
            """\
gradients_of_keys
  end = tl.cdiv(start_n + BLOCK_KEYS - 1 + window - offset, BLOCK_ROWS)
- tiles_q = tl.maximum(tl.minimum(end, tiles_q), first)
+ tiles_q = tl.maximum(tiles_q, first)
  diagonal = tiles_q""",
            """\
gradients_of_keys
  end = tl.cdiv(start_n + BLOCK_KEYS - 1 + window - offset, BLOCK_ROWS)
- tiles_q = tl.maximum(tl.minimum(end, tiles_q), first)
+ tiles_q = tl.maximum(tl.maximum(end, tiles_q), first)
  diagonal = tiles_q""",
        ),
    ),
    Argument(
        "What lies outside of the tile is masked, or not stored, all the same.",
        (
            """\
gradients_of_keys
  row_base = member * row_head_step + start_m
- row_lse = tl.load(lse_log2 + row_base + rows, mask=in_tile, other=0.0)
+ row_lse = tl.load(lse_log2 + row_base + rows, mask=in_tile, other=1.0)
  q_tile = load_tile(""",
            """\
gradients_of_keys
  if cut:
- seen = ((first_row - start_m)[:, None] <= rows[None, :]) & in_tile[None, :]
+ seen = (first_row - start_m)[:, None] <= rows[None, :]
  if window is not None:""",
            """\
gradients_of_keys
  dv = dot(dropped.to(do_tile.dtype), do_tile, dv, PRECISION)
- row_delta = tl.load(delta + row_base + rows, mask=in_tile, other=0.0)
+ row_delta = tl.load(delta + row_base + rows, mask=in_tile, other=1.0)
  dp = dot(v_tile, tl.trans(do_tile), None, PRECISION)""",
            """\
_dq_kernel
  do_tile = load_tile(do_ptrs, in_rows, in_cols, True, MASK_COLS)
- row_lse = tl.load(lse_log2 + head * seqlen_q + rows, mask=in_rows, other=0.0)
+ row_lse = tl.load(lse_log2 + head * seqlen_q + rows, mask=in_rows, other=1.0)
  row_delta = tl.load(delta + head * seqlen_q + rows, mask=in_rows, other=0.0)""",
            """\
_dq_kernel
  row_lse = tl.load(lse_log2 + head * seqlen_q + rows, mask=in_rows, other=0.0)
- row_delta = tl.load(delta + head * seqlen_q + rows, mask=in_rows, other=0.0)
+ row_delta = tl.load(delta + head * seqlen_q + rows, mask=in_rows, other=1.0)
  last_key, whole, tiles_k = key_range(start_m, rows, seqlen_q, seqlen_k, CAUSAL, BLOCK_OWN, BLOCK_LOOP)""",
            """\
_delta_kernel
  o_tile = load_tile(o_ptrs, in_rows, in_cols, True, True).to(tl.float32)
- row_lse = tl.load(lse + head * seqlen_q + rows, mask=in_rows, other=0.0)
+ row_lse = tl.load(lse + head * seqlen_q + rows, mask=in_rows, other=1.0)
  """,
            """\
load_tile
  elif MASK_ROWS:
- tile = tl.load(pointers, mask=in_rows[:, None], other=0.0)
+ tile = tl.load(pointers, mask=in_rows[:, None], other=1.0)
  elif MASK_COLS:""",
            """\
load_tile
  elif MASK_COLS:
- tile = tl.load(pointers, mask=in_cols[None, :], other=0.0)
+ tile = tl.load(pointers, mask=in_cols[None, :], other=1.0)
  else:""",
            """\
store_tile
  mask = in_rows[:, None]
- if MASK_COLS:
+ if True:
  mask = mask & in_cols[None, :]""",
        ),
    ),
    Argument(
        "Whole tiles are masked as well, where nothing is to be masked, or a tile more is: the same, but slower.",
        (
            """\
gradients_of_keys
  p = weights(dot(k_tile, tl.trans(q_tile), None, PRECISION) * scale_log2, row_lse[None, :])
- if cut:
+ if True:
  seen = ((first_row - start_m)[:, None] <= rows[None, :]) & in_tile[None, :]""",
            """\
attend
  scores = dot(q_tile, tl.trans(k_tile), None, PRECISION) * scale_log2
- if cut:
+ if True:
  seen = keys[None, :] <= (last_key - start_n)[:, None]""",
            """\
gradient_of_queries
  ds = p * (dp - row_delta[:, None])
- if cut:
+ if True:
  ds = tl.where(keys[None, :] <= (last_key - start_n)[:, None], ds, 0.0)""",
            '''\
load_tile
  """Load a tile, with 0 outside of in_rows if ``MASK_ROWS``, and outside of in_cols if ``MASK_COLS``."""
- if MASK_ROWS and MASK_COLS:
+ if True:
  tile = tl.load(pointers, mask=in_rows[:, None] & in_cols[None, :], other=0.0)''',
            '''\
load_tile
  """Load a tile, with 0 outside of in_rows if ``MASK_ROWS``, and outside of in_cols if ``MASK_COLS``."""
- if MASK_ROWS and MASK_COLS:
+ if MASK_COLS:
  tile = tl.load(pointers, mask=in_rows[:, None] & in_cols[None, :], other=0.0)''',
            '''\
load_tile
  """Load a tile, with 0 outside of in_rows if ``MASK_ROWS``, and outside of in_cols if ``MASK_COLS``."""
- if MASK_ROWS and MASK_COLS:
+ if MASK_ROWS:
  tile = tl.load(pointers, mask=in_rows[:, None] & in_cols[None, :], other=0.0)''',
            """\
load_tile
  tile = tl.load(pointers, mask=in_rows[:, None], other=0.0)
- elif MASK_COLS:
+ elif True:
  tile = tl.load(pointers, mask=in_cols[None, :], other=0.0)""",
            """\
gradients_of_keys
  first = 0
- diagonal = 0
+ diagonal = 1
  full = seqlen_q // BLOCK_ROWS""",
            """\
gradients_of_keys
  first_row = keys - offset
- first = tl.maximum(start_n - offset, 0) // BLOCK_ROWS
+ pass
  diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0), BLOCK_ROWS)""",
            """\
gradients_of_keys
  first_row = keys - offset
- first = tl.maximum(start_n - offset, 0) // BLOCK_ROWS
+ first = tl.maximum(start_n - offset, 1) // BLOCK_ROWS
  diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0), BLOCK_ROWS)""",
            """\
gradients_of_keys
  first = tl.maximum(start_n - offset, 0) // BLOCK_ROWS
- diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0), BLOCK_ROWS)
+ diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - offset, 0), BLOCK_ROWS)
  diagonal = tl.minimum(diagonal, tiles_q)""",
            """\
gradients_of_keys
  first = tl.maximum(start_n - offset, 0) // BLOCK_ROWS
- diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0), BLOCK_ROWS)
+ diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 1), BLOCK_ROWS)
  diagonal = tl.minimum(diagonal, tiles_q)""",
            """\
gradients_of_keys
  diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0), BLOCK_ROWS)
- diagonal = tl.minimum(diagonal, tiles_q)
+ diagonal = tiles_q
  if window is not None:""",
            """\
gradients_of_keys
  diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0), BLOCK_ROWS)
- diagonal = tl.minimum(diagonal, tiles_q)
+ diagonal = tl.maximum(diagonal, tiles_q)
  if window is not None:""",
            """\
key_range
  last_key = rows + offset
- whole = tl.minimum(tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS, whole)
+ whole = tl.minimum(tl.maximum(start_m + offset, 0) // BLOCK_KEYS, whole)
  tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)""",
            """\
key_range
  whole = tl.minimum(tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS, whole)
- tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)
+ pass
  return last_key, whole, tiles""",
            """\
key_range
  whole = tl.minimum(tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS, whole)
- tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)
+ tiles = tl.maximum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)
  return last_key, whole, tiles""",
            """\
key_range
  whole = tl.minimum(tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS, whole)
- tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)
+ tiles = tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS)
  return last_key, whole, tiles""",
            """\
key_range
  whole = tl.minimum(tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS, whole)
- tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)
+ tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 1), BLOCK_KEYS), tiles)
  return last_key, whole, tiles""",
        ),
    ),
    Argument(
        "Where the sum is 0, out is 0 and the maximum -inf, whatever is put in its place or the sum begins with.",
        (
            """\
attend
  m_i = tl.full([BLOCK_ROWS], NEG_INF, tl.float32)
- l_i = tl.full([BLOCK_ROWS], 0.0, tl.float32)
+ l_i = tl.full([BLOCK_ROWS], 1.0, tl.float32)
  acc = tl.full([BLOCK_ROWS, HEAD_DIM], 0.0, tl.float32)""",
            '''\
normalise
  """Turn what ``attend`` returns into out and the natural logarithm lse; a row without keys gets 0 and -inf."""
- l_i = tl.where(l_i == 0.0, 1.0, l_i)
+ l_i = tl.where(l_i == 0.0, 2.0, l_i)
  return acc / l_i[:, None], (m_i + tl.log2(l_i)) * LN2''',
            """\
softmax_step
  # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is nan.
- shift = tl.where(m_new == NEG_INF, 0.0, m_new)
+ shift = tl.where(m_new == NEG_INF, 1.0, m_new)
  p = tl.exp2(scores - shift[:, None])""",
        ),
    ),
    Argument(
        "P is 0 there already; 0 times an infinite dP behind the mask is left open, as the module says.",
        (
            """\
gradients_of_keys
  ds = p * (dp - row_delta[None, :])
- if cut:
+ if False:
  ds = tl.where(seen, ds, 0.0)""",
            """\
gradients_of_keys
  if cut:
- ds = tl.where(seen, ds, 0.0)
+ pass
  dk = dot(ds.to(q_tile.dtype), q_tile, dk, PRECISION)""",
        ),
    ),
    Argument(
        "P exceeds 1 by the rounding of lse alone, which the bounds allow; where that is much, they are infinite.",
        (
            """\
weights
  # lse is rounded, so it may lie below the largest score, and far below a huge one. P is then at most 1 all the same.
- return tl.exp2(tl.minimum(scores - row_lse, 0.0, propagate_nan=tl.PropagateNan.ALL))
+ return tl.exp2(scores - row_lse)
  """,
            """\
weights
  # lse is rounded, so it may lie below the largest score, and far below a huge one. P is then at most 1 all the same.
- return tl.exp2(tl.minimum(scores - row_lse, 0.0, propagate_nan=tl.PropagateNan.ALL))
+ return tl.exp2(tl.minimum(scores - row_lse, 1.0, propagate_nan=tl.PropagateNan.ALL))
  """,
        ),
    ),
    Argument(
        "The other factor is float32, and so is the product.",
        (
            """\
_delta_kernel
  o_ptrs = tile_pointers(out + batch * stride_ob + head_q * stride_oh, rows, stride_om, cols, False)
- do_tile = load_tile(do_ptrs, in_rows, in_cols, True, True).to(tl.float32)
+ do_tile = load_tile(do_ptrs, in_rows, in_cols, True, True)
  o_tile = load_tile(o_ptrs, in_rows, in_cols, True, True).to(tl.float32)""",
            """\
_delta_kernel
  do_tile = load_tile(do_ptrs, in_rows, in_cols, True, True).to(tl.float32)
- o_tile = load_tile(o_ptrs, in_rows, in_cols, True, True).to(tl.float32)
+ o_tile = load_tile(o_ptrs, in_rows, in_cols, True, True)
  row_lse = tl.load(lse + head * seqlen_q + rows, mask=in_rows, other=0.0)""",
        ),
    ),
    Argument(
        "Hints of alignment change how a GPU loads, and nothing interpreted.",
        (
            """\
_delta_kernel
  in_rows = rows < seqlen_q
- do_ptrs = tile_pointers(dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, False)
+ do_ptrs = tile_pointers(dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, True)
  o_ptrs = tile_pointers(out + batch * stride_ob + head_q * stride_oh, rows, stride_om, cols, False)""",
            """\
_delta_kernel
  do_ptrs = tile_pointers(dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, False)
- o_ptrs = tile_pointers(out + batch * stride_ob + head_q * stride_oh, rows, stride_om, cols, False)
+ o_ptrs = tile_pointers(out + batch * stride_ob + head_q * stride_oh, rows, stride_om, cols, True)
  do_tile = load_tile(do_ptrs, in_rows, in_cols, True, True).to(tl.float32)""",
            """\
tile_pointers
  row_ptrs = base + (rows.to(tl.int64) * row_stride)[:, None]
- if ALIGNED:
+ if True:
  row_ptrs = tl.multiple_of(row_ptrs, [16, 16])""",
            """\
columns_inside
  inside = cols < head_dim
- if ALIGNED:
+ if True:
  inside = tl.max_constancy(inside, [128 // base.dtype.element_ty.primitive_bitwidth])""",
            """\
advance
  pointers += offset
- if ALIGNED:
+ if True:
  pointers = tl.multiple_of(pointers, [1, 16])""",
        ),
        device="cpu",
    ),
    Argument(
        "The other bounds imply this one, or a loop over fewer tiles than none is empty all the same.",
        (
            """\
gradients_of_keys
  diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0), BLOCK_ROWS)
- diagonal = tl.minimum(diagonal, tiles_q)
+ pass
  if window is not None:""",
            """\
gradients_of_keys
  cut_tiles = diagonal - first + tiles_q - tl.maximum(diagonal, full)
- whole_tiles = tl.maximum(full - diagonal, 0)
+ whole_tiles = full - diagonal
  """,
            """\
key_range
  last_key = rows + offset
- whole = tl.minimum(tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS, whole)
+ whole = tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS
  tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)""",
            """\
key_range
  whole = tl.minimum(tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS, whole)
- tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)
+ tiles = tl.minimum(tl.cdiv(start_m + offset + BLOCK_ROWS, BLOCK_KEYS), tiles)
  return last_key, whole, tiles""",
        ),
    ),
    Argument(
        "Interpreted, a product knows no precision.",
        (
            '''\
dot
  """Return acc + a @ b in float32, or a @ b if acc is None."""
- return tl.dot(a, b, acc, input_precision=PRECISION)
+ return tl.dot(a, b, acc)
  ''',
        ),
        device="cpu",
    ),
    Argument(
        "It is divided by BLOCK_KEYS, which is more, and rounded down to 0 either way.",
        (
            """\
key_range
  last_key = rows + offset
- whole = tl.minimum(tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS, whole)
+ whole = tl.minimum(tl.maximum(start_m + offset + 1, 1) // BLOCK_KEYS, whole)
  tiles = tl.minimum(tl.cdiv(tl.maximum(start_m + offset + BLOCK_ROWS, 0), BLOCK_KEYS), tiles)""",
        ),
    ),
    Argument(
        "Without dropout the threshold is 0 and keep_scale 1: each weight is kept as it is.",
        (
            """\
_forward_kernel
  BLOCK_KEYS=BLOCK_LOOP,
- dropout=(dropout_seed, threshold, keep_scale, head) if DROPOUT else None,
+ dropout=(dropout_seed, threshold, keep_scale, head),
  rows=rows,""",
            """\
_dk_dv_kernel
  BLOCK_ROWS=BLOCK_LOOP,
- dropout=(dropout_seed, threshold, keep_scale, head * group) if DROPOUT else None,
+ dropout=(dropout_seed, threshold, keep_scale, head * group),
  window=window if WINDOW else None,""",
            """\
_dq_kernel
  BLOCK_KEYS=BLOCK_LOOP,
- dropout=(dropout_seed, threshold, keep_scale, head) if DROPOUT else None,
+ dropout=(dropout_seed, threshold, keep_scale, head),
  rows=rows,""",
        ),
    ),
    Argument(
        "Nothing there is negative or has more than 32 bits, whatever type holds it; seeds have 63.",
        (
            """\
dropout_factors
  k0 = seed.to(tl.uint32)
- k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
+ k1 = (seed >> 32).to(tl.uint32)
  c2 = (head + member).to(tl.uint32)""",
            """\
dropout_factors
  k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
- c2 = (head + member).to(tl.uint32)
+ c2 = head + member
  c0 = keys.to(tl.uint32)""",
            """\
dropout_factors
  c2 = (head + member).to(tl.uint32)
- c0 = keys.to(tl.uint32)
+ c0 = keys
  c1 = rows.to(tl.uint32)""",
            """\
dropout_factors
  product1 = c2.to(tl.uint64) * 0xCD9E8D57
- c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
+ c0 = (product1 >> 32) ^ c1 ^ k0
  c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1""",
            """\
dropout_factors
  c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
- c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
+ c2 = (product0 >> 32) ^ c3 ^ k1
  c1 = product1.to(tl.uint32)""",
            """\
dropout_factors
  k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
- return tl.where(c0 >= threshold.to(tl.uint32), keep_scale, 0.0)
+ return tl.where(c0 >= threshold, keep_scale, 0.0)
  """,
        ),
    ),
)
"""Arguments for mutants that compute the same as the original. They do not count as survivors."""

HOLES = (
    Argument(
        "Gradients of rows that see keys, but only scores of -inf: no law asks for them.",
        (
            """\
_delta_kernel
  # With lse = inf, exp2(score - lse) is 0: so are the weights of a row that sees no key.
- row_lse = tl.where(row_lse == NEG_INF, float("inf"), row_lse * LOG2E)
+ row_lse = row_lse * LOG2E
  tl.store(delta + head * seqlen_q + rows, tl.sum(do_tile * o_tile, 1), mask=in_rows)""",
        ),
    ),
    Argument(
        "Shows from 2^31 rows in a group on: lse alone would take 8 GiB, more than a case may.",
        (
            """\
gradients_of_keys
  do_head_step = stride_doh.to(tl.int64)
- row_head_step = stride_row_head.to(tl.int64)
+ row_head_step = stride_row_head.to(tl.int32)
  """,
        ),
    ),
    Argument(
        "One weight in 2^32 has the very word that is the threshold.",
        (
            """\
dropout_factors
  k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
- return tl.where(c0 >= threshold.to(tl.uint32), keep_scale, 0.0)
+ return tl.where(c0 > threshold.to(tl.uint32), keep_scale, 0.0)
  """,
        ),
    ),
)
"""Arguments for mutants with bugs that no law sees. They count as survivors."""
