"""Planted bugs of ring attention: which shards meet which rows, how they are merged, what travels."""

from functools import partial

from kernels.mutants.mutant import Edit, Mutant

RANK = "kernels.ring:Rank"
mutant = partial(Mutant, kernel="ring")

RING = (
    mutant(
        "ring_offset_of_rows",
        "the causal corner leaves out that lengths differ",
        (Edit(f"{RANK}", "sum(queries[:number]) + sum(keys) - sum(queries)", "sum(queries[:number])"),),
    ),
    mutant(
        "ring_local_diagonal",
        "every shard is masked as if it were the first",
        (Edit(f"{RANK}", "offset = self.offsets[shard]", "offset = self.offsets[0]"),),
    ),
    mutant(
        "ring_seen_by_all_one_late",
        "the first row that sees all of a shard misses its last key",
        (
            Edit(
                f"{RANK}",
                "for i in (-offset, seqlen_k - offset)",
                "for i in (-offset, seqlen_k - offset + 1)",
            ),
        ),
    ),
    mutant(
        "ring_first_row_skipped",
        "the first row that sees any of a shard doesn't",
        (
            Edit(
                f"{RANK}", "for i in (-offset, seqlen_k - offset)", "for i in (1 - offset, seqlen_k - offset)"
            ),
        ),
        subtle=True,
    ),
    mutant(
        "ring_merged_without_rescaling",
        "what was gathered is not brought to the new maximum",
        (Edit(f"{RANK}", "alpha, weight = (m - shift).exp()", "alpha, weight = (m - m).exp()"),),
    ),
    mutant(
        "ring_sum_not_rescaled",
        "the sum of weights is not brought to the new maximum",
        (Edit(f"{RANK}", "l.mul_(alpha).add_(weight)", "l.add_(weight)"),),
    ),
    mutant(
        "ring_lse_of_the_last_maximum",
        "lse is the largest of the shards'",
        (Edit(f"{RANK}", "(self.m + self.l.log())", "(self.m + 0 * self.l)"),),
    ),
    mutant(
        "ring_last_shard_counts_twice",
        "the ring turns once too often",
        (Edit("kernels.ring:_rounds", "for step in range(n):", "for step in (*range(n), 0):"),),
    ),
    mutant(
        "ring_dk_dv_left_behind",
        "dk and dv of a shard are those of the last rank that it met",
        (
            Edit(
                "kernels.ring:backward",
                "part if shard not in dk_dv else dk_dv[shard] + part",
                "part",
            ),
        ),
    ),
    mutant(
        "ring_dq_of_the_last_shard",
        "dq is not summed over shards",
        (Edit(f"{RANK}", "self.dq[:, :, rows] += dq", "self.dq[:, :, rows] = dq"),),
    ),
)
