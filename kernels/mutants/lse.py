"""Planted bugs of the log-sum-exp. The backward pass takes it as it is: they show in nothing else."""

from kernels.mutants.mutant import Edit, Mutant

KERNEL = "kernels.flash_v2:_forward_kernel"
NORMALISE = "kernels.flash_v2:normalise"
VALUE = "(m_i + tl.log2(l_i)) * LN2"
STORE = "tl.store(lse + head * seqlen_q + rows, lse_rows, mask=in_rows)"


def _value(new: str) -> tuple[Edit, ...]:
    return (Edit(NORMALISE, VALUE, new),)


LSE = (
    Mutant(
        "lse_in_base_2",
        "lse is a logarithm to base 2",
        _value("m_i + tl.log2(l_i)"),
        source="https://github.com/flashinfer-ai/flashinfer/issues/4485",
    ),
    Mutant(
        "lse_off_by_ln_2",
        "lse is too large by ln 2",
        _value("(m_i + tl.log2(l_i) + 1.0) * LN2"),
        source="https://github.com/pytorch/pytorch/issues/181645",
    ),
    Mutant(
        "lse_of_mixed_bases",
        "the maximum is in nats, the sum's logarithm in base 2",
        _value("m_i * LN2 + tl.log2(l_i)"),
        source="https://github.com/flashinfer-ai/flashinfer/pull/4650",
    ),
    Mutant(
        "lse_without_maximum",
        "lse is the logarithm of the sum alone",
        _value("tl.log2(l_i) * LN2 + tl.where(m_i == NEG_INF, m_i, 0.0)"),
    ),
    Mutant("lse_without_sum", "lse is the maximum alone", _value("m_i * LN2")),
    Mutant("lse_negative", "lse has the wrong sign", _value("-(m_i + tl.log2(l_i)) * LN2")),
    Mutant(
        "lse_unscaled",
        "the maximum in lse is that of q.k, not scaled",
        (Edit(KERNEL, STORE, STORE.replace("lse_rows", "lse_rows + (m_i / scale_log2 - m_i) * LN2")),),
    ),
    Mutant(
        "lse_off_by_a_thousandth",
        "lse is too large by 0.001",
        _value("(m_i + tl.log2(l_i)) * LN2 + 0.001"),
        subtle=True,
    ),
    Mutant(
        "lse_in_bfloat16",
        "lse is rounded to bfloat16",
        _value("((m_i + tl.log2(l_i)) * LN2).to(tl.bfloat16).to(tl.float32)"),
        subtle=True,
    ),
    Mutant(
        "lse_of_rounded_sum",
        "the sum is rounded to float16 before its logarithm",
        _value("(m_i + tl.log2(l_i.to(tl.float16).to(tl.float32))) * LN2"),
        subtle=True,
    ),
    Mutant(
        "lse_clamped",
        "lse is never below -88, where exp(-lse) would overflow",
        _value("tl.where(m_i == NEG_INF, m_i, tl.maximum((m_i + tl.log2(l_i)) * LN2, -88.0))"),
        source="https://github.com/NVIDIA/cudnn-frontend/pull/628",
        subtle=True,
    ),
    Mutant(
        "lse_of_empty_rows_is_zero",
        "lse is 0 on rows that see no key",
        _value("tl.where(m_i == NEG_INF, 0.0, (m_i + tl.log2(l_i)) * LN2)"),
    ),
    Mutant(
        "lse_of_empty_rows_is_inf",
        "lse is +inf on rows that see no key",
        _value('tl.where(m_i == NEG_INF, float("inf"), (m_i + tl.log2(l_i)) * LN2)'),
    ),
    Mutant(
        "lse_rows_reversed",
        "lse is stored from the last row to the first",
        (Edit(KERNEL, "lse + head * seqlen_q + rows", "lse + head * seqlen_q + (seqlen_q - 1 - rows)"),),
    ),
    Mutant(
        "lse_lane_not_written",
        "lse of the last row of a full tile is never written",
        (
            Edit(
                KERNEL,
                STORE,
                STORE.replace("mask=in_rows", "mask=in_rows & (rows != start_m + BLOCK_OWN - 1)"),
            ),
        ),
        subtle=True,
    ),
)
