"""Planted bugs of flash-decoding: the split of the keys, the packed heads, the merge, the cache's lengths."""

from kernels.mutants.mutant import Edit, Mutant

KERNEL = "kernels.decode:_split_kernel"
MERGE = "kernels.decode:_merge_kernel"

LENGTH = "seqlen_k = tl.minimum(tl.maximum(tl.load(cache_seqlens + batch), 0), seqlen_k)"
FIRST = "first = split * tiles_k // splits"
END = "end = tl.minimum((split + 1) * tiles_k // splits, tiles_seen)"

DECODE = (
    Mutant(
        "splits_overlap",
        "a tile on the border of two splits counts in both",
        (Edit(KERNEL, END, "end = tl.minimum(tl.cdiv((split + 1) * tiles_k, splits), tiles_seen)"),),
        kernel="decode",
    ),
    Mutant(
        "splits_leave_a_remainder",
        "all splits have as many tiles, and what remains is left out",
        (
            Edit(KERNEL, FIRST, "first = split * (tiles_k // splits)"),
            Edit(KERNEL, END, "end = tl.minimum((split + 1) * (tiles_k // splits), tiles_seen)"),
        ),
        kernel="decode",
    ),
    Mutant(
        "split_unseen_before_the_corner",
        "a split starts with the tiles that it sees as a whole, even those of the split before",
        (Edit(KERNEL, "tl.minimum(tl.maximum(whole, first), end)", "tl.minimum(whole, end)"),),
        kernel="decode",
    ),
    Mutant(
        "empty_split_not_written",
        "lse of a split that sees no key stays scratch memory as it was",
        (Edit(KERNEL, "lse_rows, mask=in_rows", "lse_rows, mask=in_rows & (l_i > 0.0)"),),
        kernel="decode",
    ),
    Mutant(
        "splits_of_another_batch",
        "partial results of different batch elements share their place",
        (Edit(KERNEL, "(split * batches + batch)", "(split + batch)"),),
        kernel="decode",
    ),
    Mutant(
        "members_one_after_another",
        "the tile holds all queries of a member, then the next member's, but is masked as if it did not",
        (
            Edit(KERNEL, "queries = rows // group", "queries = rows % seqlen_q"),
            Edit(
                KERNEL,
                "heads_q = head_kv * group + rows % group",
                "heads_q = head_kv * group + rows // seqlen_q",
            ),
        ),
        kernel="decode",
    ),
    Mutant(
        "group_not_packed_whole",
        "rows of the tile are counted without the group: its last members are never computed",
        (Edit(KERNEL, "in_rows = rows < seqlen_q * group", "in_rows = rows < seqlen_q"),),
        kernel="decode",
    ),
    Mutant(
        "merged_in_base_e",
        "splits are weighted by exp2 of a natural logarithm",
        (Edit(MERGE, "other=NEG_INF) * LOG2E", "other=NEG_INF)"),),
        kernel="decode",
    ),
    Mutant(
        "merge_not_rescaled",
        "what is merged so far is not brought to the new maximum",
        (Edit(MERGE, "acc = acc * alpha[:, None] +", "acc = acc +"),),
        kernel="decode",
    ),
    Mutant(
        "last_split_not_merged",
        "the last split is left out where there are more than two",
        (Edit(MERGE, "range(splits)", "range(tl.minimum(splits, tl.maximum(splits - 1, 2)))"),),
        kernel="decode",
        subtle=True,
    ),
    Mutant(
        "cache_of_the_first",
        "every sequence has as many keys as the first",
        (Edit(KERNEL, LENGTH, LENGTH.replace("cache_seqlens + batch", "cache_seqlens")),),
        kernel="decode",
    ),
    Mutant(
        "cache_seen_whole",
        "keys behind the end of a sequence in its cache are seen",
        (Edit(KERNEL, LENGTH, "seqlen_k = seqlen_k"),),
        kernel="decode",
    ),
    Mutant(
        "cache_one_key_more",
        "the key behind the last of a sequence is seen, where its cache has one",
        (Edit(KERNEL, LENGTH, LENGTH.replace("batch), 0)", "batch) + 1, 0)")),),
        kernel="decode",
        subtle=True,
    ),
)
