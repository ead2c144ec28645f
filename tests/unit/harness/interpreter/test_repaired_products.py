"""Products and fused multiply-adds of each format, against float64, over random bit patterns."""

import ctypes
import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.unit.support.calling import DEVICE
from tests.unit.support.operations import COUNT, FLUSHED, WIDE, assert_same, nearest, patterns, run

pytestmark = pytest.mark.usefixtures("engine")


@triton.jit
def _fma(x, y, z, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


@pytest.mark.parametrize("dtype", WIDE)
def test_fma_rounds_once(dtype: str) -> None:
    x, y, z = (patterns(dtype, seed=seed) for seed in (1, 2, 3))
    # A product and what nearly takes it away, and one that is hardly more than a tie.
    z[::3] = -(x.double() * y.double()).to(x.dtype)[::3]
    libm = ctypes.CDLL("libm.so.6")
    name, number = ("fmaf", ctypes.c_float) if dtype == "float32" else ("fma", ctypes.c_double)
    fma = getattr(libm, name)
    fma.argtypes, fma.restype = [number] * 3, number
    exact = torch.tensor(
        [fma(*v) for v in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)], dtype=torch.float64
    )
    expected = exact if dtype == "float32" else nearest(exact, dtype)
    assert_same(run(_fma, x, y, z, out=x.dtype, COUNT=COUNT), expected)


@triton.jit
def _dot(x, y, z, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    a = tl.load(x + m[:, None] * K + k[None, :])
    b = tl.load(y + n[:, None] * K + k[None, :])
    c = tl.load(z + m[:, None] * N + n[None, :])
    tl.store(
        out + m[:, None] * N + n[None, :],
        tl.dot(a, tl.trans(b), c, input_precision=PRECISION, out_dtype=c.dtype),
    )


def dot(x: Tensor, y: Tensor, z: Tensor, precision: str = "ieee") -> Tensor:
    """Return x (m, k) times y (n, k) transposed, plus z (m, n), in the dtype of z."""
    (m, k), n = x.shape, len(y)
    return run(_dot, x, y, z, out=z.dtype, shape=(m, n), M=m, N=n, K=k, PRECISION=precision)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dtype", [*WIDE, "float8_e4m3fn", "float8_e5m2"])
def test_dot_multiplies_numbers(dtype: str, precision: str) -> None:
    m, n, k = 32, 16, 64
    x, y = (patterns(dtype, size * k, seed).double().reshape(size, k) for size, seed in ((m, 1), (n, 2)))
    subnormal = torch.finfo(getattr(torch, dtype)).smallest_normal / 2
    x, y = (v.nan_to_num(1.0).clamp(-(2.0**15), 2.0**15) for v in (x, y))
    if DEVICE == "cpu":  # tensor cores keep fewer bits of them
        x[3] = subnormal
    x[5, 7], x[6, 8], y[9, 3] = math.nan, math.inf, 0.0
    a, b = (v.to(getattr(torch, dtype)) for v in (x, y))
    x, y = a.double(), b.double()
    c = patterns("float32", m * n).reshape(m, n).nan_to_num(0.0).clamp(-(2.0**60), 2.0**60)
    out = dot(a, b, c, precision)
    if (DEVICE, dtype, precision) == ("cpu", "float32", "tf32"):
        x, y = ((v.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for v in (a, b))
    expected = x @ y.mT + c.double()
    inexact = {"float8_e4m3fn": 2.0**-12, "float8_e5m2": 2.0**-12, "float32": 2.0**-10}.get(dtype, 2.0**-22)
    unit = 2.0**-23 if DEVICE == "cpu" else inexact
    allowed = k * unit * (x.abs() @ y.abs().mT + c.double().abs()).nan_to_num(0.0) + FLUSHED
    finite = expected.isfinite()
    assert bool((finite.sum() < finite.numel()) & finite.any())
    assert bool(((out.double() - expected).abs() <= allowed)[finite].all())
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out[out.isinf()].double(), expected[expected.isinf()])


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU sums float32 products less exactly than this asks")
@pytest.mark.parametrize(("precision", "unit"), [("tf32x3", 2.0**-21), ("ieee", 2.0**-23)])
def test_dot_of_parts_is_nearly_exact(precision: str, unit: float) -> None:
    x, y = (patterns("float32", 32 * 64, seed).nan_to_num(1.0).reshape(32, 64) for seed in (1, 2))
    x, y = (v.clamp(-(2.0**15), 2.0**15) for v in (x, y))
    out = dot(x, y, torch.zeros(32, 32), precision)
    allowed = unit * 64 * (x.double().abs() @ y.double().abs().mT)
    assert bool(((out.double() - x.double() @ y.double().mT).abs() <= allowed).all())
    x[3, 5], x[4, 6] = math.inf, math.nan
    out = dot(x, torch.ones(32, 64), torch.zeros(32, 32), precision)
    assert out[3].tolist() == [math.inf] * 32
    assert out[4].isnan().all()


def test_dot_sums_integers_exactly() -> None:
    x, y = (torch.randint(-128, 128, (32, 64), generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    z = torch.randint(-(2**20), 2**20, (32, 32), dtype=torch.int32)
    out = dot(x.to(torch.int8), y.to(torch.int8), z)
    assert torch.equal(out.long(), x @ y.mT + z)
