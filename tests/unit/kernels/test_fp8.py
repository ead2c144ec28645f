"""``fp8``, where the laws do not look: what quantisation does to the inputs, and what is refused."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from kernels.algorithms import fp8 as module
from kernels.algorithms.flash_v3 import gluon_fp8 as fp8_gluon
from kernels.algorithms.fp8 import KERNEL, LAUNCH, SIGNS, forward, quantise
from kernels.common.fp8_products import check_fp8
from kernels.common.launching import launch
from kernels.common.tiles import kernel
from kernels.registry import unavailable_reason
from reference import quantisation
from reference.arithmetic import FLOAT8_E4M3, FLOAT8_E5M2, FORMATS, HOPPER_FP8_ROUNDOFF, Format, Quantisation
from reference.bounds import exact, forward_bounds
from strategies.layouts import place
from tests.bench.fp8_error import errors
from tests.compile.items import pairs
from tests.unit.support.calling import DEVICE
from tests.unit.support.emulator import aligned

FORMS = {"e4m3": (torch.float8_e4m3fn, FLOAT8_E4M3), "e5m2": (torch.float8_e5m2, FLOAT8_E5M2)}
each_format = pytest.mark.parametrize(("dtype", "to"), FORMS.values(), ids=FORMS)


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers over 40 octaves, with zeros, and with some far larger rows, so that scales differ."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(8 * torch.randn(shape, generator=generator))
    x[..., ::7, :] *= torch.exp2(30 * torch.randn(x[..., ::7, :1].shape, generator=generator))
    x[:, :, 64:96] = 0.0
    return x


def scaled_back(
    x: Tensor, block: int, scaling: str, dtype: torch.dtype, *, rotate: bool, transpose: bool = False
) -> Tensor:
    """Return the numbers that the kernel multiplies, in float64, without the rows past the end."""
    found = quantise(x.to(DEVICE), block, scaling, dtype, rotate=rotate, transpose=transpose)
    entries, scales = (y.to(x.device).double() for y in found)
    rows = entries.mT if transpose else entries
    return (rows * scales.repeat_interleave(block, 2)[..., None])[:, :, : x.shape[2]]


def declared(scaling: str, to: Format, block: int) -> Quantisation:
    rows = None if scaling == "tensor" else block
    rotation = SIGNS.value if scaling == "hadamard" else None
    return Quantisation(format=to, block_q=rows, block_k=rows, rotation=rotation)


QUANTISED: dict[str, Sequence[Any]] = {
    "dtype": (torch.float16, torch.bfloat16, torch.float32),
    "head_dim": (1, 16, 40, 64, 128, 200, 256),
    "seqlen": (0, 1, 63, 64, 130),
    "block": (32, 64, 128),
    "scaling": LAUNCH["scaling"],
    "form": tuple(FORMS),
    "layout": ("contiguous", "bnhd", "offset"),
}


@pytest.mark.parametrize(
    "given", [pytest.param(row, id="-".join(map(str, row.values()))) for row in pairs(QUANTISED, QUANTISED)]
)
def test_the_reference_knows_every_operand(given: dict[str, Any]) -> None:
    seqlen, head_dim, block, scaling = (given[name] for name in ("seqlen", "head_dim", "block", "scaling"))
    dtype, to = FORMS[given["form"]]
    largest = torch.finfo(given["dtype"]).max
    x = spread(2, 2, seqlen, head_dim).clamp(-largest, largest)
    if seqlen > 1:
        x[0, 0, 0] *= 1e-38  # subnormal, like all numbers of the next head
        x[0, 1] *= 1e-38
        x[1, 0, 0, 0], x[1, 0, 1, -1] = largest, math.inf
        x[1, 1, 1, 0], x[1, 1, -1, -1] = math.nan, -math.inf
    x = place(x.to(given["dtype"]), given["layout"], device=DEVICE).tensor
    rotate = scaling == "hadamard"
    q, _, v = quantisation.dequantised(x, x, x, declared(scaling, to, block))
    for wanted, options in ((q, {"rotate": rotate}), (v, {"rotate": False, "transpose": True})):
        got = scaled_back(x, block, scaling, dtype, **options)[..., : wanted.shape[-1]]
        assert torch.equal(got.nan_to_num(1e9), wanted.nan_to_num(1e9))
        assert torch.equal(got.isnan(), wanted.isnan())


@each_format
def test_entries_move_by_no_more_than_the_format_says(dtype: torch.dtype, to: Format) -> None:
    x = spread(1, 2, 200, 32)
    error = (scaled_back(x, 64, "block", dtype, rotate=False) - x.double()).abs()
    for rows in (slice(0, 64), slice(64, 128), slice(128, 192), slice(192, 200)):
        part = x[:, :, rows].double().abs()
        # The largest is scaled to 2^7 at least, and what underflows is less than that of 2^8.
        smallest = to.underflow * part.amax((2, 3), keepdim=True) / 2.0**7
        assert (error[:, :, rows] <= torch.maximum(to.roundoff * part, smallest)).all()


@each_format
def test_the_reference_casts_as_torch_does(dtype: torch.dtype, to: Format) -> None:
    # All positive numbers with 7 fraction bits, ties included.
    grid = torch.arange(2**15, dtype=torch.int32) << 16
    x = grid.view(torch.float32)
    x = x[(x > 2.0**-30) & (x < 256)].reshape(1, 1, 1, -1)
    x[..., -1] = 255.0  # so that the block is scaled by 1
    how = Quantisation(format=to)
    assert torch.equal(quantisation.dequantised(x, x, x, how)[0], x.to(dtype).double())


@pytest.mark.parametrize("columns", [32, 128])
def test_rotation_preserves_scores_and_spreads_outliers(columns: int) -> None:
    unit_vectors = torch.eye(columns)[None, None]
    matrix = columns * scaled_back(unit_vectors, 64, "block", torch.float8_e4m3fn, rotate=True)[0, 0]
    assert (matrix.abs() == 1).all()
    assert torch.equal(matrix @ matrix.mT, columns * torch.eye(columns).double())
    negated = sum(SIGNS.value >> j & 1 for j in range(columns))
    assert columns // 4 < negated < columns - columns // 4


@each_format
def test_interleaved_rows_are_those_that_threads_have(dtype: torch.dtype, to: Format) -> None:
    """Thread t of four has columns 8 h + 2 t + b of 16 of an accumulator, and 4 t + 2 h + b of an operand."""
    x = spread(1, 2, 200, 40).to(DEVICE)
    plain, scales = quantise(x, 64, "block", dtype, transpose=True)
    found, same_scales = quantise(x, 64, "block", dtype, transpose=True, interleave=True)
    wanted = torch.empty_like(plain.view(torch.uint8))
    for t, h, b in itertools.product(range(4), range(2), range(2)):
        wanted[..., 4 * t + 2 * h + b :: 16] = plain.view(torch.uint8)[..., 8 * h + 2 * t + b :: 16]
    assert torch.equal(found.view(torch.uint8), wanted)
    assert torch.equal(scales, same_scales)


@kernel
def _cast_kernel(x, y, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at).to(FORMAT).to(tl.float32))


@pytest.mark.parametrize("form", FORMS)
def test_p_is_rounded_to_nearest(form: str) -> None:
    ties = torch.arange(256) / 16.0
    p = torch.cat(
        (torch.rand(3840) * 256, torch.exp2(torch.rand(4094) * 40 - 32), torch.tensor([0, 256]), ties)
    )
    rounded = torch.empty_like(p, device=DEVICE)
    launch(_cast_kernel, 1, p.to(DEVICE), rounded, FORMAT=module.FORMATS[form][1], SIZE=len(p))
    assert torch.equal(rounded.cpu(), p.to(FORMS[form][0]).float())


def test_formats() -> None:
    assert FORMATS["float8_e4m3"] == FLOAT8_E4M3
    assert FLOAT8_E4M3.maximum == torch.finfo(torch.float8_e4m3fn).max
    assert FLOAT8_E5M2.maximum == torch.finfo(torch.float8_e5m2).max
    for dtype, to in FORMS.values():
        finfo = torch.finfo(dtype)
        assert (to.roundoff, to.underflow) == (finfo.eps / 2, finfo.smallest_normal * finfo.eps / 2)
        scaled = to.scaled(256.0)
        assert (scaled.roundoff, scaled.underflow * 256) == (to.roundoff, to.underflow)


def test_what_is_declared() -> None:
    on_cpu = KERNEL.capabilities.arithmetic("float16", "cpu", {"format": "e5m2", "scaling": "tensor"})
    assert on_cpu.weights.roundoff == FLOAT8_E5M2.roundoff
    assert str(on_cpu.quantisation) == "to float8_e5m2, a scale for a head"
    on_gpu = KERNEL.capabilities.arithmetic("float16", "cuda", {"block_n": 32})
    assert str(on_gpu.quantisation) == "to float8_e4m3, a scale for 128 rows of q, 32 of k and v, rotated"
    # Sums of more than one instruction's products go on in float32.
    assert on_gpu.accumulation(32) < on_gpu.accumulation(256) < 1.01 * on_gpu.accumulation(32)
    assert on_cpu.accumulation(256) == 256 * 2.0**-24


def test_what_is_declared_of_the_kernel_for_hopper() -> None:
    found = fp8_gluon.KERNEL.capabilities.arithmetic(
        "float16", "cuda", {"format": "e4m3", "scaling": "block"}
    )
    rows, keys = fp8_gluon.ROWS.value, fp8_gluon.KEYS.value
    assert str(found.quantisation) == f"to float8_e4m3, a scale for {rows} rows of q, {keys} of k and v"
    # A sum of few bits goes on over all of head_dim, or all keys of a tile.
    assert found.score_accumulation(256) == 256 * HOPPER_FP8_ROUNDOFF
    assert keys * HOPPER_FP8_ROUNDOFF < found.accumulation(4 * keys) < 1.01 * keys * HOPPER_FP8_ROUNDOFF


def test_scores_of_subnormals_lose_what_those_of_normal_numbers_do() -> None:
    """Blocks whose largest entry is 2^7 are scaled by 1, so subnormals stay; Hopper sums products in 14 bits."""
    arithmetic = KERNEL.capabilities.arithmetic("float32", "cuda", {"scaling": "block"})
    q, k = torch.full((1, 1, 2, 32), 2.0**-9), torch.full((1, 1, 1, 32), 1.875 * 2.0**-3)
    q[0, 0, 0, 0] = k[..., 0] = 2.0**7
    error = (aligned(q[0, 0, 1:], k[0, 0], 2.0**-6, 13) - (q @ k.mT).double()[0, 0, 1:]).abs()
    bounds = []
    for floor in (0.0, arithmetic.product_floor):
        e = exact(
            *(q, k, k), causal=False, sm_scale=1.0, product_floor=floor, quantisation=arithmetic.quantisation
        )
        bounds.append(forward_bounds(e, arithmetic).lse[0, 0, 1])
    assert 2 * bounds[0] < error <= bounds[1]


def test_rotation_is_worth_its_while() -> None:
    found = errors(512, 64, heads=1, seed=0, device=DEVICE)["fp8"]
    assert found["e4m3 hadamard"] < 0.9 * found["e4m3 tensor"]
    assert found["float16"] < 0.02 * found["e4m3 hadamard"]
    assert found["e4m3 tensor"] < found["e5m2 tensor"]


def arguments(**change: Any) -> dict[str, Any]:
    x = torch.zeros(1, 1, 2, 16)
    return {"q": x, "k": x, "v": x, "causal": False, "sm_scale": 1.0, **change}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": "e3m4"}, ValueError, "format: got 'e3m4', expected one of"),
        ({"scaling": "row"}, ValueError, "scaling: got 'row'"),
        ({"block_n": 128}, ValueError, "block_n: got 128"),
        ({"k": torch.zeros(1, 1, 2, 8)}, ValueError, "k: got shape"),
        (
            {n: torch.zeros(1, 1, 2, 16).to(torch.float8_e5m2) for n in "qkv"},
            NotImplementedError,
            "float8_e5m2",
        ),
    ],
)
def test_forward_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        forward(**arguments(**change))


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")

    class OnCuda:
        device = torch.device("cuda", 0)

    with pytest.raises(NotImplementedError, match=r"q: on an A100, compute capability \(8, 0\), expected"):
        check_fp8(OnCuda())  # type: ignore[arg-type]  # only the device is asked for


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": "e3m4"}, ValueError, "format: got 'e3m4', expected one of"),
        ({"block_n": 128}, TypeError, "block_n"),
        ({n: torch.zeros(1, 1, 2, 16) for n in "qkv"}, NotImplementedError, "q: got dtype torch.float32"),
        (
            {n: torch.zeros(1, 1, 2, 20).half() for n in "qkv"},
            NotImplementedError,
            "q: got head_dim 20, expected a multiple of 8",
        ),
        ({"k": torch.zeros(1, 1, 2, 8).half()}, ValueError, "k: got shape"),
        ({}, NotImplementedError, "q: got a tensor on cpu, expected one on a Hopper GPU"),
    ],
)
def test_the_kernel_for_hopper_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    halves = {n: torch.zeros(1, 1, 2, 16).half() for n in "qkv"}
    with pytest.raises(error, match=message):
        fp8_gluon.forward(**arguments(**{**halves, **change}))


def test_the_kernel_for_hopper_says_where_it_runs() -> None:
    assert "its plain twin, fp8, does" in (unavailable_reason("fp8_gluon", "cpu") or "")
    if DEVICE == "cuda":
        hopper = torch.cuda.get_device_capability()[0] == 9
        assert (unavailable_reason("fp8_gluon", "cuda") is None) == hopper


def test_the_kernel_for_hopper_gives_the_shape_of_q_where_there_is_nothing() -> None:
    if unavailable_reason("fp8_gluon", DEVICE):
        pytest.skip("does not run here")
    q, k = (
        torch.zeros(2, heads, rows, 16, dtype=torch.float16, device=DEVICE)
        for heads, rows in ((2, 5), (1, 0))
    )
    out, lse = fp8_gluon.forward(q, k, k, causal=True, sm_scale=0.3)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_the_kernel_for_hopper_takes_no_8_from_a_maximum_in_which_it_is_lost() -> None:
    """From 2^27 to 2^28 float32 has every 16th number: 8 less may be 16 less, and a weight 2^16, not 2^8."""
    if reason := unavailable_reason("fp8_gluon", DEVICE):
        pytest.skip(reason)
    q = (1 + torch.arange(8) / 8).repeat(32, 1).T[None, None].contiguous().to(torch.float16)
    q, k = q.to(DEVICE), torch.ones(1, 1, 1, 32, dtype=torch.float16, device=DEVICE)
    for part in range(4):
        sm_scale = (1 + part / 100) * 2.0**22 / math.log2(math.e)
        out, lse = fp8_gluon.forward(q, k, k, causal=False, sm_scale=sm_scale, scaling="block")
        assert (out == 1).all()
        # A score and lse take a few roundings to float32, of 2^-24 each; all keys have the same score.
        torch.testing.assert_close(lse, 32 * sm_scale * q[..., 0].float(), rtol=1e-6, atol=0.0)
