"""Planted bugs of packed sequences: where they begin and end, whose keys they see, what is left of them."""

from kernels.mutants.mutant import Edit, Mutant

SEQUENCE = "kernels.varlen:sequence"
FORWARD = "kernels.varlen:_forward_kernel"
DK_DV = "kernels.varlen:_dk_dv_kernel"
DQ = "kernels.varlen:_dq_kernel"

FLASH = "https://github.com/Dao-AILab/flash-attention"

VARLEN = (
    Mutant(
        "keys_begin_where_queries_do",
        "the keys of a sequence begin at the place of its queries",
        (
            Edit(
                FORWARD,
                "sequence(cu_seqlens_k, head // heads_q, total_k)",
                "sequence(cu_seqlens_k, head // heads_q, total_k)\n    first_k = tl.minimum(first_q, total_k)",
            ),
        ),
        kernel="varlen",
    ),
    Mutant(
        "sees_the_next_sequence",
        "a sequence sees all keys up to the end of the tensor",
        (
            Edit(
                FORWARD,
                "sequence(cu_seqlens_k, head // heads_q, total_k)",
                "sequence(cu_seqlens_k, head // heads_q, total_k)\n    seqlen_k = total_k - first_k.to(tl.int32)",
            ),
        ),
        kernel="varlen",
    ),
    Mutant(
        "corner_of_the_longest",
        "the causal mask is that of a sequence as long as the longest",
        (
            Edit(
                FORWARD,
                "key_range(start_m, rows, seqlen_q, seqlen_k,",
                "key_range(start_m, rows, max_seqlen_q, seqlen_k,",
            ),
        ),
        kernel="varlen",
    ),
    Mutant(
        "rows_past_the_end_stored",
        "the last tile of a sequence is stored as a whole, over the first rows of the next",
        (Edit(FORWARD, "in_rows = rows < seqlen_q", "in_rows = first_q + rows < total_q"),),
        kernel="varlen",
        source=f"{FLASH}/pull/2337",
        device="cuda",  # interpreted, the next sequence's program comes later and writes over it
    ),
    Mutant(
        "lse_of_equal_lengths",
        "lse of a sequence lies where it would if all were as long as the longest",
        (
            Edit(
                FORWARD,
                "tl.store(lse + head_q * total_q + first_q + rows",
                "first_q = tl.minimum(head // heads_q * max_seqlen_q, total_q - seqlen_q)\n"
                "    tl.store(lse + head_q * total_q + first_q + rows",
            ),
        ),
        kernel="varlen",
    ),
    Mutant(
        "empty_sequence_counts_one_key",
        "a sequence without keys sees the first of the next",
        (
            Edit(
                FORWARD,
                "sequence(cu_seqlens_k, head // heads_q, total_k)",
                "sequence(cu_seqlens_k, head // heads_q, total_k)\n"
                "    seqlen_k = tl.minimum(tl.maximum(seqlen_k, 1), total_k - first_k.to(tl.int32))",
            ),
        ),
        kernel="varlen",
        subtle=True,
    ),
    Mutant(
        "unseen_keys_keep_scratch",
        "dk and dv of a sequence without queries are never written",
        (Edit(DK_DV, "if start_n >= seqlen_k:", "if (start_n >= seqlen_k) | (seqlen_q == 0):"),),
        kernel="varlen",
    ),
    Mutant(
        "delta_of_another_sequence",
        "delta is read where the first sequence's rows are",
        (Edit(DK_DV, "delta + head_q * total_q + first_q", "delta + head_q * total_q"),),
        kernel="varlen",
    ),
    Mutant(
        "dq_by_lengths_of_keys",
        "rows of dq past the number of keys of their sequence are never written",
        (Edit(DQ, "in_rows = rows < seqlen_q", "in_rows = rows < tl.minimum(seqlen_q, seqlen_k)"),),
        kernel="varlen",
    ),
    Mutant(
        "group_of_the_first_head",
        "dk and dv take the query heads from the number of the key head on",
        (Edit(DK_DV, "head_q = head_kv * group", "head_q = head_kv"),),
        kernel="varlen",
    ),
    Mutant(
        "grid_by_lengths_of_queries",
        "as many programs compute dk and dv as the queries would need",
        (
            Edit(
                "kernels.varlen:packed_backward",
                "heads_kv * triton.cdiv(max_seqlen_k,",
                "heads_kv * triton.cdiv(max_seqlen_q,",
            ),
            Edit("kernels.varlen:packed_backward", "*(*counts, max_seqlen_k,", "*(*counts, max_seqlen_q,"),
        ),
        kernel="varlen",
    ),
    Mutant(
        "copy_keeps_the_order_of_heads",
        "a batch that has to be copied is packed head by head",
        (
            Edit(
                "kernels.varlen:_packed",
                "x.transpose(1, 2).flatten(0, 1)",
                "x.reshape(x.shape[0] * x.shape[2], x.shape[1], x.shape[3])",
            ),
        ),
        kernel="varlen",
    ),
)
