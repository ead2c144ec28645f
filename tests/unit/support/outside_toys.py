"""Sound attention, beside whose result Triton kernels touch memory outside of tensors, or nearly do.

Nothing that they read is returned, so no number is wrong. Those with a bug touch memory in the line that ends with
``# outside``, until ``MENDED``.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.panel.eager import float32 as attention

MENDED = False

Answer = tuple[Tensor, Tensor]


def line_of(function: Any, mark: str = "# outside") -> int:
    """Return the number of the line in which a function has a mark."""
    lines, first = inspect.getsourcelines(function.fn)
    return first + next(i for i, line in enumerate(lines) if line.endswith(f"{mark}\n"))


def beside(launch: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[..., Answer]:
    """Return attention that launches a kernel, which gets k, v and memory that nobody has written, as large as k."""

    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Answer:
        launch(k.detach(), v.detach(), torch.empty(k.numel(), dtype=k.dtype))
        return attention(q, k, v, causal=causal, sm_scale=sm_scale)

    return function


@triton.jit
def _hide(x, out, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    y = tl.load(x + i)  # outside
    tl.store(out + i, tl.where(i < count, y, 0.0), mask=i < count)


@triton.jit
def _copy(x, out, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < count), mask=i < count)


@beside
def hidden_by_where(k: Tensor, v: Tensor, out: Tensor) -> None:
    """Reads a whole tile of k, of which it takes the elements that there are."""
    (_copy if MENDED else _hide)[(1,)](k, out, k.numel(), BLOCK=triton.next_power_of_2(k.numel() + 1))


@triton.jit
def _previous(x, out, rows, D: tl.constexpr, MENDED: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, D)
    kept = (row > 0) | (i < 0) if MENDED else i >= 0
    y = tl.load(x + (row - 1) * D + i, mask=kept, other=0.0)  # outside
    tl.store(out + row * D + i, tl.where(row > 0, y, 0.0))


@beside
def before_the_beginning(k: Tensor, v: Tensor, out: Tensor) -> None:
    """Reads for each row the one before it, also where that is before the first one."""
    rows, columns = k.numel() // k.shape[3], k.shape[3]
    _previous[(rows,)](k, out, rows, columns, MENDED)


@triton.jit
def _fill(out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, i * 1.0, mask=i <= count)  # outside


@beside
def stored_past_the_end(k: Tensor, v: Tensor, out: Tensor) -> None:
    """Writes one element too many."""
    count = out.numel() - 1 if MENDED else out.numel()
    _fill[(triton.cdiv(count + 1, 16),)](out, count, BLOCK=16)


@triton.jit
def _tile(x, stride, rows, BLOCK: tl.constexpr, D: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(x + at, mask=i[:, None] < rows)  # outside


@triton.jit
def _sums(x, out, stride, rows, BLOCK: tl.constexpr, D: tl.constexpr):
    y = _tile(x, stride, rows, BLOCK, D)
    tl.store(out + tl.arange(0, BLOCK), tl.sum(y, 1), mask=tl.arange(0, BLOCK) < rows)


@beside
def wrong_stride(k: Tensor, v: Tensor, out: Tensor) -> None:
    """Takes twice the distance of two rows for that distance."""
    rows, columns = k.numel() // k.shape[3], k.shape[3]
    stride = columns if MENDED else 2 * columns
    _sums[(1,)](k, out, stride, rows, BLOCK=triton.next_power_of_2(rows), D=columns)


@triton.jit
def _shifted(x, y, out, distance, D: tl.constexpr):
    i = tl.arange(0, D)
    z = tl.load(x + distance + i)  # outside
    tl.store(out + i, tl.load(y + i) + z)


@beside
def of_another_tensor(k: Tensor, v: Tensor, out: Tensor) -> None:
    """Reads v by a pointer to k, as if both lay in one tensor."""
    distance = 0 if MENDED else (v.data_ptr() - k.data_ptr()) // k.element_size()
    _shifted[(1,)](k, v, out, distance, k.shape[3])


@triton.jit
def _advance(x, out, rows, D: tl.constexpr):
    at, total = x + tl.arange(0, D), tl.zeros([D], tl.float32)
    for _ in range(rows):
        total += tl.load(at).to(tl.float32)
        at += D
    tl.store(out + tl.arange(0, D), total.to(out.dtype.element_ty))


@triton.jit
def _wild(x, out, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK).to(tl.int64)
    far = tl.where(i < count, i, (i - 3) * 1000000007)
    tl.store(out + far, tl.load(x + far, mask=i < count, other=0.0), mask=i < count)


@triton.jit
def _described(x, out, BLOCK: tl.constexpr):
    out.store([0, 0], x.load([0, 0]))


@triton.jit
def _between(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def _around(x, out, D: tl.constexpr):
    i = tl.arange(0, D)
    tl.store(out + i, tl.load(x - D + i) + tl.load(x + D + i))


@triton.jit
def _half(x, out, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, i * 1.0, mask=i < count // 2)
    y = tl.load(out + i, mask=i < count, other=0.0)  # unwritten
    tl.store(out + i, tl.where(i < count // 2, y, 0.0), mask=i < count)
    tl.store(out + i, tl.load(out + i, mask=i < count), mask=i < count)


@beside
def unwritten(k: Tensor, v: Tensor, out: Tensor) -> None:
    """Reads memory of which it has written one half, and uses that half; then it has written all."""
    _half[(1,)](k, out, k.numel(), BLOCK=triton.next_power_of_2(k.numel()))


@beside
def sound(k: Tensor, v: Tensor, out: Tensor) -> None:
    """Leaves all memory outside of tensors alone, in each way that kernels do."""
    rows, columns = k.numel() // k.shape[3], k.shape[3]
    block = triton.next_power_of_2(k.numel() + 1)
    _copy[(1,)](k, out, k.numel(), BLOCK=block)
    _wild[(1,)](k, out, k.numel(), BLOCK=block)
    _advance[(1,)](k, out, rows, columns)
    described: list[Any] = [
        TensorDescriptor.from_tensor(x.view(rows, columns), [triton.next_power_of_2(rows + 1), columns])
        for x in (k.clone(memory_format=torch.contiguous_format), out)
    ]
    _described[(1,)](*described, BLOCK=block)
    # Views of a larger storage, which a kernel may read between the rows of a view, and beside it.
    padded = torch.zeros(64, 2 * columns, dtype=k.dtype)
    _between[(1,)](padded[:, :columns], torch.empty(128 * columns, dtype=k.dtype), BLOCK=64 * columns)
    _around[(1,)](padded[1], out, columns)


def used(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Answer:
    """Adds 0 times an element past the end of memory of its own, which keeps a NaN."""
    out, lse = attention(q, k, v, causal=causal, sm_scale=sm_scale)
    zero, read = torch.zeros(1), torch.zeros(1)
    _shifted[(1,)](zero, zero, read, 1, 1)
    return out + 0.0 * read, lse
