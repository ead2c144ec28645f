"""What fails in PyTorch's kernels, by release and device: each found by this suite, and left out of its runs since.

Each entry was seen to fail on every tensor, dtype or length that it names; ``where`` may cover more than fails,
never less.
"""

from typing import Any

from kernels.contract import KnownFailure

_CPU = ("2.13",)
_H200 = ("2.11",)
"""Releases of PyTorch that the entries were seen on."""

_ANY_LAW = (
    "forward",
    "backward",
    "identities",
    "invariance",
    "composition",
    "exact",
    "determinism",
    "memory",
    "special",
)
_OF_GRADIENTS = tuple(law for law in _ANY_LAW if law not in ("forward", "exact"))
_NOT_POSITIVE = (0.0, -0.125, -1.0)
_UNALIGNED = ("gap", "offset")
_MULTIPLES_OF_8 = tuple(range(8, 257, 8))

_SMALL: dict[str, Any] = {"dtype": "float16", "head_dim": 64, "seqlen_q": 3, "seqlen_k": 3}
_ZEROS: dict[str, Any] = {
    "dtype": "float16",
    **dict.fromkeys(("q_values", "k_values", "v_values", "dout_values"), "zeros"),
}


def _in_last_of_two_keys(value: str) -> dict[str, Any]:
    return {"seqlen_k": 2, "spikes": ({"tensor": "k", "index": (0, 0, 1, 0), "value": value},)}


def _behind_the_mask(device: str, torch: tuple[str, ...]) -> KnownFailure:
    return KnownFailure(
        what="NaN or infinity behind the causal mask makes rows NaN that do not see it: the mask is added",
        issue="https://github.com/pytorch/pytorch/issues/101967",
        laws=("special",),
        case={**_ZEROS, **_in_last_of_two_keys("nan"), "causal": True},
        where={"causal": (True,)},
        device=device,
        torch=torch,
    )


MATH = (
    _behind_the_mask("cpu", _CPU),
    _behind_the_mask("cuda", _H200),
    KnownFailure(
        what="without keys, out and dq are uninitialised memory",
        laws=_ANY_LAW,
        case=None,
        where={"seqlen_k": (0,)},
        device="cpu",
        torch=_CPU,
    ),
    *(
        KnownFailure(
            what=f"{tensor} with a row stride past 2^31: gemm's lda must be less than 2147483647",
            laws=laws,
            case={**_SMALL, "dtype": "float32", "seqlen_q": 2, "seqlen_k": 2, f"{tensor}_layout": "huge"},
            where={"dtype": ("float32",), f"{tensor}_layout": ("huge",)},
            device="cuda",
            torch=_H200,
        )
        for tensor, laws in (("v", _ANY_LAW), ("dout", _OF_GRADIENTS))
    ),
)


def _nan_gives_zero(device: str, torch: tuple[str, ...]) -> KnownFailure:
    return KnownFailure(
        what="NaN in q or k gives out 0",
        issue="https://github.com/pytorch/pytorch/issues/141128",
        laws=("special",),
        case={**_ZEROS, **_in_last_of_two_keys("nan")},
        device=device,
        torch=torch,
    )


_LARGE_SUMS = tuple(
    {"tensor": "dout", "index": (0, head, 0, 0), "value": value}
    for head, value in enumerate((5e4, 5e4, -6e4))
)

FLASH = (
    _nan_gives_zero("cpu", _CPU),
    _nan_gives_zero("cuda", _H200),
    KnownFailure(
        what="under a causal mask a scale that is not positive gives NaN: -inf is scaled",
        laws=_ANY_LAW,
        case={**_ZEROS, "seqlen_q": 2, "seqlen_k": 2, "causal": True, "sm_scale": 0.0},
        where={"causal": (True,), "sm_scale": _NOT_POSITIVE},
        device="cpu",
        torch=_CPU,
    ),
    KnownFailure(
        what="under a mask or past a ragged end a scale that is not positive gives NaN: -inf is scaled",
        laws=_ANY_LAW,
        case={**_SMALL, "sm_scale": 0.0},
        where={"sm_scale": _NOT_POSITIVE},
        device="cuda",
        torch=_H200,
    ),
    *(
        KnownFailure(
            what=f"{tensor} that is not aligned to 16 bytes: misaligned address, the CUDA context is lost",
            laws=laws,
            case={**_SMALL, f"{tensor}_layout": "offset"},
            # Other head_dims are padded, and thereby copied, before the kernel runs.
            where={"head_dim": _MULTIPLES_OF_8, f"{tensor}_layout": _UNALIGNED},
            device="cuda",
            torch=_H200,
        )
        for tensor, laws in (
            ("q", _ANY_LAW),
            ("k", _ANY_LAW),
            ("v", _ANY_LAW),
            ("dout", _OF_GRADIENTS),
        )
    ),
    KnownFailure(
        what="dk and dv of grouped heads are summed in float16: 50000 + 50000 - 60000 is infinite",
        laws=("backward", "identities", "invariance", "composition", "determinism", "memory", "special"),
        case={**_ZEROS, "group": 3, "spikes": _LARGE_SUMS},
        where={"dtype": ("float16",), "group": tuple(range(2, 9))},
        device="cpu",
        torch=_CPU,
    ),
    KnownFailure(
        what="v of another length than k is accepted",
        issue="https://github.com/pytorch/pytorch/pull/193728",
        laws=("rejection",),
        case=_ZEROS,
        device="cpu",
        torch=_CPU,
    ),
)

EFFICIENT = (
    *(
        KnownFailure(
            what=f"{tensor} with a head stride of nearly 2^31: illegal memory access",
            laws=_OF_GRADIENTS,
            case={**_SMALL, "seqlen_q": 1, "seqlen_k": 1, "heads_kv": 3, f"{tensor}_layout": "huge"},
            where={"heads_kv": (2, 3), f"{tensor}_layout": ("huge",)},
            device="cuda",
            torch=_H200,
        )
        for tensor in "qkv"
    ),
    KnownFailure(
        what="float32: a key whose score is -inf makes its rows NaN",
        laws=("special",),
        case={**_SMALL, **_in_last_of_two_keys("inf"), "dtype": "float32", "seqlen_q": 2},
        where={"dtype": ("float32",)},
        device="cuda",
        torch=_H200,
    ),
)

CUDNN = (
    KnownFailure(
        what="a scale that is not positive gives NaN",
        laws=_ANY_LAW,
        case={**_SMALL, "sm_scale": 0.0},
        where={"sm_scale": _NOT_POSITIVE},
        device="cuda",
        torch=_H200,
    ),
    *(
        KnownFailure(
            what=f"{tensor} that is not aligned to 16 bytes gives NaN",
            laws=_ANY_LAW,
            case={**_SMALL, f"{tensor}_layout": "offset"},
            where={f"{tensor}_layout": _UNALIGNED},
            device="cuda",
            torch=_H200,
        )
        for tensor in "qkv"
    ),
    *(
        KnownFailure(
            what=f"{tensor} with a stride of 2^31 elements or more gives NaN",
            laws=_ANY_LAW,
            case={**_SMALL, "seqlen_q": 2, "seqlen_k": 2, f"{tensor}_layout": "huge"},
            where={f"{tensor}_layout": ("huge",)},
            device="cuda",
            torch=_H200,
        )
        for tensor in "qkv"
    ),
    KnownFailure(
        what="dout whose strides are not those of out: NaN, or the launch fails and the CUDA context is lost",
        laws=_OF_GRADIENTS,
        case={**_SMALL, "dout_layout": "packed"},
        where={"dout_layout": (*_UNALIGNED, "packed", "expanded_rows", "huge")},
        device="cuda",
        torch=_H200,
    ),
    KnownFailure(
        what="grouped heads, which are not claimed, are taken, and can crash the process",
        laws=("rejection",),
        case=_SMALL,
        device="cuda",
        torch=_H200,
    ),
)

FLEX_ATTENTION = tuple(
    KnownFailure(
        what=f"{tensor} with huge strides: generated Triton that does not compile, or an illegal memory access",
        laws=_ANY_LAW,
        case={**_SMALL, f"{tensor}_layout": "huge"},
        where={f"{tensor}_layout": ("huge",)},
        device="cuda",
        torch=_H200,
    )
    for tensor in "qkv"
)
