"""The kernel contract: what a kernel is called with, what it returns, and what it claims.

Shapes, everywhere: q (batch, heads_q, seqlen_q, head_dim); k and v (batch, heads_kv, seqlen_k, head_dim);
out like q; lse (batch, heads_q, seqlen_q) float32, the natural log of the sum of exponentials of the scaled
and masked scores. Query head h reads key head ``h // (heads_q // heads_kv)``. Inputs are never written.

Causal masks are aligned bottom-right (query i sees key j when ``j <= i + seqlen_k - seqlen_q``) unless the
kernel declares top-left. A query that sees no key has out 0, lse -inf and gradients 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from reference.arithmetic import BFLOAT16, FLOAT16, FLOAT32, Arithmetic
from reference.family import Family

DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = ("contiguous", "bnhd", "packed", "gap", "offset", "expanded", "expanded_rows", "huge")
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}

Launch = Mapping[str, Any]
ArithmeticOf = Callable[[str, str, Launch], Arithmetic]
"""(dtype, device type, launch settings) -> what the kernel may round then."""
FamilyOf = Callable[[str, str, Launch], Family]
"""The same of a kernel whose source is not known: which designs it may have."""


def flash_arithmetic(dtype: str, device: str, launch: Launch) -> Arithmetic:
    """FlashAttention-2's arithmetic: float32 softmax and accumulation, P and dS cast to the input's dtype.

    On a GPU, tensor cores take the products of operands of 16 bits.
    """
    formats = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32}
    return Arithmetic(
        weights=formats[dtype],
        output=formats[dtype],
        smallest_operand=0.0 if device == "cpu" else SMALLEST_NORMAL.get(dtype, 0.0),
    )


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a kernel claims. Cases are drawn from the claims alone.

    Attributes:
        dtypes: names of torch dtypes of q, k, v, out and the gradients.
        head_dims: head dimensions, smallest first.
        grouped_heads: heads_q may be a multiple of heads_kv.
        unequal_lengths: seqlen_q may differ from seqlen_k.
        min_seqlen: smallest length (0: empty sequences are answered, not refused).
        seqlen_multiple: both lengths are multiples of it, whatever the launch settings.
        causal: the values of ``causal`` that are accepted.
        causal_alignment: which corner the causal mask is anchored to when the lengths differ.
        causal_unequal_lengths: seqlen_q may differ from seqlen_k under a causal mask too.
        sm_scale: ``any`` float, or ``positive`` ones only.
        layouts: memory layouts of q, k, v and dout, by their names in ``strategies.layouts``.
        key_padding: ``forward`` and ``backward`` take a ``key_padding_mask`` (batch, seqlen_k) bool, contiguous, True
            where a key may be attended, as FlashAttention has it (torch.nn.MultiheadAttention has the opposite).
            Masked keys and values may hold anything; their weights and gradients are 0. Not passed without need.
        dropout: probabilities that ``forward`` and ``backward`` take as ``dropout_p``, with a ``dropout_seed``:
            weights are dropped as ``reference.dropout`` says. Never passed where it is 0.
        backward: gradients are available.
        lse: ``forward`` returns lse.
        deterministic: the outputs that are the same, bit for bit, on every run.
        ragged: sequences of different lengths in one call. ``cache``: forward takes ``cache_seqlens`` (batch,)
            int32, of which sequence b has that many keys, and the causal mask its corner there. ``packed``:
            forward and backward take ``cu_seqlens_q`` and ``cu_seqlens_k`` (sequences + 1,) int32 and
            ``max_seqlen_q`` and ``max_seqlen_k``; batch is 1, and sequence b has the rows from
            ``cu_seqlens_q[b]`` up to ``cu_seqlens_q[b + 1]``, and keys likewise.
        batch_invariant: a row's bits depend on nothing but what the row sees: not on what else is in the
            batch or in the tile, nor on how it all lies in memory.
        validates: calls that are not claimed raise an error before anything is launched.
        may_refuse: a claimed case may still be refused; refusals are counted, and fail only where nearly
            everything is refused. So for plain functions, whose claims are ours and not theirs.
        launch: launch settings that ``forward`` and ``backward`` take as keywords, with their values.
        arithmetic: what may be rounded, for a dtype, a device type and launch settings.
        designs: where the source is not known, the designs that the kernel may have; ``arithmetic`` is then not used.
    """

    dtypes: tuple[str, ...] = DTYPES
    head_dims: tuple[int, ...] = (16, 32, 64, 128)
    grouped_heads: bool = True
    unequal_lengths: bool = True
    min_seqlen: int = 0
    seqlen_multiple: int = 1
    causal: tuple[bool, ...] = (False, True)
    causal_alignment: Literal["bottom_right", "top_left"] = "bottom_right"
    causal_unequal_lengths: bool = True
    sm_scale: Literal["any", "positive"] = "any"
    layouts: tuple[str, ...] = LAYOUTS
    key_padding: bool = False
    dropout: tuple[float, ...] = (0.0,)
    backward: bool = True
    lse: bool = True
    deterministic: tuple[str, ...] = OUTPUTS
    ragged: Literal["", "cache", "packed"] = ""
    batch_invariant: bool = False
    validates: bool = True
    may_refuse: bool = False
    launch: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    arithmetic: ArithmeticOf = flash_arithmetic
    designs: FamilyOf | None = None

    def family(self, dtype: str, device: str, launch: Launch) -> Family:
        """The designs of which one has to explain what the kernel gives; of a declared arithmetic that alone."""
        if self.designs is None:
            return Family((self.arithmetic(dtype, device, launch),))
        return self.designs(dtype, device, launch)


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """A bug that is known: cases that meet it are not run, but for one, which must still fail.

    Attributes:
        what: the bug, in words.
        issue: where it is reported upstream; "" where it is not yet.
        laws: those that it breaks; the stored case breaks the first.
        case: the stored case, as fields of ``strategies.case.Case``; None where a failure comes and goes, or takes
            longer than one would wait for.
        where: values of fields of a case which, all together, meet it; without any, every case does.
        device: "cpu" or "cuda".
        torch: the versions of PyTorch that have it, as beginnings of a version.
    """

    what: str
    issue: str = ""
    laws: tuple[str, ...]
    case: Mapping[str, Any] | None
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    device: str
    torch: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} ({self.issue or 'not reported upstream yet'})"

    def is_of(self, device_type: str, torch_version: str) -> bool:
        """Whether it is to be expected there."""
        return device_type == self.device and torch_version.startswith(self.torch)


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """A kernel under verification.

    Attributes:
        name: as it appears in reports.
        forward: ``forward(q, k, v, *, causal, sm_scale, **launch) -> (out, lse)``; lse is None where it is
            not claimed. Without ``backward``, gradients are taken through autograd from ``out``.
        backward: ``backward(dout, q, k, v, out, lse, *, causal, sm_scale, **launch) -> (dq, dk, dv)``, or
            None.
        capabilities: what the kernel claims.
        known_failures: what it claims and, as is known, does not keep.

    A kernel refuses a case by raising NotImplementedError.
    """

    name: str
    forward: Callable[..., Any]
    capabilities: Capabilities
    backward: Callable[..., Any] | None = None
    known_failures: tuple[KnownFailure, ...] = ()
