"""Planted bugs of the forward pass. Those in ``kernels.tiles`` strike in the dq kernel as well."""

from kernels.mutants.mutant import Edit, Mutant

KERNEL = "kernels.flash_v2:_forward_kernel"
ATTEND = "kernels.flash_v2:attend"
NORMALISE = "kernels.flash_v2:normalise"
STEP = "kernels.tiles:softmax_step"
RANGE = "kernels.tiles:key_range"
POINTERS = "kernels.tiles:tile_pointers"
LAUNCH = "kernels.flash_v2:forward"

FLASH = "https://github.com/Dao-AILab/flash-attention"
TRITON = "https://github.com/triton-lang/triton"
PYTORCH = "https://github.com/pytorch/pytorch"

MASKED = "scores = tl.where(seen, scores, NEG_INF)"
SEEN = "seen = keys[None, :] <= (last_key - start_n)[:, None]"
SCORES = "scores = dot(q_tile, tl.trans(k_tile), None, PRECISION) * scale_log2"
UPDATE = "acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], PRECISION)"
STORED = "store_tile(out_ptrs, out_tile, in_rows, in_cols, MASK_COLS)"
Q_LOAD = "q_tile = load_tile(q_ptrs, in_rows, in_cols, True, MASK_COLS)"
V_POINTERS = (
    "v_ptrs = tile_pointers(v + batch * stride_vb + head_kv * stride_vh, keys, stride_vn, cols, ALIGNED)"
)
K_POINTERS = (
    "k_ptrs = tile_pointers(k + batch * stride_kb + head_kv * stride_kh, keys, stride_kn, cols, ALIGNED)"
)

FORWARD = (
    # Tails and masks
    Mutant(
        "last_key_dropped",
        "the last key is masked where the keys do not fill their last tile",
        (Edit(RANGE, "seqlen_k - 1, tl.int32", "seqlen_k - 2, tl.int32"),),
        source=f"{FLASH}/issues/334",
    ),
    Mutant("padding_scored", "keys past seqlen_k are not masked", (Edit(ATTEND, MASKED, "scores = scores"),)),
    Mutant(
        "padding_scored_zero",
        "what is masked scores 0 instead of -inf",
        (Edit(ATTEND, MASKED, "scores = tl.where(seen, scores, 0.0)"),),
        source=f"{PYTORCH}/issues/196678",
    ),
    Mutant(
        "finite_sentinel",
        "what is masked scores -30000: a row that sees nothing returns a mean of v",
        (Edit(ATTEND, MASKED, "scores = tl.where(seen, scores, -30000.0)"),),
        source=f"{PYTORCH}/issues/103963",
    ),
    Mutant(
        "running_maximum_from_minus_10000",
        "the running maximum starts at -10^4: rows whose scores are all lower underflow",
        (
            Edit(
                ATTEND,
                "m_i = tl.full([BLOCK_ROWS], NEG_INF, tl.float32)",
                "m_i = tl.full([BLOCK_ROWS], -1.0e4, tl.float32)",
            ),
        ),
        subtle=True,
    ),
    Mutant(
        "running_maximum_from_zero",
        "the running maximum starts at 0: rows of very negative scores underflow",
        (
            Edit(
                ATTEND,
                "m_i = tl.full([BLOCK_ROWS], NEG_INF, tl.float32)",
                "m_i = tl.full([BLOCK_ROWS], 0.0, tl.float32)",
            ),
        ),
        source="https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    Mutant(
        "tail_tile_dropped",
        "keys past the last whole tile are left out",
        (Edit(RANGE, "tiles = tl.cdiv(seqlen_k, BLOCK_KEYS)\n", "tiles = seqlen_k // BLOCK_KEYS\n"),),
    ),
    Mutant(
        "one_lane_dropped",
        "key 17 of every tile that an edge cuts is masked",
        (
            Edit(
                ATTEND,
                SEEN,
                SEEN.replace("= keys", "= (keys != 17)[None, :] & (keys") + ")",
            ),
        ),
        subtle=True,
    ),
    Mutant(
        "masked_tiles_twice",
        "the masked loop starts at tile 0, so that whole tiles count twice",
        (
            Edit(
                ATTEND,
                "range(whole if cut else first, end if cut else whole)",
                "range(first, end if cut else whole)",
            ),
        ),
    ),
    Mutant(
        "first_tile_dropped",
        "the first whole tile is left out where there are several",
        (
            Edit(
                ATTEND,
                "range(whole if cut else first, end if cut else whole)",
                "range(whole if cut else whole // 4, end if cut else whole)",
            ),
        ),
        subtle=True,
    ),
    Mutant(
        "columns_past_64_dropped",
        "only the first 64 columns of q and k enter the scores",
        (
            Edit(
                KERNEL,
                Q_LOAD,
                f"{Q_LOAD}\n    q_tile = tl.where(cols[None, :] < 64, q_tile, 0.0).to(q_tile.dtype)",
            ),
        ),
        source=f"{TRITON}/issues/621",
    ),
    # Causal masks
    Mutant(
        "causal_top_left",
        "the causal mask is aligned top-left",
        (Edit(RANGE, "offset = seqlen_k - seqlen_q", "offset = 0"),),
        source=f"{FLASH}/pull/436",
    ),
    Mutant(
        "causal_one_more",
        "every row sees the key after its last",
        (Edit(RANGE, "last_key = rows + offset", "last_key = rows + offset + 1"),),
    ),
    Mutant(
        "causal_one_less",
        "no row sees its last key",
        (Edit(RANGE, "last_key = rows + offset", "last_key = rows + offset - 1"),),
        source="https://github.com/zml/zml/pull/763",
    ),
    Mutant(
        "causal_row_0_sees_one_more",
        "the first row of a query tile sees a key too many, where that key ends a key tile",
        (Edit(RANGE, "start_m + offset + 1, 0", "start_m + offset + 2, 0"),),
        subtle=True,
    ),
    Mutant(
        "causal_last_row_misses_one",
        "the last row of a query tile misses its last key, where that key starts a key tile",
        (Edit(RANGE, "start_m + offset + BLOCK_ROWS, 0", "start_m + offset + BLOCK_ROWS - 1, 0"),),
        subtle=True,
    ),
    Mutant(
        "causal_diagonal_unmasked",
        "the key tile on the diagonal counts as seen as a whole",
        (
            Edit(
                RANGE,
                "tl.maximum(start_m + offset + 1, 0) // BLOCK_KEYS",
                "tl.cdiv(tl.maximum(start_m + offset + 1, 0), BLOCK_KEYS)",
            ),
        ),
    ),
    Mutant(
        "causal_ignored",
        "the forward pass never masks causally",
        (Edit(LAUNCH, "CAUSAL=causal", "CAUSAL=False"),),
        source="https://github.com/meta-pytorch/MSLK/pull/263",
    ),
    # Online softmax
    Mutant(
        "accumulator_not_rescaled",
        "the accumulator is not brought to the new maximum",
        (Edit(ATTEND, "acc * alpha[:, None]", "acc"),),
    ),
    Mutant(
        "one_row_not_rescaled",
        "row 3 of each tile is not brought to the new maximum",
        (
            Edit(
                ATTEND,
                "acc * alpha[:, None]",
                "acc * tl.where(tl.arange(0, BLOCK_ROWS) == 3, 1.0, alpha)[:, None]",
            ),
        ),
        subtle=True,
    ),
    Mutant(
        "sum_not_rescaled",
        "the softmax sum is not brought to the new maximum",
        (Edit(STEP, "l_i * alpha + tl.sum(p, 1)", "l_i + tl.sum(p, 1)"),),
    ),
    Mutant(
        "alpha_inverted",
        "the rescaling factor is its inverse",
        (Edit(STEP, "alpha = tl.exp2(m_i - shift)", "alpha = tl.exp2(shift - m_i)"),),
    ),
    Mutant(
        "maximum_of_the_tile",
        "the maximum is that of the tile alone, so that a tile without a visible key forgets all before it",
        (Edit(STEP, "tl.maximum(m_i, tl.max(scores, 1))", "tl.max(scores, 1)"),),
    ),
    Mutant(
        "empty_tile_is_nan",
        "-inf - -inf, where a row has seen no key yet",
        (Edit(STEP, "shift = tl.where(m_new == NEG_INF, 0.0, m_new)", "shift = m_new"),),
        source="https://github.com/flashinfer-ai/flashinfer/pull/4054",
    ),
    Mutant(
        "empty_row_is_nan",
        "0 / 0 on rows that see no key",
        (Edit(NORMALISE, "l_i = tl.where(l_i == 0.0, 1.0, l_i)", "l_i = l_i"),),
        source=f"{PYTORCH}/issues/109517",
    ),
    Mutant(
        "weights_in_base_e",
        "exp where the exponents are in base 2",
        (Edit(STEP, "p = tl.exp2(scores - shift[:, None])", "p = tl.exp(scores - shift[:, None])"),),
    ),
    Mutant(
        "not_normalised",
        "out is not divided by the softmax sum",
        (Edit(NORMALISE, "acc / l_i[:, None]", "acc"),),
    ),
    Mutant(
        "nan_becomes_zero",
        "a weight that is nan counts as 0",
        (
            Edit(
                STEP,
                "alpha = tl.exp2(m_i - shift)",
                "p = tl.where(p == p, p, 0.0)\n    alpha = tl.exp2(m_i - shift)",
            ),
        ),
        source="https://github.com/tracel-ai/cubecl/pull/1070",
    ),
    # Scale
    Mutant(
        "scale_in_base_e",
        "log2 e is left out of the scale",
        (Edit(LAUNCH, "sm_scale * LOG2E.value", "sm_scale"),),
    ),
    Mutant("scale_squared", "scores are scaled twice", (Edit(ATTEND, SCORES, f"{SCORES} * scale_log2"),)),
    Mutant(
        "scale_ignored",
        "1 / sqrt(head_dim) whatever sm_scale is",
        (Edit(LAUNCH, "sm_scale * LOG2E.value", "head_dim**-0.5 * LOG2E.value"),),
        source=f"{PYTORCH}/issues/174049",
    ),
    Mutant(
        "scale_positive",
        "the sign of sm_scale is lost",
        (Edit(LAUNCH, "sm_scale * LOG2E.value", "abs(sm_scale) * LOG2E.value"),),
        source=f"{PYTORCH}/pull/105202",
    ),
    Mutant(
        "scale_of_the_padded_head_dim",
        "the scale belongs to head_dim padded to a power of two",
        (
            Edit(
                LAUNCH,
                "sm_scale * LOG2E.value",
                "sm_scale * (head_dim / padded_head_dim(head_dim)) ** 0.5 * LOG2E.value",
            ),
        ),
    ),
    Mutant(
        "scale_half_a_percent_off",
        "scores are 0.5 % too large",
        (Edit(LAUNCH, "sm_scale * LOG2E.value", "1.005 * sm_scale * LOG2E.value"),),
        subtle=True,
    ),
    # Rounding
    Mutant(
        "scores_rounded",
        "scores are rounded to the input's dtype",
        (Edit(ATTEND, SCORES, f"{SCORES}\n            scores = scores.to(q_tile.dtype).to(tl.float32)"),),
    ),
    Mutant(
        "accumulator_rounded",
        "the accumulator is kept in the input's dtype",
        (Edit(ATTEND, UPDATE, f"{UPDATE}.to(v_tile.dtype).to(tl.float32)"),),
    ),
    Mutant(
        "weights_in_bfloat16",
        "P is rounded to bfloat16 whatever the inputs are",
        (Edit(ATTEND, "p.to(v_tile.dtype)", "p.to(tl.bfloat16).to(v_tile.dtype)"),),
        subtle=True,
    ),
    Mutant(
        "sum_of_rounded_weights",
        "the softmax sum is taken over P rounded to float16",
        (Edit(STEP, "tl.sum(p, 1)\n", "tl.sum(p.to(tl.float16).to(tl.float32), 1)\n"),),
        subtle=True,
    ),
    Mutant(
        "q_scaled_in_its_dtype",
        "q is multiplied with the scale in its own dtype",
        (
            Edit(KERNEL, Q_LOAD, f"{Q_LOAD}\n    q_tile = (q_tile * scale_log2).to(q_tile.dtype)"),
            Edit(ATTEND, SCORES, SCORES.removesuffix(" * scale_log2")),
        ),
        subtle=True,
    ),
    Mutant(
        "one_column_off",
        "column 7 of out is 0.4 % too large",
        (
            Edit(
                KERNEL,
                STORED,
                STORED.replace("out_tile", "out_tile * tl.where(cols == 7, 1.004, 1.0)[None, :]"),
            ),
        ),
        subtle=True,
    ),
    Mutant(
        "tensor_cores_in_tf32",
        "float32 products are tf32 though ieee was asked for",
        (Edit(ATTEND, "tl.trans(k_tile), None, PRECISION)", 'tl.trans(k_tile), None, "tf32")'),),
        source=f"{TRITON}/issues/1671",
        device="cuda",
    ),
    # Heads, strides, offsets
    Mutant(
        "key_heads_interleaved",
        "query head h reads key head h modulo heads_kv",
        (Edit(KERNEL, "head_kv = head_q // group", "head_kv = head_q % (heads_q // group)"),),
    ),
    Mutant(
        "first_key_head_only",
        "every query head reads key head 0",
        (Edit(KERNEL, "head_kv = head_q // group", "head_kv = head_q * 0"),),
    ),
    Mutant(
        "rows_of_v_by_strides_of_k",
        "rows of v are found by the strides of k",
        (Edit(KERNEL, V_POINTERS, V_POINTERS.replace("stride_vn", "stride_kn")),),
    ),
    Mutant(
        "tiles_of_v_by_strides_of_k",
        "tiles of v but the first are found by the strides of k",
        (Edit(ATTEND, "v_step = stride_vn", "v_step = stride_kn"),),
        source=f"{PYTORCH}/pull/133495",
    ),
    Mutant(
        "batch_of_k_by_strides_of_v",
        "batches of k are found by the strides of v",
        (Edit(KERNEL, K_POINTERS, K_POINTERS.replace("stride_kb", "stride_vb")),),
    ),
    Mutant(
        "rows_by_32_bit_offsets",
        "the offset of a row is a 32-bit product",
        (Edit(POINTERS, "(rows.to(tl.int64) * row_stride)", "(rows * row_stride).to(tl.int32)"),),
        source="https://github.com/fla-org/flash-linear-attention/pull/1082",
    ),
    Mutant(
        "heads_by_32_bit_offsets",
        "the offset of a key head is a 32-bit product",
        (
            Edit(
                KERNEL,
                K_POINTERS,
                K_POINTERS.replace("head_kv * stride_kh", "(head_kv * stride_kh).to(tl.int32)"),
            ),
        ),
        source=f"{PYTORCH}/issues/190857",
    ),
    Mutant(
        "tiles_by_32_bit_offsets",
        "the offset of a tile of v is a 32-bit product",
        (Edit(ATTEND, "tile * v_step", "(tile * v_step).to(tl.int32)"),),
        source="https://github.com/sgl-project/sglang/issues/20389",
    ),
    # Memory
    Mutant(
        "reads_past_head_dim",
        "columns of q past head_dim are read, and multiplied with zeros",
        (Edit(KERNEL, Q_LOAD, "q_tile = load_tile(q_ptrs, in_rows, in_cols, True, False)"),),
        source=f"{FLASH}/issues/1745",
    ),
    Mutant(
        "reads_past_the_last_value",
        "rows of v past seqlen_k are read, and weighted with zeros",
        (
            Edit(
                ATTEND,
                "advance(v_ptrs, tile * v_step, ALIGNED), in_tile, in_cols, cut",
                "advance(v_ptrs, tile * v_step, ALIGNED), in_tile, in_cols, False",
            ),
        ),
        source="https://github.com/vllm-project/vllm/pull/30887",
    ),
    Mutant(
        "stores_past_the_last_row",
        "rows of out past seqlen_q are stored",
        (Edit(KERNEL, STORED, STORED.replace("in_rows", "rows >= 0")),),
        source=f"{FLASH}/pull/2337",
    ),
    Mutant(
        "last_row_not_written",
        "the last row of out and lse is never written",
        (Edit(KERNEL, "in_rows = rows < seqlen_q", "in_rows = rows < seqlen_q - 1"),),
        source="https://github.com/fla-org/flash-linear-attention/pull/892",
    ),
    Mutant(
        "last_column_not_written",
        "the last column of out is never written",
        (Edit(KERNEL, STORED, STORED.replace("in_cols, MASK_COLS", "cols < head_dim - 1, True")),),
        subtle=True,
    ),
    Mutant(
        "input_overwritten",
        "out is stored over q as well",
        (Edit(KERNEL, STORED, f"{STORED}\n    {STORED.replace('out_ptrs', 'q_ptrs')}"),),
    ),
    # Launch settings
    Mutant(
        "block_n_of_64_assumed",
        "keys are masked as if a tile held 64 of them",
        (Edit(ATTEND, "start_n = tile * BLOCK_KEYS", "start_n = tile * 64"),),
    ),
    Mutant(
        "block_m_of_128_assumed",
        "rows start as if a tile held 128 of them",
        (Edit(KERNEL, "% tiles) * BLOCK_OWN", "% tiles) * 128"),),
        source="https://github.com/ROCm/aiter/pull/4163",
    ),
)
