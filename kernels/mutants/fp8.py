"""Planted bugs of the fp8 kernel: scales, rotation, casts."""

from kernels.mutants.mutant import Edit, Mutant

QUANTISE = "kernels.fp8:quantise"
ROTATED = "kernels.fp8:rotated"
KERNEL = "kernels.fp8:_forward_kernel"
LAUNCH = "kernels.fp8:forward"

OF_K = "k8, k_scale = quantise(k, block_n, scaling, dtype, rotate=rotate)"
SCALED = "values = values / scale.repeat_interleave(block, 2)[..., None]"
OF_TILE = "head_kv * scales_n + tile * BLOCK_N // SCALE_N"


def _mutant(name: str, what: str, *edits: Edit, subtle: bool = False) -> Mutant:
    return Mutant(name, what, edits, kernel="fp8", subtle=subtle)


FP8 = (
    # Scales
    _mutant(
        "fp8_scale_of_first_block",
        "every tile of k has the scale of the first",
        Edit(KERNEL, f"k_scale + {OF_TILE}", "k_scale + head_kv * scales_n"),
    ),
    _mutant(
        "fp8_scale_of_tile",
        "where several tiles share a scale, tile i has that of block i",
        Edit(KERNEL, f"v_scale + {OF_TILE}", "v_scale + head_kv * scales_n + tile % scales_n"),
    ),
    _mutant(
        "fp8_scale_of_first_rows",
        "every tile of q has the scale of the first",
        Edit(KERNEL, "head * scales_m + start_m // SCALE_M", "head * scales_m"),
    ),
    _mutant(
        "fp8_scale_of_another_head",
        "two key heads share the scales of the first",
        Edit(KERNEL, f"k_scale + {OF_TILE}", f"k_scale + {OF_TILE.replace('head_kv', '(head_kv // 2)')}"),
    ),
    _mutant(
        "fp8_scale_of_k_for_v",
        "v is scaled back by the scale of k",
        Edit(KERNEL, f"tl.load(v_scale + {OF_TILE})", "k_unit"),
    ),
    _mutant(
        "fp8_scale_on_the_whole_sum",
        "the scale of a block of v is applied to the sum over all blocks before it, too",
        Edit(
            KERNEL,
            "acc = acc * alpha[:, None] + fp8_product(p8, tl.trans(v_tile)) * v_unit",
            "acc = (acc * alpha[:, None] + fp8_product(p8, tl.trans(v_tile))) * v_unit",
        ),
    ),
    _mutant(
        "fp8_top_overflows",
        "the largest entry is scaled past what e4m3 holds: it becomes nan",
        Edit(QUANTISE, "- TOP_EXPONENT)", "- TOP_EXPONENT - 1)"),
    ),
    _mutant(
        "fp8_top_saturates",
        "the largest entries of a block are cut off at 3/4 of the largest",
        Edit(
            QUANTISE,
            SCALED,
            f"{SCALED}.clamp(-96.0, 96.0)".replace("values / scale", "(values / scale").replace(
                "None]", "None])"
            ),
        ),
    ),
    _mutant(
        "fp8_empty_block_divides_by_zero",
        "a block of zeros has the scale 0",
        Edit(
            QUANTISE,
            "scale = (exponent + 127 << 23).view(torch.float32)",
            "scale = (exponent + 127 << 23).view(torch.float32).masked_fill(largest == 0, 0.0)",
        ),
    ),
    _mutant(
        "fp8_nan_reaches_the_scale",
        "an entry that is not finite takes part in its block's scale",
        Edit(QUANTISE, "torch.where(finite, x, 0.0).float()", "x.float()"),
    ),
    _mutant(
        "fp8_infinity_counts_as_zero",
        "an entry that is not finite becomes 0",
        Edit(QUANTISE, ".masked_fill(lost, torch.nan)", ""),
    ),
    # Incoherent processing
    _mutant(
        "fp8_k_not_rotated",
        "q is rotated and k is not",
        Edit(LAUNCH, OF_K, OF_K.replace("rotate=rotate", "rotate=False")),
    ),
    _mutant(
        "fp8_signs_differ",
        "k is rotated with all signs the other way from column 1 on",
        Edit(
            LAUNCH,
            OF_K,
            OF_K.replace(
                "quantise(k,", "quantise(torch.cat((k[..., :1], -k[..., 1:]), -1) if rotate else k,"
            ),
        ),
    ),
    _mutant(
        "fp8_signs_forgotten",
        "the rotation has no random signs: a row of equal entries falls on one column",
        Edit(ROTATED, "1 - 2 * (SIGNS >> j & 1) for j", "1 for j"),
        subtle=True,
    ),
    _mutant(
        "fp8_rotation_not_undone",
        "scores lack the number of columns that the rotation takes from them",
        Edit(LAUNCH, "unit = sm_scale * padded if rotate else sm_scale", "unit = sm_scale"),
    ),
    _mutant(
        "fp8_v_rotated",
        "v is rotated as well",
        Edit(
            LAUNCH,
            "quantise(v, block_n, scaling, dtype, rotate=False)",
            "quantise(v, block_n, scaling, dtype, rotate=rotate)",
        ),
    ),
    # P
    _mutant(
        "fp8_p_scale_not_undone",
        "P is scaled before its cast and out is not scaled back",
        Edit(KERNEL, ") / P_SCALE", ")"),
    ),
    _mutant(
        "fp8_p_not_scaled",
        "P is cast as it is: weights below 2^-6 lose their bits",
        Edit(KERNEL, ") / P_SCALE", ")"),
        Edit(KERNEL, "(p * P_SCALE).to(FORMAT)", "p.to(FORMAT)"),
        subtle=True,
    ),
    _mutant(
        "fp8_p_in_e5m2",
        "P is cast to e5m2 whatever the format",
        Edit(KERNEL, "(p * P_SCALE).to(FORMAT)", "(p * P_SCALE).to(tl.float8e5)"),
        subtle=True,
    ),
    _mutant(
        "fp8_accumulator_in_half",
        "the sum over tiles is kept in float16",
        Edit(KERNEL, "* v_unit\n", "* v_unit\n            acc = acc.to(tl.float16).to(tl.float32)\n"),
        subtle=True,
    ),
)
