"""Planted bugs of the backward pass."""

from kernels.mutants.mutant import Edit, Mutant

DELTA = "kernels.flash_v2:_delta_kernel"
DK_DV = "kernels.flash_v2:_dk_dv_kernel"
DQ = "kernels.flash_v2:_dq_kernel"
OF_KEYS = "kernels.flash_v2:gradients_of_keys"
OF_QUERIES = "kernels.flash_v2:gradient_of_queries"
WEIGHTS = "kernels.tiles:weights"
LAUNCH = "kernels.flash_v2:backward"

FLASH = "https://github.com/Dao-AILab/flash-attention"
TRITON = "https://github.com/triton-lang/triton"

CLAMPED = "tl.exp2(tl.minimum(scores - row_lse, 0.0, propagate_nan=tl.PropagateNan.ALL))"
SEEN = "seen = ((first_row - start_m)[:, None] <= rows[None, :]) & in_tile[None, :]"
OF_DV = "dv = dot(dropped.to(do_tile.dtype), do_tile, dv, PRECISION)"
OF_DK = "dk = dot(ds.to(q_tile.dtype), q_tile, dk, PRECISION)"
OF_DQ = "dq = dot(ds.to(k_tile.dtype), k_tile, dq, PRECISION)"
DS_OF_ROWS = "ds = p * (dp - row_delta[:, None])"
DK_STORE = "store_tile(dk_ptrs, dk_tile * sm_scale, in_keys, in_cols, MASK_COLS)"
DV_STORE = "store_tile(dv_ptrs, dv_tile, in_keys, in_cols, MASK_COLS)"
DQ_STORE = "store_tile(dq_ptrs, dq_tile * sm_scale, in_rows, in_cols, MASK_COLS)"
DELTA_STORE = "tl.store(delta + head * seqlen_q + rows, tl.sum(do_tile * o_tile, 1), mask=in_rows)"
DO_POINTERS = (
    "do_ptrs = tile_pointers(dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, "
)

BACKWARD = (
    # delta
    Mutant(
        "delta_of_dout_alone",
        "delta is the sum of dout squared",
        (Edit(DELTA, "tl.sum(do_tile * o_tile, 1)", "tl.sum(do_tile * do_tile, 1)"),),
    ),
    Mutant(
        "delta_zero",
        "delta is 0",
        (Edit(DELTA, "tl.sum(do_tile * o_tile, 1)", "tl.sum(do_tile * o_tile, 1) * 0.0"),),
    ),
    Mutant(
        "delta_rounded",
        "delta is rounded to the input's dtype",
        (
            Edit(
                DELTA,
                "tl.sum(do_tile * o_tile, 1)",
                "tl.sum(do_tile * o_tile, 1).to(dout.dtype.element_ty).to(tl.float32)",
            ),
        ),
        subtle=True,
    ),
    Mutant(
        "delta_by_strides_of_out",
        "delta reads dout by the strides of out",
        (Edit(DELTA, DO_POINTERS, DO_POINTERS.replace("stride_dom", "stride_om")),),
        source=f"{FLASH}/issues/355",
    ),
    Mutant(
        "delta_heads_by_strides_of_out",
        "delta finds the heads of dout by the strides of out",
        (Edit(DELTA, DO_POINTERS, DO_POINTERS.replace("stride_doh", "stride_oh")),),
        source="https://github.com/facebookresearch/xformers/pull/282",
    ),
    Mutant(
        "delta_past_head_dim",
        "delta reads columns of dout past head_dim",
        (
            Edit(
                DELTA,
                "do_tile = load_tile(do_ptrs, in_rows, in_cols, True, True)",
                "do_tile = load_tile(do_ptrs, in_rows, in_cols, True, False)",
            ),
        ),
    ),
    Mutant(
        "delta_of_last_row_not_written",
        "delta of the last row is scratch memory as it was",
        (Edit(DELTA, DELTA_STORE, DELTA_STORE.replace("mask=in_rows", "mask=rows < seqlen_q - 1")),),
        subtle=True,
    ),
    Mutant(
        "delta_sign",
        "delta is added instead of subtracted in dk",
        (Edit(OF_KEYS, "- row_delta[None, :]", "+ row_delta[None, :]"),),
    ),
    Mutant("delta_left_out_of_dq", "dq does without delta", (Edit(OF_QUERIES, " - row_delta[:, None]", ""),)),
    Mutant(
        "delta_of_first_batch",
        "dq reads delta of the first batch",
        (Edit(DQ, "delta + head * seqlen_q", "delta + head_q * seqlen_q"),),
    ),
    # lse
    Mutant(
        "lse_read_in_base_2",
        "the backward pass takes lse for a logarithm to base 2",
        (Edit(DELTA, 'float("inf"), row_lse * LOG2E)', 'float("inf"), row_lse)'),),
    ),
    Mutant(
        "lse_of_first_batch",
        "dq reads lse of the first batch",
        (Edit(DQ, "lse_log2 + head * seqlen_q", "lse_log2 + head_q * seqlen_q"),),
    ),
    Mutant(
        "lse_of_first_member",
        "dk and dv read lse and delta of the wrong heads of a group",
        (Edit(DK_DV, "first_row = head * group * seqlen_q", "first_row = head * seqlen_q"),),
    ),
    Mutant(
        "backward_weights_in_base_e",
        "exp where the exponents are in base 2",
        (Edit(WEIGHTS, "tl.exp2", "tl.exp"),),
    ),
    # Masks and tails
    Mutant(
        "backward_padding_overflows",
        "padded keys score 0 and are not masked: exp(0 - lse) is inf for very negative lse, and inf * 0 nan",
        (
            Edit(WEIGHTS, CLAMPED, "tl.exp2(scores - row_lse)"),
            Edit(
                OF_QUERIES,
                "<= (last_key - start_n)[:, None]",
                "<= tl.where(start_n + keys < seqlen_k, last_key[:, None] - start_n, BLOCK_KEYS)",
            ),
        ),
        source="https://github.com/pytorch/pytorch/issues/196678",
        subtle=True,
    ),
    Mutant(
        "dk_dv_top_left",
        "dk and dv are masked top-left",
        (Edit(OF_KEYS, "first_row = keys - offset", "first_row = keys"),),
        source=f"{FLASH}/issues/282",
    ),
    Mutant(
        "dk_dv_offset_reversed",
        "the offset between rows and keys has the wrong sign",
        (Edit(OF_KEYS, "offset = seqlen_k - seqlen_q", "offset = seqlen_q - seqlen_k"),),
    ),
    Mutant(
        "dk_dv_diagonal_masked",
        "the last key of every row is masked in dk and dv",
        (Edit(OF_KEYS, "[:, None] <= rows[None, :]", "[:, None] < rows[None, :]"),),
    ),
    Mutant(
        "dk_dv_never_causal",
        "dk and dv are never masked causally",
        (Edit(OF_KEYS, "if CAUSAL:", "if CAUSAL and HEAD_DIM < 0:"),),
        source="https://github.com/meta-pytorch/MSLK/pull/263",
    ),
    Mutant(
        "dk_dv_always_causal",
        "dk and dv are masked causally, asked for or not",
        (Edit(OF_KEYS, "if CAUSAL:", "if CAUSAL or HEAD_DIM > 0:"),),
        source=f"{TRITON}/issues/4541",
    ),
    Mutant(
        "dv_unmasked", "P is not masked before dv", (Edit(OF_KEYS, "p = tl.where(seen, p, 0.0)", "p = p"),)
    ),
    Mutant(
        "dk_dv_diagonal_unmasked",
        "the query tile on the diagonal counts as whole",
        (
            Edit(
                OF_KEYS,
                "diagonal = tl.cdiv(tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0), BLOCK_ROWS)",
                "diagonal = tl.maximum(start_n + BLOCK_KEYS - 1 - offset, 0) // BLOCK_ROWS",
            ),
        ),
    ),
    Mutant(
        "dk_dv_one_pair_unmasked",
        "one row sees one key too many, where that row starts a tile",
        (Edit(OF_KEYS, "start_n + BLOCK_KEYS - 1 - offset", "start_n + BLOCK_KEYS - 2 - offset"),),
        subtle=True,
    ),
    Mutant(
        "dk_dv_first_tile_dropped",
        "the first query tile that sees a key tile in part is left out",
        (
            Edit(
                OF_KEYS,
                "first = tl.maximum(start_n - offset, 0) // BLOCK_ROWS",
                "first = tl.cdiv(tl.maximum(start_n - offset, 0), BLOCK_ROWS)",
            ),
        ),
    ),
    Mutant(
        "dk_dv_tail_dropped",
        "query rows past the last whole tile are left out of dk and dv",
        (Edit(OF_KEYS, "diagonal - first + tiles_q - tl.maximum(diagonal, full)", "diagonal - first"),),
    ),
    Mutant(
        "dk_dv_tail_unmasked",
        "the tail of the query rows counts as a whole tile",
        (Edit(OF_KEYS, "full = seqlen_q // BLOCK_ROWS", "full = tl.cdiv(seqlen_q, BLOCK_ROWS)"),),
        source=f"{FLASH}/issues/443",
    ),
    Mutant(
        "dk_dv_one_lane_dropped",
        "row 5 of every tile that an edge cuts is masked in dk and dv",
        (Edit(OF_KEYS, SEEN, f"{SEEN} & (rows != 5)[None, :]"),),
        subtle=True,
    ),
    Mutant(
        "dq_unmasked",
        "dS is not masked in dq",
        (
            Edit(
                OF_QUERIES,
                "ds = tl.where(keys[None, :] <= (last_key - start_n)[:, None], ds, 0.0)",
                "ds = ds",
            ),
        ),
    ),
    Mutant(
        "dq_one_more_key",
        "dq sees the key after a row's last",
        (
            Edit(
                OF_QUERIES,
                "keys[None, :] <= (last_key - start_n)[:, None]",
                "keys[None, :] <= (last_key - start_n)[:, None] + 1",
            ),
        ),
    ),
    Mutant(
        "dq_tail_dropped",
        "keys that an edge cuts off are left out of dq",
        (
            Edit(
                OF_QUERIES,
                "end if cut else whole",
                "whole + tl.minimum(whole, end - whole) if cut else whole",
            ),
        ),
    ),
    Mutant(
        "dq_first_tiles_twice",
        "whole tiles count twice in dq",
        (Edit(OF_QUERIES, "range(whole if cut else first,", "range(0,"),),
    ),
    # Scale
    Mutant("dk_not_scaled", "dk is not scaled", (Edit(DK_DV, "dk_tile * sm_scale", "dk_tile"),)),
    Mutant(
        "dk_scaled_twice",
        "dk is scaled twice",
        (Edit(DK_DV, "dk_tile * sm_scale", "dk_tile * sm_scale * sm_scale"),),
    ),
    Mutant(
        "dk_in_base_2",
        "dk is scaled with log2 e as well",
        (Edit(DK_DV, "dk_tile * sm_scale", "dk_tile * scale_log2"),),
    ),
    Mutant(
        "dv_scaled",
        "dv is scaled",
        (Edit(DK_DV, DV_STORE, DV_STORE.replace("dv_tile", "dv_tile * sm_scale")),),
    ),
    Mutant("dq_not_scaled", "dq is not scaled", (Edit(DQ, "dq_tile * sm_scale", "dq_tile"),)),
    Mutant(
        "dq_in_base_2",
        "dq is scaled with log2 e as well",
        (Edit(DQ, "dq_tile * sm_scale", "dq_tile * scale_log2"),),
    ),
    Mutant(
        "backward_scale_ignored",
        "the backward pass takes 1 / sqrt(head_dim) for the scale of the scores",
        (Edit(LAUNCH, "sm_scale * LOG2E.value", "head_dim**-0.5 * LOG2E.value"),),
        source="https://github.com/vllm-project/vllm/pull/32149",
    ),
    # Products and rounding
    Mutant(
        "dk_of_weights",
        "dk is made of P, not of dS",
        (Edit(OF_KEYS, "dot(ds.to(q_tile.dtype)", "dot(p.to(q_tile.dtype)"),),
    ),
    Mutant(
        "ds_without_weights",
        "dS lacks its factor P in dq",
        (Edit(OF_QUERIES, DS_OF_ROWS, DS_OF_ROWS.replace("p * ", "")),),
    ),
    Mutant(
        "dq_of_values",
        "dq is the product of dS and v",
        (Edit(OF_QUERIES, OF_DQ, OF_DQ.replace("k_tile, dq", "v_tile, dq")),),
        source="https://github.com/pytorch/pytorch/pull/133495",
    ),
    Mutant(
        "dp_rounded_in_dk",
        "dP is rounded to the input's dtype before delta is subtracted, in dk",
        (
            Edit(
                OF_KEYS,
                "dot(v_tile, tl.trans(do_tile), None, PRECISION)",
                "dot(v_tile, tl.trans(do_tile), None, PRECISION).to(q_tile.dtype).to(tl.float32)",
            ),
        ),
        subtle=True,
    ),
    Mutant(
        "dp_rounded_in_dq",
        "dP is rounded to the input's dtype before delta is subtracted, in dq",
        (
            Edit(
                OF_QUERIES,
                "dot(do_tile, tl.trans(v_tile), None, PRECISION)",
                "dot(do_tile, tl.trans(v_tile), None, PRECISION).to(q_tile.dtype).to(tl.float32)",
            ),
        ),
        subtle=True,
    ),
    Mutant(
        "ds_in_bfloat16",
        "dS is rounded to bfloat16 whatever the inputs are",
        (Edit(OF_KEYS, "ds.to(q_tile.dtype)", "ds.to(tl.bfloat16).to(q_tile.dtype)"),),
        subtle=True,
    ),
    Mutant(
        "dv_tileumulator_rounded",
        "dv is accumulated in the input's dtype",
        (Edit(OF_KEYS, OF_DV, f"{OF_DV}.to(do_tile.dtype).to(tl.float32)"),),
    ),
    Mutant(
        "dq_accumulator_rounded",
        "dq is accumulated in the input's dtype",
        (Edit(OF_QUERIES, OF_DQ, f"{OF_DQ}.to(k_tile.dtype).to(tl.float32)"),),
    ),
    Mutant(
        "one_row_of_dv_off",
        "dv of key 3 is 0.4 % too large",
        (
            Edit(
                DK_DV,
                DV_STORE,
                DV_STORE.replace("dv_tile", "dv_tile * tl.where(keys == 3, 1.004, 1.0)[:, None]"),
            ),
        ),
        subtle=True,
    ),
    Mutant(
        "backward_in_tf32",
        "float32 products of dk are tf32 though ieee was asked for",
        (Edit(OF_KEYS, OF_DK, OF_DK.replace("PRECISION", '"tf32"')),),
        source="https://github.com/evintunador/triton_docs_tutorials/issues/6",
        device="cuda",
    ),
    # Heads and strides
    Mutant(
        "first_head_of_the_group_only",
        "dk and dv sum over the first query head of a group alone",
        (Edit(OF_KEYS, "range(group * tiles_per_head)", "range(tiles_per_head)"),),
    ),
    Mutant(
        "first_head_of_the_group_repeated",
        "dk and dv sum over the first query head of a group, group times",
        (Edit(OF_KEYS, "member = index // tiles_per_head", "member = index // tiles_per_head * 0"),),
    ),
    Mutant(
        "heads_of_q_by_strides_of_dout",
        "the heads of q in a group are found by the strides of dout",
        (Edit(OF_KEYS, "q_head_step = stride_qh", "q_head_step = stride_doh"),),
    ),
    Mutant(
        "tiles_of_dout_by_strides_of_q",
        "tiles of dout but the first are found by the strides of q",
        (Edit(OF_KEYS, "do_step = stride_dom", "do_step = stride_qm"),),
    ),
    Mutant(
        "group_ignored_in_dk_dv",
        "dk and dv start at query head h instead of h * group",
        (Edit(DK_DV, "head_q = head_kv * group", "head_q = head_kv"),),
    ),
    Mutant(
        "dq_key_heads_interleaved",
        "dq of query head h reads key head h modulo heads_kv",
        (Edit(DQ, "head_kv = head_q // group", "head_kv = head_q % heads_kv"),),
    ),
    Mutant(
        "dq_by_strides_of_q",
        "dq reads rows of dout by the strides of q",
        (Edit(DQ, DO_POINTERS, DO_POINTERS.replace("stride_dom", "stride_qm")),),
        source=f"{FLASH}/issues/355",
    ),
    Mutant(
        "backward_heads_by_32_bit_offsets",
        "the offset of a head of q in its group is a 32-bit product",
        (Edit(OF_KEYS, "q_head_step = stride_qh.to(tl.int64)", "q_head_step = stride_qh.to(tl.int32)"),),
        source=f"{FLASH}/pull/2662",
    ),
    # Memory
    Mutant(
        "dk_stored_past_the_last_key",
        "rows of dk past seqlen_k are stored",
        (Edit(DK_DV, DK_STORE, DK_STORE.replace("in_keys", "keys >= 0")),),
    ),
    Mutant(
        "dv_last_column_not_written",
        "the last column of dv is never written",
        (Edit(DK_DV, DV_STORE, DV_STORE.replace("in_cols, MASK_COLS", "cols < head_dim - 1, True")),),
        subtle=True,
    ),
    Mutant(
        "dq_tile_not_written",
        "query tiles from the third on are never written to dq",
        (Edit(DQ, DQ_STORE, DQ_STORE.replace("in_rows,", "in_rows & (rows < 2 * BLOCK_OWN),")),),
        subtle=True,
    ),
    # Launch settings
    Mutant(
        "backward_block_n_of_64_assumed",
        "query tiles start as if each held 64 rows",
        (Edit(OF_KEYS, "start_m = tile * BLOCK_ROWS", "start_m = tile * 64"),),
    ),
)
