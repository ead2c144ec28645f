"""What fails in PyTorch's kernels, by release and device. This suite found each, and does not draw its cases again.

The stored case of an entry, where it has one, was seen to fail there. ``where`` is as wide as fields of a case can
say it: it may cover cases that hold.
"""

from collections.abc import Iterable
from typing import Any

from kernels.contract import ANY_LAW, KnownFailure

_ON_CPU: dict[str, Any] = {"device": "cpu", "torch": ("2.13",)}
_ON_H200: dict[str, Any] = {"device": "cuda", "torch": ("2.11",)}

_FORWARD = ("forward", ANY_LAW)
_BACKWARD = ("backward", ANY_LAW)
_OF_GRADIENTS: dict[str, Any] = {"laws": _BACKWARD, "kept": ("forward", "exact")}
_LAWS_BY_INPUT: dict[str, dict[str, Any]] = {
    **{tensor: {"laws": _FORWARD} for tensor in "qkv"},
    "dout": _OF_GRADIENTS,
}
_NOT_POSITIVE = (0.0, -0.125, -1.0)
_UNALIGNED = ("gap", "offset")
_GROUPED = tuple(range(2, 9))
_LONGEST = 1024
"""The longest sequence that an entry speaks of: more than is drawn."""
_MULTIPLES_OF_8 = tuple(range(8, 257, 8))

_SMALL: dict[str, Any] = {"dtype": "float16", "head_dim": 64, "seqlen_q": 3, "seqlen_k": 3}
_ZEROS: dict[str, Any] = {
    "dtype": "float16",
    **dict.fromkeys(("q_values", "k_values", "v_values", "dout_values"), "zeros"),
}


def ending_in(tile: int, rows: Iterable[int]) -> tuple[int, ...]:
    """Return the lengths that leave one of these numbers of rows for a last tile, which is not full."""
    return tuple(length for length in range(1, _LONGEST + 1) if length % tile in rows)


def _in_last_of_two_keys(value: str) -> dict[str, Any]:
    return {"seqlen_k": 2, "spikes": ({"tensor": "k", "index": (0, 0, 1, 0), "value": value},)}


MATH = (
    KnownFailure(
        what="without keys, out and dq are uninitialised memory",
        laws=_FORWARD,
        case=None,
        where={"seqlen_k": (0,)},
        **_ON_CPU,
    ),
    *(
        KnownFailure(
            what=f"{tensor} with a row stride past 2^31: gemm's lda must be less than 2147483647",
            case={**_SMALL, "dtype": "float32", "seqlen_q": 2, "seqlen_k": 2, f"{tensor}_layout": "huge"},
            where={"dtype": ("float32",), f"{tensor}_layout": ("huge",)},
            **_LAWS_BY_INPUT[tensor],
            **_ON_H200,
        )
        for tensor in ("v", "dout")
    ),
)

FLASH_PADDING = KnownFailure(
    what="head_dim 1 after an elementwise operation on a transposed q: an exception, as q is padded in channels-last"
    " order, so that its last dimension is not contiguous",
    laws=("memory", "invariance"),
    case={**_ZEROS, "group": 2, "seqlen_q": 2, "head_dim": 1, "q_layout": "bnhd"},
    where={"head_dim": (1,), "q_layout": ("bnhd",)},
    **_ON_H200,
)
"""PyTorch pads a head_dim before it calls the flash kernel. Who calls that kernel otherwise does not meet this bug."""

FLASH = (
    *(
        KnownFailure(
            what="NaN in q or k gives out 0",
            issue="https://github.com/pytorch/pytorch/issues/141128",
            laws=("special",),
            case={**_ZEROS, **_in_last_of_two_keys("nan"), "seqlen_k": keys},
            **seen,
        )
        for keys, seen in ((1, _ON_CPU), (2, _ON_H200))
    ),
    KnownFailure(
        what="under a causal mask a scale that is not positive gives NaN: -inf is scaled",
        laws=_FORWARD,
        case={**_ZEROS, "seqlen_q": 2, "seqlen_k": 2, "causal": True, "sm_scale": 0.0},
        where={"causal": (True,), "sm_scale": _NOT_POSITIVE},
        **_ON_CPU,
    ),
    KnownFailure(
        what="under a mask or past a ragged end a scale that is not positive gives NaN: -inf is scaled",
        laws=_FORWARD,
        case={**_SMALL, "sm_scale": 0.0},
        where={"sm_scale": _NOT_POSITIVE},
        **_ON_H200,
    ),
    *(
        KnownFailure(
            what=f"{tensor} that is not aligned to 16 bytes: misaligned address, the CUDA context is lost",
            case={**_SMALL, f"{tensor}_layout": "offset"},
            # Other head_dims are padded, and thereby copied, before the kernel runs.
            where={"head_dim": _MULTIPLES_OF_8, f"{tensor}_layout": _UNALIGNED},
            **laws,
            **_ON_H200,
        )
        for tensor, laws in _LAWS_BY_INPUT.items()
    ),
    FLASH_PADDING,
    KnownFailure(
        what="v of another length than k is accepted",
        issue="https://github.com/pytorch/pytorch/pull/193728",
        laws=("rejection",),
        case=_ZEROS,
        **_ON_CPU,
    ),
)

EFFICIENT_INFINITY = KnownFailure(
    what="float32: a key whose score is -inf makes its rows NaN",
    laws=("special",),
    case={**_SMALL, **_in_last_of_two_keys("inf"), "dtype": "float32", "seqlen_q": 2},
    where={"dtype": ("float32",)},
    **_ON_H200,
)

EFFICIENT = (
    *(
        KnownFailure(
            what=f"{tensor} with element offsets past 2^31, each stride below it: illegal memory access",
            laws=_BACKWARD,
            case={**_SMALL, "seqlen_q": 1, "seqlen_k": 1, "heads_kv": 3, f"{tensor}_layout": "huge"},
            where={f"{tensor}_layout": ("huge",)},
            **_ON_H200,
        )
        for tensor in "qkv"
    ),
    EFFICIENT_INFINITY,
    *(
        KnownFailure(
            what="one query, or the one of the last tile, whose k and v are one head expanded, takes heads for its rows"
            f" (kernel_forward.h): {mistake}",
            issue="https://github.com/pytorch/pytorch/issues/191937",
            laws=_FORWARD,
            kept=("backward",),
            case={**_ZEROS, "k_layout": "expanded", "v_layout": "expanded", **case},
            where={
                "seqlen_q": ending_in(32, (1,)),
                "k_layout": ("expanded", "expanded_rows"),
                "v_layout": ("expanded", "expanded_rows"),
                **where,
            },
            **_ON_H200,
        )
        for mistake, case, where in (
            (
                "the causal mask is dropped, which is right for the other corner alone",
                {
                    "dtype": "float32",
                    "head_dim": 8,
                    "seqlen_k": 2,
                    "causal": True,
                    "spikes": ({"tensor": "v", "index": (0, 0, 1, 7), "value": 1.0},),
                },
                {"causal": (True,)},
            ),
            (
                "a bias, or another mask, is read beside its row, by the stride of heads",
                {
                    "head_dim": 184,
                    "seqlen_q": 33,
                    "seqlen_k": 4,
                    "bias": "full",
                    "spikes": ({"tensor": "v", "index": (0, 0, 3, 123), "value": 1.0},),
                },
                {},
            ),
        )
    ),
)

CUDNN_SCALE = KnownFailure(
    what="a scale that is not positive gives NaN",
    laws=_FORWARD,
    case={**_SMALL, "sm_scale": 0.0},
    where={"sm_scale": _NOT_POSITIVE},
    **_ON_H200,
)

CUDNN_LAST_KEYS = KnownFailure(
    what="dq is NaN in rows whose logits lie far below 0, where 64 keys are left for a last tile of 128: what fills"
    " the tile counts with a score of 0",
    issue="https://github.com/pytorch/pytorch/issues/196678",
    case={
        "dtype": "float16",
        "head_dim": 64,
        "seqlen_q": 4,
        "seqlen_k": 64,
        **dict.fromkeys(("q_values", "v_values", "dout_values"), "ones"),
        "k_values": "negative",
    },
    where={
        "seqlen_k": ending_in(128, (64,)),
        "k_values": ("ones", "positive", "negative", "near_ties", "duplicates", "constant", "zeros"),
    },
    **_OF_GRADIENTS,
    **_ON_H200,
)

CUDNN = (
    CUDNN_SCALE,
    *(
        KnownFailure(
            what=f"{tensor} that is not aligned to 16 bytes gives NaN",
            laws=_FORWARD,
            case={**_SMALL, f"{tensor}_layout": "offset"},
            where={f"{tensor}_layout": _UNALIGNED},
            **_ON_H200,
        )
        for tensor in "qkv"
    ),
    KnownFailure(
        what="dout that is not aligned to 16 bytes: the launch fails, or the CUDA context is lost",
        case={**_SMALL, "dout_layout": "offset"},
        where={"dout_layout": _UNALIGNED},
        **_OF_GRADIENTS,
        **_ON_H200,
    ),
    *(
        KnownFailure(
            what=f"{tensor} with a stride of 2^31 elements or more gives NaN",
            case={**_SMALL, "seqlen_q": 2, "seqlen_k": 2, f"{tensor}_layout": "huge"},
            where={f"{tensor}_layout": ("huge",)},
            **laws,
            **_ON_H200,
        )
        for tensor, laws in _LAWS_BY_INPUT.items()
    ),
    *(
        KnownFailure(
            what="dout is read by the strides it had in the first call of a process with the same q, k and v: MHA.cpp"
            " keeps the plan of a backward, which has dout's strides in it, by those of q, k and v alone",
            case=None,  # which of them fail depends on the calls before
            where=where,
            **laws,
            **_ON_H200,
        )
        for laws, where in (
            (_OF_GRADIENTS, {"dout_layout": ("bnhd", "packed", "expanded", "expanded_rows")}),
            ({"laws": ("invariance",)}, {"batch": (2, 3), "heads_kv": (2, 3)}),
        )
    ),
    CUDNN_LAST_KEYS,
    KnownFailure(
        what="q with a stride of 0, and a head_dim of v of its own: an exception, as alloc_with_matching_layout"
        " (sdp_utils.h) takes that stride for 1 and gives out another last dimension, which cuDNN refuses",
        laws=_FORWARD,
        case={**_SMALL, "v_head_dim": 56, "q_layout": "expanded_rows"},
        where={"q_layout": ("expanded", "expanded_rows"), "v_head_dim": _MULTIPLES_OF_8},
        **_ON_H200,
    ),
    KnownFailure(
        what="grouped heads, which are not claimed, are taken, and can crash the process",
        laws=("rejection",),
        case=_SMALL,
        **_ON_H200,
    ),
)

FLEX_ATTENTION = (
    *(
        KnownFailure(
            what=f"{tensor} with huge strides: generated Triton does not compile, or an illegal memory access",
            laws=_FORWARD,
            case={**_SMALL, f"{tensor}_layout": "huge"},
            where={f"{tensor}_layout": ("huge",)},
            **_ON_H200,
        )
        for tensor in "qkv"
    ),
    KnownFailure(
        what="under a causal mask few queries of grouped heads raise NoValidChoicesError",
        issue="https://github.com/pytorch/pytorch/pull/185349",
        laws=_FORWARD,
        case={
            "dtype": "bfloat16",
            "group": 8,
            "seqlen_q": 63,
            "seqlen_k": 189,
            "head_dim": 128,
            "causal": True,
        },
        where={"group": _GROUPED, "causal": (True,)},
        **_ON_H200,
    ),
    *(
        KnownFailure(
            what="fewer than 128 float32 queries are one tile, with all heads of their group: it compiles for 9 to "
            "30 minutes, or does not fit",
            laws=_FORWARD,
            case=None,  # it would take longer than all others together
            where={"dtype": ("float32",), "seqlen_q": tuple(range(1, 128)), **wide},
            **_ON_H200,
        )
        for wide in ({"group": _GROUPED}, {"head_dim": (128,)})
    ),
)
