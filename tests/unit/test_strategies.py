"""The tensors of a case keep the promises of their families and layouts, and every kind of case is drawn."""

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.strategies import SearchStrategy

from kernels.contract import DTYPES, LAYOUTS, Capabilities
from strategies.case import NONFINITE, TENSORS, Case, Spike
from strategies.cases import MODERATE_VALUES, cases
from strategies.layouts import FAR, MARGIN_ELEMENTS, MARGIN_ROWS, place
from strategies.padding import FAMILIES as PADDINGS
from strategies.padding import key_padding_mask
from strategies.tensors import tensors
from strategies.values import FAMILIES, fill

CLAIMS = Capabilities(
    head_dims=(1, 8, 16, 32, 40, 64, 72, 96, 128),
    launch={"block_m": (16, 64), "block_n": (32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
)
Condition = Callable[[Case], bool]
Shape = tuple[int, int, int, int]
quick = settings(database=None, deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])


def sample(strategy: SearchStrategy[Case], number: int = 500) -> list[Case]:
    """The first draws."""
    found: list[Case] = []

    @seed(0)
    @settings(quick, max_examples=number, phases=[Phase.generate])
    @given(strategy)
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


def minimal(strategy: SearchStrategy[Case], condition: Condition) -> Case:
    """What a case that meets the condition shrinks to."""
    options = settings(quick, max_examples=2000, phases=[Phase.generate, Phase.shrink])
    return find(strategy, condition, settings=options, random=Random(1))


def drawn(family: str, shape: Shape, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    return fill(family, shape, dtype, torch.Generator().manual_seed(start))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def logits(q_family: str, k_family: str, head_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Scores (1, 8, 64, 96) at the default scale, in float64."""
    q = drawn(q_family, (1, 8, 64, head_dim), dtype, start=1).double()
    k = drawn(k_family, (1, 8, 96, head_dim), dtype, start=2).double()
    return q @ k.mT / math.sqrt(head_dim)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_finite_deterministic_and_rounded_once(family: str, dtype: torch.dtype) -> None:
    shapes: list[Shape] = [(2, 3, 37, 24), (1, 1, 1, 1)]
    for shape in shapes:
        data = drawn(family, shape, dtype)
        assert data.dtype == dtype
        assert tuple(data.shape) == shape
        assert data.isfinite().all()
        assert torch.equal(bits(data), bits(drawn(family, shape, dtype)))
        if family not in ("subnormal", "huge", "constant"):  # whose range is the dtype's
            assert torch.equal(data, drawn(family, shape).to(dtype))
    assert drawn(family, (2, 0, 5, 8), dtype).shape == (2, 0, 5, 8)
    assert drawn(family, (2, 1, 0, 8), dtype).shape == (2, 1, 0, 8)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"zeros", "ones"}))
def test_family_depends_on_the_generator(family: str) -> None:
    shape = (1, 2, 16, 8)
    assert not torch.equal(drawn(family, shape, start=0), drawn(family, shape, start=1))


def test_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match=r"family: got 'normals', expected one of .*'normal'"):
        drawn("normals", (1, 1, 1, 1))


def test_zeros_come_first_and_constants_are_constant() -> None:
    assert FAMILIES[0] == "zeros"
    assert not drawn("zeros", (1, 2, 8, 8)).any()
    assert (drawn("ones", (1, 2, 8, 8)) == 1).all()
    constant = drawn("constant", (1, 2, 8, 8))
    assert constant.min() == constant.max()


def test_constants_reach_both_large_and_small_values() -> None:
    constants = torch.stack([drawn("constant", (1, 1, 1, 1), start=start) for start in range(100)])
    assert constants.min() < 0.1
    assert constants.max() > 1e5


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_wide_logits_have_standard_deviation_three_to_eight(head_dim: int) -> None:
    assert 3 < logits("wide", "normal", head_dim).std() < 8


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_one_sided_rows_pass_the_range_of_exp(head_dim: int) -> None:
    overflow = math.log(torch.finfo(torch.float32).max)
    negative = logits("positive", "negative", head_dim)
    assert (negative.logsumexp(-1) < -overflow).all()
    assert (logits("negative", "negative", head_dim) > overflow).any(-1).all()
    assert (logits("positive", "positive", head_dim) > overflow).any(-1).all()


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_near_ties_differ_little_at_a_large_magnitude(dtype: torch.dtype) -> None:
    scores = logits("normal", "near_ties", 64, dtype)
    assert scores.abs().median() > 2
    # The noise has sd 0.1 against the common vector's 8, and 0.1 more at most from rounding to bfloat16.
    assert scores.std(-1).median() < 0.05 * scores.abs().median()
    assert (scores.std(-1) > 0).all()


def test_one_key_dominates_most_rows_that_it_is_aligned_with() -> None:
    weights = logits("normal", "dominant", 64).softmax(-1)
    owner = weights.argmax(-1).mode(-1).values  # (1, 8): the row that was scaled up
    weight = weights.gather(-1, owner[..., None, None].expand(1, 8, 64, 1))
    assert 0.35 < (weight > 0.99).double().mean() < 0.6  # its score has sd 32 and either sign


@pytest.mark.parametrize("seqlen", [3, 512])
def test_outliers_are_one_in_a_thousand_and_in_every_head(seqlen: int) -> None:
    data = drawn("outliers", (32, 32, seqlen, 16))
    # Normal data exceed 6 in 2e-9 of the entries, an outlier does so with probability P(|N| > 0.6) = 0.55.
    seen = (data.abs() > 6).sum((-2, -1)).double()
    expected = 0.55 * max(1.0, 1e-3 * seqlen * 16)
    assert 0.8 * expected < seen.mean() < 1.3 * expected
    assert (seen > 0).double().mean() > 0.4


def test_integers_are_sparse_and_small() -> None:
    data = drawn("integers", (2, 2, 64, 64))
    assert set(data.flatten().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert 0.7 < (data == 0).double().mean() < 0.9


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_subnormals_are_subnormal(dtype: torch.dtype) -> None:
    # In float64, where a float32 subnormal is a normal number that no hardware mode flushes.
    data = drawn("subnormal", (2, 2, 64, 64), dtype).double()
    finfo = torch.finfo(dtype)
    multiples = data / (finfo.tiny * finfo.eps)
    assert (data.abs() < finfo.tiny).all()
    assert torch.equal(multiples, multiples.round())
    assert (multiples != 0).double().mean() > 0.9
    assert (data > 0).any()
    assert (data < 0).any()


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_huge_reaches_the_maximum_and_otherwise_sums_to_finite_scores(dtype: torch.dtype) -> None:
    maximum = torch.finfo(dtype).max
    peaks = {drawn("huge", (1, 2, 64, 64), dtype, start).double().abs().max().item() for start in range(20)}
    assert max(peaks) > 0.99 * maximum
    finite = [peak for peak in peaks if 256 * peak**2 < torch.finfo(torch.float32).max]
    assert finite


def test_tiny_logits_give_nearly_uniform_weights() -> None:
    weights = logits("tiny_logits", "normal", 64).softmax(-1)
    assert (weights * 96 - 1).abs().max() < 0.01  # logits of sd 1e-3, ten standard deviations


def test_duplicates_repeat_few_rows() -> None:
    data = drawn("duplicates", (2, 2, 64, 16))
    for head in data.flatten(0, 1):
        assert len(set(map(tuple, head.tolist()))) == 4


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


CASE = Case(
    batch=2,
    heads_kv=2,
    group=3,
    seqlen_q=5,
    seqlen_k=7,
    head_dim=8,
    dtype="bfloat16",
    q_layout="bnhd",
    k_layout="gap",
    v_layout="packed",
    seed=11,
)


def entries(case: Case, margin: float = float("nan")) -> dict[str, torch.Tensor]:
    windows = tensors(case, "cpu", margin)
    return {name: getattr(windows, name).tensor for name in TENSORS}


def changed_tensors(case: Case, other: Case) -> set[str]:
    ours, theirs = entries(case), entries(other)
    return {name for name in TENSORS if not torch.equal(bits(ours[name]), bits(theirs[name]))}


def test_tensors_have_the_shapes_and_dtype_of_the_case() -> None:
    for name, tensor in entries(CASE).items():
        assert tensor.shape == CASE.shape(name)
        assert tensor.dtype == torch.bfloat16


def test_tensors_follow_from_the_case_alone() -> None:
    state = torch.random.get_rng_state()
    assert not changed_tensors(CASE, CASE)
    assert torch.equal(state, torch.random.get_rng_state())
    assert changed_tensors(CASE, replace(CASE, seed=12)) == set(TENSORS)
    assert not changed_tensors(CASE, replace(CASE, q_layout="huge", v_layout="offset", dout_layout="gap"))


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensors_fields_leave_the_others_alone(name: str) -> None:
    changes: list[dict[str, Any]] = [{f"{name}_values": "wide"}, {f"{name}_layout": "expanded"}]
    for change in changes:
        assert changed_tensors(CASE, replace(CASE, **change)) == {name}


def test_tensors_of_one_family_and_shape_differ() -> None:
    ours = entries(replace(CASE, group=1, seqlen_q=7))
    assert not torch.equal(ours["q"], ours["k"])
    assert not torch.equal(ours["k"], ours["v"])
    assert not torch.equal(ours["q"], ours["dout"])


def test_margin_reaches_every_window() -> None:
    windows = tensors(CASE, "cpu", 9.0)
    for name in TENSORS:
        window = getattr(windows, name)
        assert (window.region[~window.inside()] == 9.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spike_is_set_modulo_the_shape_and_nowhere_else(layout: str) -> None:
    plain = replace(CASE, k_layout=layout)
    spiked = replace(plain, spikes=(Spike("k", (2, 3, 15, 7), 100.0),))
    before, after = entries(plain)["k"], entries(spiked)["k"]
    assert after[0, 1, 1, 7] == 100.0
    batches = slice(None) if layout.startswith("expanded") else 0
    heads = slice(None) if layout.startswith("expanded") else 1
    rows = slice(None) if layout == "expanded_rows" else 1
    expected = before.clone()
    expected[batches, heads, rows, 7] = 100.0
    assert torch.equal(after, expected)
    assert changed_tensors(plain, spiked) == {"k"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_spikes_are_clipped_to_the_dtype_unless_they_are_named(dtype: str) -> None:
    values: tuple[float | str, ...] = (1e39, -1e39, "nan", "inf", "-inf")
    spikes = tuple(Spike("v", (0, 0, 0, i), value) for i, value in enumerate(values))
    row = entries(replace(CASE, dtype=dtype, spikes=spikes))["v"][0, 0, 0]
    maximum = torch.finfo(getattr(torch, dtype)).max
    assert row[:2].tolist() == [maximum, -maximum]
    assert row[2].isnan()
    assert row[3:5].tolist() == [math.inf, -math.inf]


def test_a_spike_in_an_empty_tensor_is_ignored() -> None:
    empty = replace(CASE, seqlen_k=0, spikes=(Spike("k", (0, 0, 0, 0), 1.0), Spike("q", (0, 0, 0, 0), 77.0)))
    assert entries(empty)["k"].numel() == 0
    assert entries(empty)["q"][0, 0, 0, 0] == 77.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "dtype: got 'float64', expected one of"),
        ({"v_values": "odd"}, "family: got 'odd', expected one of"),
        ({"dout_layout": "odd"}, "layout: got 'odd', expected one of"),
        ({"key_padding": "odd"}, "key_padding: got 'odd', expected none or one of"),
        ({"spikes": (Spike("out", (0, 0, 0, 0), 1.0),)}, r"spike\.tensor: got 'out', expected one of"),
        (
            {"spikes": (Spike("q", (0, 0, 0, 0), "NaN"),)},
            r"spike\.value: got 'NaN', expected a number or one of",
        ),
    ],
)
def test_unknown_names_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensors(replace(CASE, **change), "cpu")


@settings(quick, max_examples=60)
@given(cases(CLAIMS, dtype="bfloat16"))
def test_every_drawn_case_has_tensors(case: Case) -> None:
    for name, tensor in entries(case).items():
        assert tensor.shape == case.shape(name)


def masked_places(case: Case) -> set[str]:
    """Which of the key tiles that a causal tile of queries cannot see there are: first, middle, last."""
    launch = dict(case.launch)
    if not case.causal:
        return set()
    tiles = range(0, case.seqlen_k, launch["block_n"])
    places = set()
    for start in range(0, case.seqlen_q, launch["block_m"]):
        last_row = min(start + launch["block_m"], case.seqlen_q) - 1
        seen = last_row + case.seqlen_k - case.seqlen_q
        for index, tile in enumerate(tiles):
            if tile > seen:
                places.add("first" if index == 0 else "last" if index == len(tiles) - 1 else "middle")
    return places


def one_sided_logits(case: Case) -> int:
    """The sign that all logits have, 0 where they have both."""
    signs = {"positive": 1, "negative": -1}
    scale = math.copysign(1, case.scale) if abs(case.scale) > 0.1 else 0
    return int(signs.get(case.q_values, 0) * signs.get(case.k_values, 0) * scale)


def has(field: str, value: object) -> Condition:
    return lambda case: getattr(case, field) == value


def has_setting(name: str, value: object) -> Condition:
    return lambda case: (name, value) in case.launch


def masks(place: str) -> Condition:
    return lambda case: place in masked_places(case)


def has_spikes(count: int) -> Condition:
    return lambda case: len(case.spikes) == count


KINDS: dict[str, Condition] = {
    **{f"seqlen_q={n}": has("seqlen_q", n) for n in (0, 1, 15, 16, 17, 63, 64, 65)},
    **{f"seqlen_k={n}": has("seqlen_k", n) for n in (0, 1, 31, 32, 33, 63, 64, 65)},
    "several tiles and a half": lambda case: case.seqlen_k > 128 and 16 <= case.seqlen_k % 64 <= 48,
    "more queries than keys": lambda case: case.seqlen_q > case.seqlen_k > 0,
    "more keys than queries": lambda case: case.seqlen_k > case.seqlen_q > 0,
    "equal lengths": lambda case: case.seqlen_k == case.seqlen_q > 1,
    "causal": has("causal", True),
    "full": has("causal", False),
    "rows without a key": lambda case: case.causal and case.seqlen_q > case.seqlen_k > 0,
    **{f"{place} tile masked": masks(place) for place in ("first", "middle", "last")},
    **{f"head_dim={d}": has("head_dim", d) for d in CLAIMS.head_dims},
    **{f"group={g}": has("group", g) for g in (1, 2, 3, 4, 5, 8)},
    "heads_kv = group > 1": lambda case: case.heads_kv == case.group > 1,
    "heads_kv < group": lambda case: 1 < case.heads_kv < case.group,
    "heads_kv > group": lambda case: case.heads_kv > case.group > 1,
    **{f"{name}: {family}": has(f"{name}_values", family) for name in TENSORS for family in FAMILIES},
    "logits far below 0": lambda case: one_sided_logits(case) < 0,
    "logits far above 0": lambda case: one_sided_logits(case) > 0,
    "weights of padded keys overflow": lambda case: one_sided_logits(case) < 0 and case.seqlen_k % 64 > 0,
    "default scale": has("sm_scale", None),
    "zero scale": has("sm_scale", 0.0),
    "no power of two": has("sm_scale", 0.3),
    "negative scale": lambda case: case.scale < 0,
    "tiny scale": lambda case: 0 < case.scale < 1e-3,
    "large scale": lambda case: case.scale > 10,
    **{f"{name}: {layout}": has(f"{name}_layout", layout) for name in TENSORS for layout in LAYOUTS},
    "k laid out unlike v": lambda case: case.k_layout != case.v_layout,
    **{
        f"{name}={value}": has_setting(name, value)
        for name, values in CLAIMS.launch.items()
        for value in values
    },
    **{f"{count} spikes": has_spikes(count) for count in range(5)},
}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_kind_of_case_is_drawn(device_type: str) -> None:
    found = sample(cases(CLAIMS, dtype="float16", device_type=device_type), 2500)
    assert not [name for name, holds in KINDS.items() if not any(map(holds, found))]


MASKED = replace(CLAIMS, key_padding=True, dropout=(0.0, 0.1, 0.5))


def test_masks_are_drawn_where_they_are_asked_for_and_claimed() -> None:
    found = sample(cases(MASKED, dtype="float16", key_padding=True, dropout=True))
    assert {case.key_padding for case in found} == {"none", *PADDINGS}
    assert {case.dropout_p for case in found} == {0.0, 0.1, 0.5}
    for strategy in (
        cases(MASKED, dtype="float16"),
        cases(CLAIMS, dtype="float16", key_padding=True, dropout=True),
    ):
        assert {(case.key_padding, case.dropout_p) for case in sample(strategy)} == {("none", 0.0)}


def test_masks_of_keys_are_of_every_kind() -> None:
    masks = [
        key_padding_mask(Case(batch=3, seqlen_k=100, key_padding=family, seed=start))
        for family in PADDINGS
        for start in range(30)
    ]
    rows = torch.cat([mask for mask in masks if mask is not None])
    assert rows.shape == (3 * 30 * len(PADDINGS), 100)
    # All keys; none; one; sequences that begin late; a whole tile of 32 in the middle that nobody attends.
    whole = rows.unfold(1, 32, 32).any(2)
    for kind in (
        rows.all(1),
        ~rows.any(1),
        rows.sum(1) == 1,
        ~rows[:, 0] & rows[:, -1],
        whole[:, 0] & ~whole[:, 1],
    ):
        assert kind.any()
    assert any(mask is not None and not torch.equal(mask[0], mask[1]) for mask in masks)


@pytest.mark.parametrize("start", [4, 5])
def test_masked_keys_are_spoiled_for_every_other_seed(start: int) -> None:
    case = replace(
        CASE, batch=2, seqlen_k=40, key_padding="scattered", k_layout="gap", v_layout="expanded", seed=start
    )
    found = tensors(case, "cpu")
    mask = found.key_padding_mask
    assert mask is not None
    masked = ~mask[:, None, :, None].expand(found.k.tensor.shape)
    assert masked.any()
    assert torch.equal(found.k.tensor.isnan(), masked if start % 2 else torch.zeros_like(masked))
    assert not found.v.tensor.isnan().any()  # its rows share memory
    assert tensors(replace(case, key_padding="none"), "cpu").key_padding_mask is None


def test_draws_are_independent() -> None:
    found = sample(cases(CLAIMS, dtype="float16"))
    assert len(set(found)) > 0.95 * len(found)
    # Hypothesis gives special integers, 0 among them, a share of their own.
    assert len({case.seed for case in found}) > 0.7 * len(found)


SIMPLEST = Case(
    seqlen_q=0,
    seqlen_k=0,
    head_dim=1,
    dtype="float16",
    launch=(("block_m", 16), ("block_n", 32), ("num_warps", 4), ("num_stages", 1)),
)


@pytest.mark.parametrize(
    ("condition", "change"),
    [
        (lambda case: True, {}),
        (lambda case: case.seqlen_k % 128 == 127, {"seqlen_k": 127}),
        (lambda case: case.seqlen_q % 64 == 1 and case.seqlen_k > 100, {"seqlen_q": 1, "seqlen_k": 101}),
        (
            lambda case: case.causal and case.seqlen_q > case.seqlen_k > 33,
            {"causal": True, "seqlen_q": 35, "seqlen_k": 34},
        ),
        (lambda case: case.k_values == "near_ties", {"k_values": "near_ties"}),
        (lambda case: case.v_layout == "huge", {"v_layout": "huge"}),
        (
            lambda case: case.q_layout == case.k_layout == "huge",
            {f"{name}_layout": "huge" for name in TENSORS},
        ),
        (lambda case: case.scale < 0, {"sm_scale": -0.125}),
        (lambda case: case.heads_kv > 1 and case.group > 3, {"heads_kv": 2, "group": 4}),
        (
            lambda case: ("num_stages", 3) in case.launch,
            {"launch": (*SIMPLEST.launch[:3], ("num_stages", 3))},
        ),
        (
            lambda case: any(spike.tensor == "v" and spike.value == 100.0 for spike in case.spikes),
            {"spikes": (Spike("v", (0, 0, 0, 0), 100.0),)},
        ),
    ],
)
def test_shrinking_ends_at_the_simplest_case(condition: Condition, change: dict[str, Any]) -> None:
    assert minimal(cases(CLAIMS, dtype="float16"), condition) == replace(SIMPLEST, **change)


NARROW = Capabilities(
    dtypes=("float16",),
    head_dims=(24,),
    grouped_heads=False,
    unequal_lengths=False,
    min_seqlen=1,
    causal=(True,),
    sm_scale="positive",
    layouts=("bnhd", "contiguous"),
)


@quick
@given(cases(NARROW, dtype="float16", max_seqlen=40))
def test_only_what_is_claimed_is_drawn(case: Case) -> None:
    assert case.dtype == "float16"
    assert case.head_dim == 24
    assert case.group == 1
    assert 1 <= case.seqlen_q == case.seqlen_k <= 40
    assert case.causal
    assert case.scale > 0
    assert {getattr(case, f"{name}_layout") for name in TENSORS} <= {"contiguous", "bnhd"}
    assert case.launch == ()


@quick
@given(cases(Capabilities(seqlen_multiple=32, min_seqlen=1), dtype="float16", max_seqlen=140))
def test_lengths_are_multiples_where_only_those_are_claimed(case: Case) -> None:
    assert {case.seqlen_q, case.seqlen_k} <= {32, 64, 96, 128}


def test_multiples_differ_from_each_other() -> None:
    found = sample(cases(Capabilities(seqlen_multiple=32), dtype="float16", max_seqlen=140))
    assert {case.seqlen_q for case in found} == {case.seqlen_k for case in found} == {0, 32, 64, 96, 128}
    assert any(case.seqlen_q != case.seqlen_k for case in found)


@quick
@given(cases(Capabilities(causal_unequal_lengths=False), dtype="float32"))
def test_causal_lengths_are_equal_where_only_those_are_claimed(case: Case) -> None:
    assert case.seqlen_q == case.seqlen_k or not case.causal


def test_other_lengths_differ_where_only_causal_ones_may_not() -> None:
    found = sample(cases(Capabilities(causal_unequal_lengths=False), dtype="float32"))
    assert any(case.seqlen_q != case.seqlen_k for case in found)


def score_tiles(case: Case, block_m: int, block_n: int) -> int:
    return case.batch * case.heads_q * -(-case.seqlen_q // block_m) * -(-case.seqlen_k // block_n)


@quick
@given(cases(CLAIMS, dtype="float16", max_tiles=10))
def test_interpreted_cases_keep_to_a_number_of_tiles(case: Case) -> None:
    launch = dict(case.launch)
    assert score_tiles(case, launch["block_m"], launch["block_n"]) <= 10


@quick
@given(cases(Capabilities(), dtype="float16"))
def test_tiles_are_counted_at_64_where_none_are_declared(case: Case) -> None:
    assert score_tiles(case, 64, 64) <= 32


@quick
@given(cases(CLAIMS, dtype="float16", device_type="cuda", max_work=5000))
def test_every_case_keeps_to_the_work_and_to_one_huge_storage(case: Case) -> None:
    assert score_tiles(case, 1, 1) <= 5000
    assert [getattr(case, f"{name}_layout") for name in TENSORS].count("huge") <= 1


def test_only_the_interpreter_counts_tiles() -> None:
    found = sample(cases(Capabilities(), dtype="float16", device_type="cuda"))
    assert any(score_tiles(case, 64, 64) > 32 for case in found)


@quick
@given(cases(CLAIMS, dtype="float16", nonfinite=True))
def test_nonfinite_cases_have_a_few_such_entries_in_moderate_tensors(case: Case) -> None:
    assert 1 <= len(case.spikes) <= 2
    assert all(spike.value in NONFINITE for spike in case.spikes)
    assert {getattr(case, f"{name}_values") for name in TENSORS} <= set(MODERATE_VALUES)


@quick
@given(cases(CLAIMS, dtype="float16"))
def test_other_cases_are_finite(case: Case) -> None:
    assert all(isinstance(spike.value, float) for spike in case.spikes)
    assert len(case.spikes) <= 4


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_unclaimed_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"dtype: got '{dtype}', expected one of the claimed"):
        cases(NARROW, dtype=dtype)


def test_unknown_device_type_is_refused() -> None:
    with pytest.raises(ValueError, match="device_type: got 'tpu', expected one of"):
        cases(CLAIMS, dtype="float16", device_type="tpu")
