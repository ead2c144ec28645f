"""Bugs planted in ``tests.panel.eight_bit_inputs``: ``tests.panel.planted_eight_bit_inputs:NAME`` is one of them."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

INPUTS = "tests.panel.eight_bit_inputs"
IN_16_BITS, DEQUANTISED, TILED = (f"{INPUTS}:{name}" for name in ("in_16_bits", "dequantised", "tiled"))

PLANTED = (
    Planted(
        "fp8_inputs__keys_not_scaled",
        "keys are not multiplied by their scales (FlashInfer, issue 1023)",
        Edit(DEQUANTISED, "in_16_bits(k, k_scale)", "k.to(torch.bfloat16)"),
        function="dequantised",
    ),
    Planted(
        "fp8_inputs__scale_of_head_0",
        "the scales of the first head are those of all",
        Edit(IN_16_BITS, "scale.repeat_interleave(", "scale[:, :1].expand_as(scale).repeat_interleave("),
        function="dequantised",
    ),
    Planted(
        "fp8_inputs__scale_of_batch_0",
        "the scales of the first batch element are those of all",
        Edit(IN_16_BITS, "scale.repeat_interleave(", "scale[:1].expand_as(scale).repeat_interleave("),
        function="dequantised",
    ),
    Planted(
        "fp8_inputs__square_of_the_scale",
        "queries are scaled twice",
        Edit(DEQUANTISED, "in_16_bits(q, q_scale)", "in_16_bits(q, q_scale * q_scale)"),
        function="dequantised",
    ),
    Planted(
        "fp8_inputs__values_by_scales_of_keys",
        "values are multiplied by the scales of keys",
        Edit(DEQUANTISED, "v = in_16_bits(v, v_scale)", "v = in_16_bits(v, k_scale)"),
        function="dequantised",
    ),
    Planted(
        "fp8_inputs__scale_of_keys_for_queries",
        "the scales of keys stand for those of queries",
        Edit(TILED, "q_scale * k_scale", "k_scale * k_scale"),
        function="tiled",
    ),
    Planted(
        "fp8_inputs__scale_by_query_head",
        "scales are taken by the number of the query head, not of the key head that it reads",
        Edit(
            TILED,
            "for_each_query_head(q_scale * k_scale, q)",
            "(q_scale * k_scale)[:, torch.arange(q.shape[1]) % k.shape[1]]",
        ),
        function="tiled",
    ),
    Planted(
        "fp8_inputs__values_not_scaled",
        "out is not multiplied by the scales of values",
        Edit(TILED, "* of_weights) * of_out", "* of_weights)"),
        function="tiled",
    ),
    Planted(
        "fp8_inputs__values_scaled_in_each_tile",
        "what is summed so far is multiplied by the scales of values at each tile",
        Edit(TILED, "acc = acc * alpha +", "acc = acc * alpha * of_out +"),
        function="tiled",
    ),
    Planted(
        "fp8_inputs__lse_without_scales",
        "lse is divided by the scales of scores",
        Edit(TILED, "(m + l.log2())[..., 0]", "((m + l.log2()) / of_scores)[..., 0]"),
        function="tiled",
    ),
    Planted(
        "fp8_inputs__weights_in_8_bits",
        "P is cast to 8 bits where v has 16",
        Edit(TILED, ".to(v.dtype).float()", ".to(q.dtype).float()"),
        function="tiled",
    ),
    Planted(
        "fp8_inputs__out_in_8_bits",
        "out is rounded to 8 bits before it is stored in 16",
        Edit(TILED, "out.to(torch.bfloat16)", "out.to(q.dtype).to(torch.bfloat16)"),
        function="tiled",
    ),
    Planted(
        "fp8_inputs__capped_before_scaled",
        "scores are soft-capped before they are multiplied by their scales",
        Edit(
            TILED,
            "(of_scores * sm_scale), softcap)",
            "sm_scale, softcap) * of_scores",
        ),
        function="tiled",
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
