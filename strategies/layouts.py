"""Memory layouts: where in storage the entries of a tensor lie, and what lies around them.

A tensor is a window in a larger storage that is filled with poison. A kernel that reads outside of its inputs computes
with poison, and one that writes there is found because the poison changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import LAYOUTS

FAR = 2**31
"""The first element offset that a 32-bit index cannot hold."""

# A tile of this many rows that starts inside the tensor ends inside the storage.
MARGIN_ROWS = 128
MARGIN_ELEMENTS = 4096
# Margins and huge strides keep 128-byte alignment in every dtype; only the layouts offset and gap are misaligned.
ALIGNMENT = 64

REPEATED = {"expanded": (0, 1), "expanded_rows": (0, 1, 2)}
"""The dimensions along which all slices of a tensor share memory, by layout."""

Shape = tuple[int, int, int, int]
Strides = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Window:
    """A tensor and the poison around it.

    Attributes:
        tensor: the view (batch, heads, seqlen, head_dim) that a kernel is given; its last stride is 1.
        storage: the flat storage that it is a window of.
        region: the view (blocks, width) of the storage that holds the poison and the tensor. It is one block, except
            for a huge storage, which is never touched as a whole: there each part of the tensor has its block.
    """

    tensor: Tensor
    storage: Tensor
    region: Tensor

    @property
    def part(self) -> slice:
        """The part of the storage from the first to the last element of the tensor."""
        start = self.tensor.storage_offset()
        return slice(start, start + span(self.tensor))

    def bits(self) -> Tensor:
        """Return a copy of the region as integers, which is equal before and after a launch that wrote nothing."""
        return bits(self.region).clone()

    def inside(self) -> Tensor:
        """Return which elements of the region belong to the tensor: bool, (blocks, width)."""
        mask = torch.zeros(self.region.shape, dtype=torch.bool, device=self.region.device)
        step, width = self.region.stride(0), self.region.shape[1]
        strides = [width if stride == step else stride for stride in self.tensor.stride()]
        start = self.tensor.storage_offset() - self.region.storage_offset()
        distinct(mask.as_strided(self.tensor.shape, strides, start)).fill_(True)
        return mask

    def around(self) -> dict[str, Tensor]:
        """Return which elements of the region lie before the tensor, between its rows, and behind it.

        Each place, in words that its name follows, has a mask of bool, (blocks, width). Places without elements are
        left out. Of the blocks of a huge storage, all that lies around the tensor is between its rows.
        """
        inside = self.inside()
        places = {"between rows of": ~inside}
        if len(inside) == 1 and self.tensor.numel():
            first = self.part.start - self.region.storage_offset()
            ends = {"before": slice(first), "behind": slice(first + span(self.tensor), None)}
            for place, end in ends.items():
                places[place] = torch.zeros_like(inside)
                places[place][:, end] = True
                places["between rows of"][:, end] = False
        return {place: there for place, there in places.items() if bool(there.any())}

    def refill(self, margin_value: float) -> None:
        """Replace the poison by ``margin_value``; the tensor keeps its entries."""
        entries = distinct(self.tensor)
        kept = entries.clone()
        self.region.fill_(margin_value)
        entries.copy_(kept)


def are_first_columns(v: Tensor, k: Tensor) -> bool:
    """Whether a tensor is the first columns of another (batch, heads, seqlen, head_dim): a view of the same memory."""
    storages = [x.untyped_storage().data_ptr() for x in (v, k)]
    is_of_memory = storages[0] == storages[1] != 0 and v.storage_offset() == k.storage_offset()
    alike = (v.dtype, v.shape[:3], v.stride()) == (k.dtype, k.shape[:3], k.stride())
    return is_of_memory and alike and v.shape[3] <= k.shape[3]


def changed_together(
    k: Tensor, v: Tensor, of_k: Callable[[Tensor], Tensor], of_v: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return k and v, each changed by its function; v stays the first columns of k if it is, and changes with k."""
    keys = of_k(k)
    return keys, keys[..., : v.shape[3]] if are_first_columns(v, k) else of_v(v)


def span(x: Tensor) -> int:
    """Return how many elements of its storage lie between the first element of a tensor and its last, both included."""
    return _extent(x.shape, x.stride()) if x.numel() else 0


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last of a tensor with this shape and these strides.

    Both are counted. A dimension of size 0 counts like one of size 1.
    """
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)


def bits(x: Tensor) -> Tensor:
    """View a tensor, whose last stride is 1, as integers: NaN then equals itself, and 0 differs from -0."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def place(
    data: Tensor,
    layout: str,
    *,
    margin_value: float = float("nan"),
    device: torch.device | str = "cpu",
    around: bool = True,
) -> Window:
    """Lay (batch, heads, seqlen, head_dim) data out in fresh storage on the device, with poison around it.

    If not ``around``, there is poison between the entries of the tensor alone, and what lies around it is left as it is
    in fresh memory. An expanded layout repeats the first slice of the data. Raises ValueError for a layout that is not
    one of ``kernels.contract.LAYOUTS``.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {LAYOUTS}")
    batch, heads, seqlen, head_dim = data.shape
    shape = (batch, heads, seqlen, head_dim)
    # Huge strides reach beyond 32 bits. On the CPU, where untouched memory costs little, those of 16-bit tensors reach
    # half as far again, so that the first row of the last tile lies beyond 32 bits too, and not its last row alone.
    far = FAR * 3 // 2 if data.itemsize < 4 and torch.device(device).type == "cpu" else FAR
    blocks = _far_blocks(shape, far) if layout == "huge" else _one_block(layout, shape)

    storage = torch.empty(blocks.end, dtype=data.dtype, device=device)
    region = storage.as_strided((blocks.count, blocks.width), (blocks.step, 1), blocks.first)
    window = Window(storage.as_strided(shape, blocks.strides, blocks.first + blocks.margin), storage, region)
    (region if around else storage[window.part]).fill_(margin_value)
    entries = distinct(window.tensor)
    entries.copy_(data[tuple(map(slice, entries.shape))])
    return window


def lies_as(x: Tensor, layout: str) -> bool:
    """Whether a tensor (batch, heads, seqlen, head_dim) has the strides that a layout gives to its shape.

    Those along sizes of 1 count too: PyTorch uses none of them, but a kernel may compute others from them. ``huge``
    has elements that no 32-bit offset reaches, and ``offset`` begins one element behind an aligned place.
    """
    if x.numel() == 0:
        return True
    if layout == "huge":
        return x.storage_offset() + span(x) > FAR
    starts_late = x.storage_offset() % ALIGNMENT == 1
    return starts_late == (layout == "offset") and x.stride() == _STRIDES[layout](*x.shape)


def writable(layouts: Sequence[str]) -> list[str]:
    """Return those layouts in which a tensor may be written to, since no two of its entries share memory."""
    return [layout for layout in layouts if layout not in REPEATED]


def can_hold(x: Tensor, layout: str) -> bool:
    """Whether a tensor laid out so keeps its numbers: an expanded layout repeats the first slice of them."""
    if layout not in REPEATED:
        return True
    first = x[tuple(slice(1) if axis in REPEATED[layout] else slice(None) for axis in range(4))]
    return torch.equal(bits(x.contiguous()), bits(first.contiguous()).expand(x.shape))


def fitting(x: Tensor, layouts: Sequence[str], preferred: str) -> str | None:
    """Return the layout that can hold a tensor: the ``preferred`` one, or the first of all; None if none can.

    ``huge`` comes last, because its memory is dear.
    """
    ordered = sorted(layouts, key=lambda layout: (layout == "huge", layout != preferred))
    return next((layout for layout in ordered if can_hold(x, layout)), None)


def laid_out(x: Tensor, layouts: Sequence[str], preferred: str) -> Tensor | None:
    """Return a tensor as it is if it lies in one of the layouts, else a copy that does; None if none can hold it."""
    if any(lies_as(x, layout) for layout in layouts):
        return x
    layout = fitting(x, layouts, preferred)
    if layout is None:
        return None
    margin = float("nan") if x.is_floating_point() else 0
    return place(x, layout, margin_value=margin, device=x.device).tensor


def is_as_contiguous(layout: str, shape: Shape) -> bool:
    """Whether a tensor lies as a contiguous one does: strides differ along sizes of 1 alone, where none is used.

    An offset and huge strides also move the start of the tensor.
    """
    if layout in ("offset", "huge"):
        return False
    both = zip(_STRIDES[layout](*shape), _contiguous(*shape), shape, strict=True)
    return all(stride == usual or size == 1 for stride, usual, size in both)


@dataclass(frozen=True)
class _Blocks:
    """Strides of a tensor, and the equal blocks of storage that it lies in, ``step`` elements apart.

    The first block starts at element ``first``, and the tensor starts ``margin`` elements further on.
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
    start = margin + 1 if layout == "offset" else margin
    width = start + _extent(shape, strides) + margin
    return _Blocks(strides, start, width, count=1, step=width, first=0)


def _far_blocks(shape: Shape, far: int) -> _Blocks:
    """Give one dimension a huge stride; if no dimension is larger than 1, start far away. The sizes pick which."""
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


def distinct(tensor: Tensor) -> Tensor:
    """Return the part of a tensor whose entries do not share memory: one slice of each expanded dimension."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _contiguous(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    return (heads * max(seqlen, 1) * head_dim, max(seqlen, 1) * head_dim, head_dim, 1)


def _bnhd(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """Store the tensor as (batch, seqlen, heads, head_dim)."""
    return (max(seqlen, 1) * heads * head_dim, head_dim, heads * head_dim, 1)


def _packed(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """Store the tensor as one of the three slices of (batch, seqlen, 3, heads, head_dim)."""
    return _bnhd(batch, 3 * heads, seqlen, head_dim)


def _gap(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """Leave gaps of 3, 5 and 7 elements after each row, head and batch, so that loads of several elements misalign."""
    row = head_dim + 3
    head = max(seqlen, 1) * row + 5
    return (heads * head + 7, head, row, 1)


def _expanded(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """Repeat the first head for every head and batch."""
    return (0, 0, head_dim, 1)


def _expanded_rows(batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """Repeat the first row everywhere, like the gradient that ``out.sum().backward()`` hands down."""
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
