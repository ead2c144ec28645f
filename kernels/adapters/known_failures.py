"""What fails in public kernels, by device. This suite found each; ``docs/findings.md`` tells the causes.

What begins with "limit" is no bug: the package promises nothing there. Entries say no version of a package: once one is
mended, its stored case passes, and the run says that the entry has to go.
"""

from dataclasses import replace
from typing import Any

from kernels.adapters.pytorch import known_failures as pytorch
from kernels.contract import ANY_LAW, KnownFailure

_ON_CPU: dict[str, Any] = {"device": "cpu", "torch": ("",)}
_ON_CUDA: dict[str, Any] = {"device": "cuda", "torch": ("",)}
_SMALL: dict[str, Any] = {"dtype": "float16", "head_dim": 64}
_ZEROS = dict.fromkeys(("q_values", "k_values", "v_values", "dout_values"), "zeros")


def _spikes(**values: Any) -> tuple[dict[str, Any], ...]:
    """Return spikes in the first element of tensors, given by their names."""
    return tuple({"tensor": x, "index": (0, 0, 0, 0), "value": value} for x, value in values.items())


FLASH_ON_CPU = tuple(
    known for known in pytorch.FLASH if known.device == "cpu" and known.laws != ("rejection",)
)
"""Of functions that call PyTorch's ``scaled_dot_product_attention``, which takes its flash kernel on a CPU."""

FLASH_ON_CUDA = tuple(
    known
    for known in pytorch.FLASH
    if known.device == "cuda" and known.laws != ("rejection",) and known is not pytorch.FLASH_PADDING
)
"""Of functions that call PyTorch's flash kernel on a GPU."""

TORCH_NESTED = tuple(known for known in FLASH_ON_CUDA if "dout_layout" not in known.where)
"""The flash kernel's on a GPU, without those of a dout: the adapter never gives the kernel a dout as it is."""

TORCH_VARLEN = (
    *FLASH_ON_CUDA,
    KnownFailure(
        what="more queries than keys: a window to the left alone hides the last keys from the first rows, as a right"
        " side without a limit becomes seqlen_k",
        issue="https://github.com/Dao-AILab/flash-attention/issues/895",
        laws=("forward", ANY_LAW),
        case={
            **_ZEROS,
            "dtype": "bfloat16",
            "seqlen_q": 107,
            "seqlen_k": 100,
            "window": 100,
            "spikes": ({"tensor": "v", "index": (0, 0, 84, 15), "value": 1.0},),
        },
        where={"causal": (False,), "window": (2, 33, 100), "longer": ("q",)},
        **_ON_CUDA,
    ),
)

TRANSFORMERS_SDPA = (
    *FLASH_ON_CPU,
    *(known for known in pytorch.CUDNN if known.laws != ("rejection",)),
    pytorch.EFFICIENT_INFINITY,
)
"""PyTorch takes its flash kernel on a CPU, and on a Hopper GPU cuDNN's, or in float32 the memory-efficient one."""

JAX_CUDNN = (
    replace(pytorch.CUDNN_SCALE, case={**_SMALL, "seqlen_q": 4, "seqlen_k": 4, "sm_scale": 0.0}, torch=("",)),
    replace(pytorch.CUDNN_LAST_KEYS, torch=("",)),
)
"""JAX calls cuDNN's attention with even lengths alone, so the stored cases have such."""

JAX_XLA = (
    KnownFailure(
        what="float16 under jit: F16_F16_F32 is not supported, and what is to catch that is over before it is compiled",
        laws=("forward", ANY_LAW),
        case={**_ZEROS, "dtype": "float16"},
        where={"dtype": ("float16",)},
        **_ON_CPU,
    ),
)

ONNXRUNTIME = (
    KnownFailure(
        what="a mask that is to be broadcast over queries is refused, though the operator takes any such shape",
        laws=("forward", ANY_LAW),
        case={**_ZEROS, "seqlen_q": 2, "bias": "of_keys"},
        where={"bias": ("of_keys",)},
        **_ON_CPU,
    ),
)

TORCH_MHA = tuple(
    KnownFailure(
        what="limit of the adapter: its projections multiply NaN and infinity by 0, which scores that overflow make of"
        " one head",
        laws=("forward", ANY_LAW),
        case={**_ZEROS, "heads_kv": 2, "spikes": _spikes(q=3e38, k=3e38)},
        where={"may_overflow": (True,)},
        **seen,
    )
    for seen in (_ON_CPU, _ON_CUDA)
)

FLEX_COMPILED = (
    KnownFailure(
        what="limit: where a score is NaN, out is 0, as in PyTorch's flash kernel",
        laws=("special",),
        case={
            **_ZEROS,
            "dtype": "float16",
            "head_dim": 64,
            "spikes": ({"tensor": "q", "index": (0, 0, 0, 0), "value": "nan"},),
        },
        **_ON_CPU,
    ),
)


def _huge(tensors: str, **where: Any) -> tuple[KnownFailure, ...]:
    """Return what fails in Triton kernels that multiply 32-bit indices of rows by strides, which wraps past 2^31."""
    return tuple(
        KnownFailure(
            what=f"{tensor} with element offsets past 2^31, each stride below it: they wrap in 32 bits, and illegal"
            " memory is read",
            laws=("forward", ANY_LAW),
            case={**_SMALL, "seqlen_q": 16, "seqlen_k": 16, f"{tensor}_layout": "huge"},
            where={f"{tensor}_layout": ("huge",), **where},
            **_ON_CUDA,
        )
        for tensor in tensors
    )


PREFILLS = _huge("qkv")
"""vLLM's and SGLang's prefills, which are nearly the same kernel, fail in these."""

SAGEATTENTION = (
    *_huge("qk"),
    *_huge("v", dtype=("float16",)),
    KnownFailure(
        what="without a causal mask, keys behind the last one count with a score of 0",
        laws=("forward", ANY_LAW),
        case={**_ZEROS, **_SMALL, "spikes": _spikes(v=1.0)},
        where={"causal": (False,), "seqlen_k": pytorch.ending_in(64, range(1, 64))},
        **_ON_CUDA,
    ),
    KnownFailure(
        what="under a causal mask, a last tile of up to 64 queries reads the scale of keys that are not there, behind"
        " the last one: NaN if that is there",
        laws=("memory", ANY_LAW),
        case={**_ZEROS, **_SMALL, "dtype": "bfloat16", "causal": True},
        where={"causal": (True,), "seqlen_k": pytorch.ending_in(128, range(1, 65))},
        **_ON_CUDA,
    ),
    KnownFailure(
        what="k that is expanded over its rows raises an exception, as it is written to",
        laws=("forward", ANY_LAW),
        case={**_ZEROS, **_SMALL, "seqlen_k": 2, "k_layout": "expanded_rows"},
        where={"k_layout": ("expanded", "expanded_rows")},
        **_ON_CUDA,
    ),
    KnownFailure(
        what="limit: float32 is answered in 16 bits, as weights and v are cast to float16",
        laws=("exact",),
        case={
            **_ZEROS,
            "head_dim": 64,
            "seqlen_k": 128,
            "spikes": ({"tensor": "v", "index": (0, 0, 47, 63), "value": 1.0},),
        },
        where={"dtype": ("float32",)},
        **_ON_CUDA,
    ),
)

FLAG_GEMS = (
    KnownFailure(
        what="past a ragged end a scale that is not positive gives NaN: -inf is scaled",
        laws=("forward", ANY_LAW),
        case={**_ZEROS, "dtype": "bfloat16", "sm_scale": 0.0},
        where={"sm_scale": (0.0, -0.125, -1.0)},
        **_ON_CUDA,
    ),
    *(
        KnownFailure(
            what=f"{tensor} whose heads lie otherwise than those of {other}: v is read by the strides of k",
            laws=("forward", ANY_LAW),
            case={**_SMALL, "heads_kv": 2, "seqlen_k": 2, f"{tensor}_layout": "bnhd"},
            where={f"{tensor}_layout": ("bnhd", "packed", "gap", "expanded", "expanded_rows", "huge")},
            **_ON_CUDA,
        )
        for tensor, other in ("kv", "vk")
    ),
)
