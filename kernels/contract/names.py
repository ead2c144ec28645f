"""The names that cases and claims share, of dtypes, layouts, kinds of calls and outputs."""

DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = ("contiguous", "bnhd", "packed", "gap", "offset", "expanded", "expanded_rows", "huge")
BIASES = ("full", "of_heads", "of_batch", "shared", "of_keys")
FP8_INPUTS = ("qk", "qkv")
"""The sets of tensors that may be 8-bit numbers in one call: q and k, or q, k and v."""
FP8_SCALES = {"head": ("cache", "paged"), "page": ("paged",)}
"""What has a scale of its own in a cache of 8-bit numbers, and in which kinds of the claim ``ragged``."""
ROTARY = ("halves", "interleaved")
"""The ways in which columns are paired that are rotated by positions."""
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
OUTPUTS = ("out", "lse", *GRADIENTS)
OF_SINKS = ("sinks_too", "sinks_alone")
"""The ways of calling (``strategies.ways``) in which sinks require grad."""
THROUGH_LSE = "through_lse"
"""The way of calling in which gradients flow through lse."""
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126}
"""By dtype, the smallest number of full precision: some hardware and some casts take smaller ones for 0."""

RAGGED_KEYWORDS = {
    "cache": ("cache_seqlens",),
    "packed": ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "paged": ("cache_seqlens", "block_table"),
    "append": ("cache_seqlens", "k_new", "v_new"),
    "packed_paged": ("cu_seqlens_q", "max_seqlen_q", "cache_seqlens", "block_table"),
    "document": ("document_ids",),
}
"""The keywords for sequences of different lengths, by the kinds that the claim ``ragged`` has."""
WITH_GRADIENTS = ("packed", "document")
"""The kinds of the claim ``ragged`` of which gradients are asked for."""
WITH_KEY_PADDING = ("cache", "packed", "document")
"""The kinds of the claim ``ragged`` in which keys may be padded."""
WITH_PAGES = ("paged", "append", "packed_paged")
"""The kinds of the claim ``ragged`` in which keys may lie in pages."""
WITH_PACKED_QUERIES = ("packed", "packed_paged")
"""The kinds of the claim ``ragged`` in which the queries of all sequences lie end to end."""
POOLS = ("apart", "interleaved", "padded")
"""How pools of pages lie in memory: see the claim ``pools``."""


def default_scale(head_dim: int) -> float:
    """Return 1 / sqrt(head_dim) as FlashAttention and most models compute it, which rounds once."""
    return float(head_dim**-0.5)
