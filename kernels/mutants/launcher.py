"""Planted bugs around the kernels: what is passed to them, what is checked, what is returned."""

from kernels.mutants.mutant import Edit, Mutant

FORWARD = "kernels.flash_v2:forward"
BACKWARD = "kernels.flash_v2:backward"
RUN = "kernels.launching:launch"
ALIGNED = "kernels.launching:is_aligned"
CHECK = "check_inputs(q, k, v, causal, sm_scale)"

LAUNCHER = (
    Mutant(
        "dk_and_dv_swapped",
        "dk and dv are returned in the wrong order",
        (Edit(BACKWARD, "return dq, dk, dv", "return dq, dv, dk"),),
    ),
    Mutant(
        "delta_never_computed_past_a_block",
        "the grid of the delta kernel is rounded down: the rest is scratch memory as it was",
        (
            Edit(
                "kernels.flash_v2:row_deltas",
                "batch * heads_q * triton.cdiv(seqlen_q, block)",
                "max(1, batch * heads_q * seqlen_q // block)",
            ),
        ),
        source="https://github.com/fla-org/flash-linear-attention/pull/892",
    ),
    Mutant(
        "result_overwritten_later",
        "out is allocated once for each shape: a later call overwrites an earlier result",
        (
            Edit(
                FORWARD,
                "out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)",
                "out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)\n"
                "    out = forward.__dict__.setdefault((q.shape, q.dtype), out)",
            ),
        ),
    ),
    Mutant(
        "lengths_unchecked",
        "k and v of different lengths, heads or dtypes are taken",
        (Edit(FORWARD, CHECK, "pass"),),
    ),
    Mutant(
        "head_dims_refused",
        "a head_dim that is claimed is refused",
        (
            Edit(
                FORWARD,
                CHECK,
                f"{CHECK}\n"
                "    if q.shape[-1] % 16:\n"
                '        raise NotImplementedError("head_dim: expected a multiple of 16")',
            ),
        ),
    ),
    Mutant(
        "empty_sequences_raise",
        "a sequence of length 0 raises",
        (Edit(FORWARD, CHECK, f"{CHECK}\n    q.amax(), k.amax()"),),
        source="https://github.com/Dao-AILab/flash-attention/issues/2562",
        raises=True,
    ),
    Mutant(
        "alignment_assumed",
        "wide loads whatever the strides and offsets are",
        (Edit(ALIGNED, "return all(", "return True or all("),),
        source="https://github.com/pytorch/pytorch/issues/191937",
        device="cuda",
    ),
    Mutant(
        "products_fused",
        "scores are not rounded before the maximum is subtracted, though the maximum was",
        (Edit(RUN, "enable_fp_fusion=False", "enable_fp_fusion=True"),),
        device="cuda",
    ),
)
