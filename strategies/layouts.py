"""Memory layouts: where in storage the entries of a tensor lie, and what lies around them.

A tensor is a window in a larger storage that is filled with poison, so that a kernel which reads outside of
its inputs computes with poison, and one which writes there is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import LAYOUTS

FAR = 2**31
"""The first element offset that a 32-bit index cannot hold."""

# A tile of this many rows that starts inside of the tensor ends inside of the storage.
MARGIN_ROWS = 128
MARGIN_ELEMENTS = 4096
# Margins and huge strides keep 128-byte alignment in every dtype: misalignment is the layouts offset and gap.
ALIGNMENT = 64

Shape = tuple[int, int, int, int]
Strides = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Window:
    """A tensor and the poison around it.

    Attributes:
        tensor: the view (batch, heads, seqlen, head_dim) that a kernel is given; its last stride is 1.
        storage: the flat storage that it is a window of.
        region: the view (blocks, width) of the storage that holds poison and the tensor: one block, or, as a
            huge storage is never touched as a whole, one around each part of the tensor.
    """

    tensor: Tensor
    storage: Tensor
    region: Tensor

    def bits(self) -> Tensor:
        """A copy of the region as integers; equal before and after a launch that wrote nothing."""
        return bits(self.region).clone()

    def inside(self) -> Tensor:
        """Which elements of the region belong to the tensor: bool, (blocks, width)."""
        mask = torch.zeros(self.region.shape, dtype=torch.bool, device=self.region.device)
        step, width = self.region.stride(0), self.region.shape[1]
        strides = [width if stride == step else stride for stride in self.tensor.stride()]
        start = self.tensor.storage_offset() - self.region.storage_offset()
        _distinct(mask.as_strided(self.tensor.shape, strides, start)).fill_(True)
        return mask

    def refill(self, margin_value: float) -> None:
        """Replaces the poison; the tensor keeps its entries."""
        entries = _distinct(self.tensor)
        kept = entries.clone()
        self.region.fill_(margin_value)
        entries.copy_(kept)


def bits(x: Tensor) -> Tensor:
    """A tensor whose last dimension is dense as integers, equal where bits are: NaN to itself, and not 0 to -0."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def place(
    data: Tensor, layout: str, *, margin_value: float = float("nan"), device: torch.device | str = "cpu"
) -> Window:
    """Lays (batch, heads, seqlen, head_dim) data out in fresh storage on the device, poison around it.

    An expanded layout repeats the first slice of the data. Raises ValueError for a layout that is not one of
    ``kernels.contract.LAYOUTS``.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {LAYOUTS}")
    batch, heads, seqlen, head_dim = data.shape
    shape = (batch, heads, seqlen, head_dim)
    # Further than 32 bits reach, on the CPU by as much again as memory that is never touched allows: the offset
    # of a tile ends before that of its last row.
    far = FAR * 3 // 2 if data.itemsize < 4 and torch.device(device).type == "cpu" else FAR
    blocks = _far_blocks(shape, far) if layout == "huge" else _one_block(layout, shape)

    storage = torch.empty(blocks.end, dtype=data.dtype, device=device)
    region = storage.as_strided((blocks.count, blocks.width), (blocks.step, 1), blocks.first)
    region.fill_(margin_value)
    tensor = storage.as_strided(shape, blocks.strides, blocks.first + blocks.margin)
    entries = _distinct(tensor)
    entries.copy_(data[tuple(map(slice, entries.shape))])
    return Window(tensor, storage, region)


@dataclass(frozen=True)
class _Blocks:
    """Strides of a tensor, and the equal blocks of storage that it lies in, ``step`` elements apart.

    The first block starts at element ``first``, and the tensor ``margin`` elements further.
    """

    strides: Strides
    margin: int
    width: int
    count: int
    step: int
    first: int

    @property
    def end(self) -> int:
        return self.first + (self.count - 1) * self.step + self.width


def _one_block(layout: str, shape: Shape) -> _Blocks:
    strides = _STRIDES[layout](*shape)
    row_stride = strides[2]
    margin = _margin(row_stride)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    start = margin + 1 if layout == "offset" else margin
    width = start + span + margin
    return _Blocks(strides, start, width, count=1, step=width, first=0)


def _far_blocks(shape: Shape, far: int) -> _Blocks:
    """A huge stride on one dimension, the sizes say which; a far start where none is larger than 1."""
    margin = _margin(shape[3])
    axes = [axis for axis in range(3) if shape[axis] > 1]
    if not axes:
        width = margin + shape[3] + margin
        return _Blocks(_contiguous(*shape), margin, width, count=1, step=width, first=far)
    axis = axes[-1 - sum(shape) % len(axes)]
    batch, heads, seqlen, _ = (1 if i == axis else size for i, size in enumerate(shape))
    strides = _contiguous(batch, heads, seqlen, shape[3])
    width = margin + batch * heads * seqlen * shape[3] + margin
    step = _align(max(far // (shape[axis] - 1) + 1, width))
    return _Blocks(
        (*strides[:axis], step, *strides[axis + 1 :]), margin, width, count=shape[axis], step=step, first=0
    )


def _margin(row_stride: int) -> int:
    return _align(max(MARGIN_ROWS * row_stride, MARGIN_ELEMENTS))


def _align(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _distinct(tensor: Tensor) -> Tensor:
    """The part of a tensor whose entries lie in memory of their own: one slice of each expanded dimension."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _contiguous(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    return (heads * max(seqlen, 1) * head_dim, max(seqlen, 1) * head_dim, head_dim, 1)


def _bnhd(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """(batch, seqlen, heads, head_dim) in memory."""
    return (max(seqlen, 1) * heads * head_dim, head_dim, heads * head_dim, 1)


def _packed(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """One of the three slices of (batch, seqlen, 3, heads, head_dim) in memory."""
    return _bnhd(batch, 3 * heads, seqlen, head_dim)


def _gap(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """Gaps of 3, 5 and 7 elements after each row, head and batch: wider loads than one element misalign."""
    row = head_dim + 3
    head = max(seqlen, 1) * row + 5
    return (heads * head + 7, head, row, 1)


def _expanded(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """The first head everywhere."""
    return (0, 0, head_dim, 1)


def _expanded_rows(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """The first row everywhere, as the gradient that ``out.sum().backward()`` hands down."""
    return (0, 0, 0, 1)


_STRIDES: dict[str, Callable[[int, int, int, int], Strides]] = {
    "contiguous": _contiguous,
    "bnhd": _bnhd,
    "packed": _packed,
    "gap": _gap,
    "offset": _contiguous,
    "expanded": _expanded,
    "expanded_rows": _expanded_rows,
}
