"""What fails in public kernels, by device. This suite found each; ``docs/findings.md`` tells the causes.

What begins with "limit" is no bug: the package promises nothing there. Entries say no version of a package: once one is
mended, its stored case passes, and the run says that the entry has to go.
"""

from typing import Any

from kernels.contract import ANY_LAW, KnownFailure
from kernels.pytorch import known_failures as pytorch

_ON_CPU: dict[str, Any] = {"device": "cpu", "torch": ("",)}
_ON_CUDA: dict[str, Any] = {"device": "cuda", "torch": ("",)}
_ZEROS = dict.fromkeys(("q_values", "k_values", "v_values", "dout_values"), "zeros")
_NAN_BEHIND: dict[str, Any] = {
    **_ZEROS,
    "seqlen_q": 2,
    "seqlen_k": 2,
    "causal": True,
    "spikes": ({"tensor": "k", "index": (0, 0, 1, 0), "value": "nan"},),
}
"""A case in which the first of two rows must not see NaN, since a causal mask hides it."""


def _spikes(**values: Any) -> tuple[dict[str, Any], ...]:
    """Return spikes in the first element of tensors, given by their names."""
    return tuple({"tensor": x, "index": (0, 0, 0, 0), "value": value} for x, value in values.items())


FLASH_ON_CPU = tuple(
    known for known in pytorch.FLASH if known.device == "cpu" and known.laws != ("rejection",)
)
"""Of functions that call PyTorch's ``scaled_dot_product_attention``, which takes its flash kernel on a CPU."""

FLASH_ON_CUDA = tuple(
    known for known in pytorch.FLASH if known.device == "cuda" and known.laws != ("rejection",)
)
"""Of functions that call PyTorch's flash kernel on a GPU."""

CUDNN_ON_CUDA = tuple(known for known in pytorch.CUDNN if known.laws != ("rejection",))
"""Of functions for which PyTorch takes cuDNN's kernel on a Hopper GPU."""

CUDNN_SCALES = pytorch.CUDNN[:1]
"""Of cuDNN's attention, whoever calls it: a scale that is not positive."""

ADDED_MASK = tuple(
    KnownFailure(
        what="limit: NaN or infinity behind the causal mask makes rows NaN that do not see it, as the mask is added",
        laws=("special",),
        case=_NAN_BEHIND,
        where={"causal": (True,)},
        **seen,
    )
    for seen in (_ON_CPU, _ON_CUDA)
)

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
    *ADDED_MASK,
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
        what=f"limit of the adapter: its projections multiply NaN and infinity by 0, {come_from}",
        laws=laws,
        case={**_ZEROS, "heads_kv": 2, "spikes": spikes},
        where=where,
        **seen,
    )
    for seen in (_ON_CPU, _ON_CUDA)
    for come_from, laws, spikes, where in (
        ("which inputs have", ("special",), _spikes(v="inf"), {}),
        (
            "which scores that overflow make of one head",
            ("forward", ANY_LAW),
            _spikes(q=3e38, k=3e38),
            {"may_overflow": (True,)},
        ),
    )
)

FLEX_COMPILED = (
    KnownFailure(
        what="limit: NaN in q or k gives out 0 in 16 bits, as in PyTorch's flash kernel",
        laws=("special",),
        case={
            **_ZEROS,
            "dtype": "float16",
            "head_dim": 64,
            "spikes": ({"tensor": "q", "index": (0, 0, 0, 0), "value": "nan"},),
        },
        where={"dtype": ("float16", "bfloat16")},
        **_ON_CPU,
    ),
)
