"""What is measured of a kernel on the CPU, by Triton's interpreter and by what replaces it, and how that is told."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import claimed_scales

WAYS = ("interpreted", "executed")
"""How a launch is run: by Triton's interpreter, and by the executor of its IR."""
FORWARD, GRADIENTS = "forward", "gradients"
"""The two calls that are timed: for out and lse alone, and for these and all gradients, as laws make them."""
HEAD_DIM = 64
WIDTHS = (34, 8, 22, 9, 7, 10, 12, 12, 7, 10)
COLUMNS = (
    *("kernel", "size", "(b, h, q, k, d)", "dtype", "mask", "call"),
    *("before ms", "after ms", "ratio", "first ms"),
    "bits",
)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Size:
    """Batch, heads and lengths of a call."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int


SIZES: Mapping[str, Size] = {
    "small": Size(1, 1, 33, 33),
    "median": Size(1, 2, 65, 63),
    "drawn": Size(2, 4, 128, 128),
    "large": Size(2, 4, 512, 512),
}
"""Sizes by name: each number of ``median`` is the median of the cases that a run on a CPU draws for ``flash_v2``."""


@dataclass(frozen=True)
class Line:
    """One call of one kernel, in both ways.

    Attributes:
        kernel: its name.
        size: the name of the size.
        sizes: batch, query heads, lengths of queries and keys, and head_dim, as the kernel's claims let them be.
        dtype: the dtype of q, k and v.
        causal: whether the call has a causal mask.
        call: which call it is.
        milliseconds: by way, the least time of a call.
        first: milliseconds of the first executed call, which compiles what no earlier one has.
        differs: how the results of the two ways differ; "" if they have the same bits.
        problem: why it was not timed, or not in both ways; "" if it was.
        trace: the traceback of an exception that no contract allows.
    """

    kernel: str
    size: str
    sizes: tuple[int, ...]
    dtype: str
    causal: bool
    call: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    first: float = 0.0
    differs: str = ""
    problem: str = ""
    trace: str = ""

    @property
    def ratio(self) -> float:
        """How many times as fast the executed call is; 0 if it is not known."""
        before, after = (self.milliseconds.get(way, 0.0) for way in WAYS)
        return before / after if after else 0.0

    @property
    def about(self) -> tuple[str, ...]:
        """Say which call it is, in the order of ``COLUMNS``."""
        mask = "causal" if self.causal else "none"
        return self.kernel, self.size, str(self.sizes), self.dtype, mask, self.call

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the line, in the order of ``COLUMNS``."""
        times = tuple(f"{self.milliseconds[way]:.1f}" if way in self.milliseconds else "-" for way in WAYS)
        ratio, first = f"{self.ratio:.1f}" if self.ratio else "-", f"{self.first:.0f}" if self.first else "-"
        return *self.about, *times, ratio, first, self.problem or self.differs or "same"

    def record(self) -> dict[str, Any]:
        """Return the line for JSON."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class Ended:
    """The end of what is measured of a kernel.

    ``fallbacks`` has the reason for each jitted function that could not be executed, by its name. ``problem`` says why
    nothing was measured; "" if something was.
    """

    kernel: str
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def case_of(c: Capabilities, size: Size, dtype: str, *, causal: bool) -> Case | None:
    """Return a plain case of a size that a kernel with these claims answers, or one near to it; None if there is none.

    It has the head_dim that is nearest to ``HEAD_DIM``, lengths rounded up to the multiples that are claimed, and the
    first of each claimed launch setting.
    """
    seqlen_k = c.length_from(max(size.seqlen_k, c.min_seqlen_k))
    seqlen_q = c.length_from(size.seqlen_q)
    if c.max_seqlen_q is not None:
        seqlen_q = min(seqlen_q, c.max_seqlen_q - c.max_seqlen_q % c.seqlen_multiple)
    if c.seqlens == "q_at_most_k" or not c.may_differ(causal=causal):
        seqlen_k = max(seqlen_q, seqlen_k)
    if not c.may_differ(causal=causal):
        seqlen_q = seqlen_k
    kinds = (*c.kinds_with_gradients, *c.ragged)
    head_dim = min(c.head_dims, key=lambda x: abs(x - HEAD_DIM))
    layout = "contiguous" if "contiguous" in c.layouts else c.layouts[0]
    case = Case(
        batch=size.batch,
        heads_kv=size.heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        v_head_dim=0
        if 0 in c.v_head_dim
        else min(c.v_head_dim, key=lambda x: (x > head_dim, abs(x - head_dim))),
        v_in_k=False not in c.v_in_k,
        dtype=dtype,
        causal=causal,
        sm_scale=claimed_scales(c)[0],
        ragged="none" if c.dense else kinds[0],
        q_layout=layout,
        k_layout=layout,
        v_layout=layout,
        dout_layout=layout,
        launch=tuple((name, values[0]) for name, values in c.launch.items()),
    )
    return case if c.admits(case) else None


def difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str:
    """Say how tensors of the same names differ in their bits; "" if they do not."""
    told = []
    for name in dict.fromkeys((*before, *after)):
        if name not in before or name not in after:
            told.append(f"{name} is missing {'before' if name in after else 'after'}")
        elif text := _difference(before[name].detach(), after[name].detach()):
            told.append(f"{name}: {text}")
    return "; ".join(told)


def _difference(before: Tensor, after: Tensor) -> str:
    kinds = [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in (before, after)]
    if kinds[0] != kinds[1]:
        return "{} {} before, {} {} after".format(*kinds[0], *kinds[1])
    old, new = (x.contiguous().view(INTEGERS[x.element_size()]) for x in (before, after))
    wrong = old != new
    if not bool(wrong.any()):
        return ""
    nan = wrong & before.isnan() & after.isnan()
    others = f"{int(nan.sum())} of {wrong.numel()} are NaN of other bits" if bool(nan.any()) else ""
    wrong = wrong & ~nan
    if not bool(wrong.any()):
        return others
    first = tuple(wrong.nonzero()[0].tolist())
    told = f"{int(wrong.sum())} of {wrong.numel()} differ, first {first}: {before[first].item()!r} before, "
    told += f"{after[first].item()!r} after"
    numbers = wrong & ~before.isnan() & ~after.isnan()
    if bool(numbers.any()):
        apart = (_places(old) - _places(new)).abs()[numbers]
        error = (before.double() - after.double()).abs()[numbers]
        told += f"; at most {error.max().item():.3g}, {int(apart.max())} units in the last place"
    if not bool(numbers[wrong].all()):
        told += f"; {int((wrong & ~numbers).sum())} are NaN in one alone"
    return ", ".join(filter(None, (told, others)))


def _places(patterns: Tensor) -> Tensor:
    """Return the places of floating-point numbers in their order, int64, from their bits."""
    wide = patterns.long()
    return torch.where(wide < 0, torch.iinfo(patterns.dtype).min - wide, wide)


def line_of(cells: Sequence[str]) -> str:
    """Return cells as a line of text: of widths that are known beforehand, as each line is printed when it is made."""
    return " ".join(
        (*(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False)), cells[-1])
    ).rstrip()


def summary(lines: Sequence[Line], ended: Iterable[Ended]) -> Iterator[str]:
    """Yield lines of text: ratios of each size, what differs, what was not timed, and what fell back."""
    for size in dict.fromkeys(line.size for line in lines):
        known = [line for line in lines if line.size == size and line.ratio]
        if known:
            least = min(known, key=lambda line: line.ratio)
            median = statistics.median(line.ratio for line in known)
            about = " ".join((*least.about[:1], *least.about[3:]))
            yield f"{size}: {len(known)} ratios, median {median:.1f}, least {least.ratio:.1f} ({about})"
    compared = [line for line in lines if not line.problem]
    differing = [line for line in compared if line.differs]
    yield f"same bits in {len(compared) - len(differing)} of {len(compared)}"
    for line in differing:
        yield f"differs: {' '.join(line.about)}: {line.differs}"
    for line in lines:
        if line.problem:
            yield f"not timed: {' '.join(line.about)}: {line.problem}"
    for end in ended:
        if end.problem:
            yield f"not timed: {end.kernel}: {end.problem}"
        for name, reason in end.fallbacks.items():
            yield f"fell back: {end.kernel}: {name}: {reason}"
