"""A panel of sound attention functions, written as other people write them, against which every bound is tested.

Functions that keep full precision must raise no alarm under the default claims. Each of the others must raise none
under the claims that its docstring ends with.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A sound plain function.

    Attributes:
        spec: where it is, as ``--kernel`` takes it.
        claims: what it computes less precisely than FlashAttention-2 does, as ``--claims`` takes it.
        is_triton: whether it launches Triton kernels, which the CPU interprets.
    """

    spec: str
    claims: tuple[str, ...] = ()
    is_triton: bool = False

    @property
    def name(self) -> str:
        """The name of the module and the function."""
        return self.spec.removeprefix("tests.panel.").replace(":", ".")


def _of(module: str, *functions: str, claims: tuple[str, ...] = (), is_triton: bool = False) -> list[Member]:
    return [Member(f"tests.panel.{module}:{function}", claims, is_triton) for function in functions]


FULL_PRECISION = (
    *_of("flash", "v1", "v2", "v2_tiles_of_128", "v2_without_lse", "v2_scaled_ds", "v2_delta_from_p"),
    *_of("flash", "v2_stores_each_head", "cutlass", "keys_from_last_to_first", "base_2"),
    *_of("flash", "integer_maximum", "v4_lazy_rescaling", "two_passes", "flex"),
    *_of("eager", "float32", "repeated_heads", "scaled_in_product", "normalised_weights"),
    *_of("eager", "saved_cast_weights", "recomputed_from_rows", "chunks_by_autograd"),
    *_of("nonfinite", "added_mask", "added_smallest_number", "multiplied_by_mask"),
    *_of("parts", "split_4", "split_8", "ring"),
    *_of("narrow", "tf32x3"),
    *_of("triton_tutorial", "attention", is_triton=True),
    *_of("triton_split", "attention", is_triton=True),
    *_of("triton_rows", "attention", is_triton=True),
    *_of("triton_v2", "attention", is_triton=True),
)

LESS_PRECISION = (
    *_of("narrow", "k_prescaled", claims=("k_prescaled=true",)),
    *_of("narrow", "k_prescaled_in_float16", claims=("float16:k_prescaled=true",)),
    *_of("narrow", "q_prescaled", "multihead_attention", claims=("q_prescaled=true",)),
    *_of("narrow", "qk_prescaled", claims=("qk_prescaled=true",)),
    *_of("narrow", "head_by_head", claims=("rounded_group_sums=true",)),
    *_of("flash", "integer_maximum_of_cast_weights", claims=("rounded_largest_weight=true",)),
    *_of("narrow", "l_from_rounded_p", claims=("l_from_rounded_p=true",)),
    *_of("narrow", "model_file", "rounded_scores", "rounded_dp", claims=("rounded_scores=true",)),
    *_of("narrow", "polynomial_exp", claims=("exp_error=1e-4",)),
    *_of("narrow", "tf32", "tf32_of_converted", "tf32_of_weights", claims=("precision=tf32",)),
    *_of("parts", "split_4_in_16_bits", "cascade", "ring_of_stored_parts", claims=("rounded_partials=true",)),
    *_of(
        "parts",
        "ring_of_stored_parts_by_difference",
        claims=("rounded_partials=true", "merged_by_difference=true"),
    ),
    *_of("parts", "ring_by_difference", "differentiated_ring", claims=("merged_by_difference=true",)),
)

PANEL = FULL_PRECISION + LESS_PRECISION
