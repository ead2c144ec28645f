"""Layouts have their strides, and poison around the data."""

import math

import pytest
import torch

from kernels.contract import LAYOUTS
from strategies.layouts import (
    FAR,
    MARGIN_ELEMENTS,
    MARGIN_ROWS,
    are_first_columns,
    changed_together,
    is_as_contiguous,
    place,
)
from tests.unit.support.drawing import Shape, drawn

SHAPES: list[Shape] = [
    (2, 3, 5, 8),
    (1, 1, 1, 1),
    (1, 4, 1, 16),
    (1, 1, 7, 40),
    (2, 1, 0, 8),
    (3, 2, 130, 64),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_window_holds_the_data_and_poison_around_it(layout: str, shape: Shape, dtype: torch.dtype) -> None:
    data = drawn("normal", shape, dtype)
    window = place(data, layout)
    expected = data
    if layout == "expanded":
        expected = data[:1, :1].expand(shape)
    elif layout == "expanded_rows":
        expected = data[:1, :1, :1].expand(shape)
    assert torch.equal(window.tensor, expected)
    assert window.tensor.stride(3) == 1
    assert window.tensor.untyped_storage().data_ptr() == window.storage.untyped_storage().data_ptr()

    inside = window.inside()
    assert window.region[~inside].isnan().all()
    assert window.region[inside].isfinite().all()
    repeats = {"expanded": shape[0] * shape[1], "expanded_rows": math.prod(shape[:3])}.get(layout, 1)
    assert inside.sum() * repeats == window.tensor.numel()
    # Each block has its own margins, on both sides, wide enough for a tile of rows or a long vector load.
    margin = inside.long().cumsum(1).eq(0).sum(1).min()
    behind = inside.flip(1).long().cumsum(1).eq(0).sum(1).min()
    rows = shape[3] if layout == "huge" else window.tensor.stride(2)
    assert min(margin, behind) >= max(MARGIN_ROWS * rows, MARGIN_ELEMENTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_show_every_write_and_refill_keeps_the_tensor(layout: str) -> None:
    window = place(drawn("normal", (2, 2, 3, 8), torch.bfloat16), layout)
    before, entries = window.bits(), window.tensor.clone()
    assert torch.equal(before, window.bits())
    for position in [0, -1, window.region.shape[1] // 2]:
        kept = window.region[-1, position].clone()
        window.region[-1, position] = 3.0
        assert not torch.equal(before, window.bits())
        window.region[-1, position] = kept
    assert torch.equal(before, window.bits())

    window.refill(7.0)
    assert torch.equal(window.tensor, entries)
    assert (window.region[~window.inside()] == 7.0).all()
    window.refill(float("nan"))
    assert torch.equal(before, window.bits())


def test_margin_value_is_the_poison() -> None:
    window = place(drawn("normal", (1, 1, 2, 8)), "gap", margin_value=-5.0)
    assert (window.region[~window.inside()] == -5.0).all()


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("contiguous", (3 * 5 * 8, 5 * 8, 8, 1)),
        ("bnhd", (5 * 3 * 8, 8, 3 * 8, 1)),
        ("packed", (5 * 3 * 3 * 8, 8, 3 * 3 * 8, 1)),
        ("gap", (3 * (5 * 11 + 5) + 7, 5 * 11 + 5, 11, 1)),
        ("offset", (3 * 5 * 8, 5 * 8, 8, 1)),
        ("expanded", (0, 0, 8, 1)),
        ("expanded_rows", (0, 0, 0, 1)),
    ],
)
def test_strides(layout: str, strides: tuple[int, ...]) -> None:
    window = place(drawn("normal", (2, 3, 5, 8)), layout)
    assert window.tensor.stride() == strides
    assert (window.tensor.storage_offset() % 16 != 0) == (layout == "offset")


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 2, 5, 8), 2),
        ((3, 2, 6, 8), 1),
        ((3, 2, 7, 8), 0),
        ((1, 2, 5, 8), 2),
        ((1, 2, 4, 8), 1),
        ((1, 1, 2, 1), 2),
    ],
)
def test_huge_strides_pass_32_bit_offsets(shape: Shape, axis: int) -> None:
    data = drawn("normal", shape, torch.float16)
    tensor = place(data, "huge").tensor
    last = tuple(size - 1 for size in shape)
    offsets = [index * stride for index, stride in zip(last, tensor.stride(), strict=True)]
    assert offsets[axis] >= FAR
    assert sum(offsets) - offsets[axis] < FAR
    assert tensor[last] == data[last]


@pytest.mark.parametrize("seqlen", [0, 1])
def test_huge_window_of_a_single_row_starts_beyond_32_bit_offsets(seqlen: int) -> None:
    assert place(drawn("normal", (1, 1, seqlen, 8), torch.float16), "huge").tensor.storage_offset() >= FAR


def test_unknown_layout_is_named() -> None:
    with pytest.raises(ValueError, match=r"layout: got 'strided', expected one of .*'contiguous'"):
        place(drawn("normal", (1, 1, 1, 1)), "strided")


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        ("bnhd", (2, 1, 3, 16), True),
        ("bnhd", (1, 2, 1, 16), True),
        ("bnhd", (1, 2, 3, 16), False),
        ("expanded", (1, 1, 3, 16), True),
        ("expanded", (2, 1, 3, 16), False),
        ("gap", (1, 1, 1, 16), True),
        ("gap", (1, 1, 2, 16), False),
        ("offset", (1, 1, 1, 16), False),
    ],
)
def test_strides_along_sizes_of_1_are_not_used(layout: str, shape: Shape, *, expected: bool) -> None:
    assert is_as_contiguous(layout, shape) == expected
    if layout != "offset":
        assert place(torch.zeros(shape), layout).tensor.is_contiguous() == expected


def test_first_columns_of_a_tensor_are_told_from_its_other_columns_and_from_copies() -> None:
    k = place(drawn("normal", (2, 3, 5, 8)), "gap").tensor
    assert are_first_columns(k[..., :6], k)
    assert are_first_columns(k, k)
    assert are_first_columns(k[:, :, :0, :6], k[:, :, :0])
    others = (k[..., 1:6], k[..., :6].clone(), k.clone(), k[:, :, :4, :6], k[:, :, ::2][..., :6])
    assert not any(are_first_columns(v, k) for v in others)
    assert not are_first_columns(k, k[..., :6])
    empty = [torch.empty(1, 1, 0, 4) for _ in range(2)]
    assert not are_first_columns(empty[0], empty[1])


def test_what_is_changed_together_stays_together() -> None:
    k = drawn("normal", (2, 3, 5, 8))
    keys, values = changed_together(k, k[..., :6], torch.clone, torch.neg)
    assert are_first_columns(values, keys)
    assert not are_first_columns(keys, k)
    keys, values = changed_together(k, v := k[..., 1:6], torch.clone, torch.neg)
    assert torch.equal(keys, k)
    assert torch.equal(values, -v)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lies_around_a_tensor_is_all_that_is_not_inside(layout: str) -> None:
    window = place(torch.randn(2, 3, 4, 16), layout)
    places = window.around()
    assert {*places} <= {"before", "between rows of", "behind"}
    counted = torch.stack([x.int() for x in places.values()]).sum(0)
    assert torch.equal(counted, (~window.inside()).long())
