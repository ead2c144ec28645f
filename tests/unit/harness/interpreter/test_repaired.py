"""Each operation that attention kernels use, against PyTorch and float64, over random bit patterns.

On a CPU each kernel is run by the code that is made of its IR, and by the repaired interpreter. On a GPU the same
kernels are compiled, and have to meet the same tolerances, which are those of PTX.
"""

import math
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.unit.support.calling import DEVICE
from tests.unit.support.operations import COUNT, FLUSHED, WIDE, assert_same, nearest, patterns, run

pytestmark = pytest.mark.usefixtures("engine")

FLOATS = {
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float32": tl.float32,
    "float64": tl.float64,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
}
TABLED = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Formats whose numbers are so few that a table can have all of them."""


UNCOMPILED = {
    ("float64", "float8_e4m3fn"),
    ("float64", "float8_e5m2"),
    ("float8_e4m3fn", "float64"),
    ("float8_e5m2", "float64"),
    ("float8_e4m3fn", "float8_e5m2"),
    ("float8_e5m2", "float8_e4m3fn"),
}
"""Casts that Triton 3.6 to 3.9 compiles for no NVIDIA GPU ("Unsupported conversion")."""


@triton.jit
def _cast(x, out, COUNT: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty, fp_downcast_rounding=ROUNDING))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_round_to_nearest_even(source: str, target: str) -> None:
    if DEVICE == "cuda" and (source, target) in UNCOMPILED:
        pytest.skip("what Triton can't compile tells nothing of the interpreter")
    x = patterns(source)
    if DEVICE == "cuda" and (source, target) == ("float8_e5m2", "bfloat16"):
        # For Hopper, Triton moves the bits and multiplies by a power of 2, which makes inf and NaN finite numbers.
        x = torch.where(x.double().isfinite(), x.double(), 0.0).to(x.dtype)
    actual = run(_cast, x, out=getattr(torch, target), COUNT=COUNT, ROUNDING=None)
    values = x.double()
    widens = torch.finfo(x.dtype).bits < torch.finfo(actual.dtype).bits
    expected = nearest(values, target) if target in TABLED else values.to(actual.dtype)
    if source == target:
        expected = values
    assert_same(actual, expected)
    assert not widens or torch.equal(actual.double().nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_casts_round_toward_zero_where_asked(target: str) -> None:
    x = patterns("float32")
    x = torch.where(x.isinf(), 1.0, x)  # infinity is not rounded
    actual = run(_cast, x, out=getattr(torch, target), COUNT=COUNT, ROUNDING="rtz").double()
    values = x.double()
    expected = nearest(values, target)
    down = (expected.abs() > values.abs()).to(torch.int16)
    bits = expected.to(getattr(torch, target)).view(torch.int16) - down
    assert_same(actual, bits.view(getattr(torch, target)).double())


@pytest.mark.parametrize("source", WIDE)
def test_casts_to_integers_cut_off(source: str) -> None:
    x = patterns(source)
    actual = run(_cast, x, out=torch.int32, COUNT=COUNT, ROUNDING=None)
    expected = x.double().nan_to_num(0.0, math.inf, -math.inf).clamp(-(2.0**31), 2.0**31 - 1).trunc()
    assert_same(actual, expected)


@pytest.mark.parametrize("target", WIDE)
def test_casts_of_integers(target: str) -> None:
    x = torch.randint(-(2**31), 2**31 - 1, (COUNT,), generator=torch.Generator().manual_seed(0)) >> 5
    actual = run(_cast, x.int(), out=getattr(torch, target), COUNT=COUNT, ROUNDING=None)
    assert_same(actual, x.float().to(getattr(torch, target)))


@triton.jit
def _binary(x, y, out, OP: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "div":
        c = a / b
    elif OP == "maximum":
        c = tl.maximum(a, b)
    elif OP == "minimum":
        c = tl.minimum(a, b)
    elif OP == "maximum_nan":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "minimum_nan":
        c = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "where":
        c = tl.where(a < b, a, b)
    elif OP == "between":
        c = tl.where((a < b and a > -b) or not (a >= b or a < b), a, b)
    elif OP == "lt":
        c = a < b
    elif OP == "le":
        c = a <= b
    elif OP == "gt":
        c = a > b
    elif OP == "ge":
        c = a >= b
    elif OP == "eq":
        c = a == b
    elif OP == "ne":
        c = a != b
    tl.store(out + i, c.to(out.dtype.element_ty))


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "maximum_nan": torch.maximum,
    "minimum_nan": torch.minimum,
    "where": lambda a, b: torch.where(a < b, a, b),
    "between": lambda a, b: torch.where(((a < b) & (a > -b)) | a.isnan() | b.isnan(), a, b),
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("op", BINARY)
def test_binary_operations(op: str, dtype: str) -> None:
    x, y = patterns(dtype, seed=1), patterns(dtype, seed=2)
    y[::7] = x[::7]  # equal numbers, and NaN against NaN
    expected = BINARY[op](x.double(), y.double())
    if op == "div":  # div.full.f32: 2 ulp, and for a divisor beyond 2^126 nothing but 0
        actual = run(_binary, x, y, out=torch.float32, OP=op, COUNT=COUNT)
        usual = (y.double().abs() < 2.0**126) & ((x.double().abs() < 2.0**126) | ~x.isfinite())
        expected = expected.float()
        assert_same(actual[usual], expected[usual], 2.0**-22, FLUSHED)
        return
    if expected.dtype != torch.bool:
        expected = expected.float() if dtype == "float32" else nearest(expected, dtype)
    assert_same(run(_binary, x, y, out=getattr(torch, dtype), OP=op, COUNT=COUNT), expected)


@triton.jit
def _unary(x, out, OP: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a = tl.load(x + i)
    if OP == "neg":
        c = -a
    elif OP == "abs":
        c = tl.abs(a)
    elif OP == "exp":
        c = tl.exp(a)
    elif OP == "exp2":
        c = tl.exp2(a)
    elif OP == "log":
        c = tl.log(a)
    elif OP == "log2":
        c = tl.log2(a)
    elif OP == "sqrt":
        c = tl.sqrt(a)
    elif OP == "rsqrt":
        c = tl.rsqrt(a)
    elif OP == "floor":
        c = tl.floor(a)
    elif OP == "tanh":
        c = libdevice.tanh(a)
    elif OP == "clamp":
        c = tl.clamp(a, -1.0, 1.0)
    elif OP == "clamp_nan":
        c = tl.clamp(a, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + i, c)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("op", ["neg", "abs"])
def test_signs_change_nothing_else(op: str, dtype: str) -> None:
    x = patterns(dtype)
    actual = run(_unary, x, out=x.dtype, OP=op, COUNT=COUNT)
    expected = getattr(torch, op)(x)
    assert_same(actual, expected)
    numbers = ~x.isnan()
    assert torch.equal(actual.signbit()[numbers], expected.signbit()[numbers])


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "exp": (torch.exp, 2.0**-21),
    "exp2": (torch.exp2, 2.0**-22),
    "log": (torch.log, 2.0**-21),
    "log2": (torch.log2, 2.0**-21),
    "sqrt": (torch.sqrt, 2.0**-22),
    "rsqrt": (torch.rsqrt, 2.0**-21),
    "floor": (torch.floor, 0.0),
    "tanh": (torch.tanh, 2.0**-21),
    "clamp": (lambda x: torch.where(x.isnan(), -1.0, x.clamp(-1.0, 1.0)), 0.0),
    "clamp_nan": (lambda x: x.clamp(-1.0, 1.0), 0.0),
}
"""PyTorch's functions, with the relative errors that the PTX ISA allows; that of log near 1 is absolute, 2^-22."""


@pytest.mark.parametrize("op", FUNCTIONS)
def test_functions(op: str) -> None:
    function, relative = FUNCTIONS[op]
    x = patterns("float32")
    x = torch.where(x.abs() < FLUSHED, 0.0, x)  # which PTX's approximate functions flush
    expected = function(x.double())
    if op == "exp":  # ex2.approx of x log2(e), whose rounding counts as often as x is large
        relative *= 150
    largest = torch.finfo(torch.float32).max
    expected = torch.where(expected.abs() > largest, math.inf * expected.sign(), expected)
    actual = run(_unary, x, out=torch.float32, OP=op, COUNT=COUNT)
    if (
        op == "clamp" and DEVICE == "cuda"
    ):  # Triton leaves open which end a NaN becomes, and PTX has its own choice
        expected = torch.where(x.isnan() & (actual == 1.0), 1.0, expected)
    assert_same(actual, expected, relative, 2.0**-22 if "log" in op else FLUSHED)


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _merged(m1, l1, m2, l2):
    """Merge two maxima and their sums into one, as the online softmax does."""
    m = tl.maximum(m1, m2)
    return m, l1 * tl.exp2(m1 - m) + l2 * tl.exp2(m2 - m)


@triton.jit
def _reduce(x, out, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if OP == "sum":
        c = tl.sum(a, 1)
    elif OP == "max":
        c = tl.max(a, 1)
    elif OP == "min":
        c = tl.min(a, 1)
    elif OP == "argmax":
        c = tl.argmax(a, 1)
    elif OP == "reduce":
        c = tl.reduce(a, 1, _larger)
    elif OP == "merged":
        m, l = tl.reduce((a, tl.full([M, N], 1.0, tl.float32)), 1, _merged)
        c = m + tl.log2(l)
    tl.store(out + tl.arange(0, M), c.to(out.dtype.element_ty))


def reduced(op: str, x: Tensor, out: torch.dtype | None = None) -> Tensor:
    """Reduce the rows of x by one operation."""
    m, n = x.shape
    return run(_reduce, x, out=out or x.dtype, shape=(m,), OP=op, M=m, N=n)


@pytest.mark.parametrize("dtype", WIDE)
def test_maxima_leave_nan_out(dtype: str) -> None:
    x = patterns(dtype, 4096).reshape(64, 64)
    x[0], x[1, 5:] = math.nan, math.nan
    empty = x.isnan().all(1)
    for op, lost, extreme in (("max", -math.inf, torch.amax), ("min", math.inf, torch.amin)):
        expected = extreme(x.nan_to_num(lost, math.inf, -math.inf), 1)
        assert_same(reduced(op, x), expected.where(~empty, math.nan))


@pytest.mark.parametrize("dtype", WIDE)
def test_reductions_of_numbers(dtype: str) -> None:
    x = patterns(dtype, 4096).reshape(64, 64).nan_to_num(0.0, 1.0, -1.0).clamp(-100, 100)
    assert_same(reduced("reduce", x), x.amax(1))
    assert_same(reduced("argmax", x, torch.int32), x.float().argmax(1))
    allowed = torch.finfo(x.dtype).eps * math.log2(64) * x.double().abs().sum(1)
    assert bool(((reduced("sum", x).double() - x.double().sum(1)).abs() <= allowed).all())


def test_a_reduction_of_two_tensors() -> None:
    x = patterns("float32", 2048, seed=3).reshape(64, 32).nan_to_num(0.0, 1.0, -1.0).clamp(-20, 20)
    expected = torch.logsumexp(x.double() * math.log(2), 1) / math.log(2)
    assert_same(reduced("merged", x), expected, 2.0**-20, 2.0**-20)


@triton.jit
def _masked(x, length, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a = tl.load(x + i, mask=i < length, other=-1.0)
    tl.store(out + i, a, mask=i < length + tl.cdiv(length, 7))


@pytest.mark.parametrize("dtype", FLOATS)
def test_masked_loads_and_stores(dtype: str) -> None:
    x = patterns(dtype)
    out = run(_masked, x, 1000, out=x.dtype, COUNT=COUNT)
    assert torch.equal(out[:1000].view(torch.uint8), x[:1000].view(torch.uint8))
    assert_same(out[1000:1143], torch.full((143,), -1.0))
    assert_same(out[1143:], torch.full((COUNT - 1143,), 77.0).to(x.dtype))


@triton.jit
def _shapes(x, y, out, M: tl.constexpr, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    b = tl.load(y + tl.arange(0, N))
    c = tl.reshape(tl.trans(a), (M * N,)) + tl.reshape(
        tl.trans(tl.broadcast_to(b[None, :], (M, N))), (M * N,)
    )
    tl.store(out + tl.arange(0, M * N), c)


@pytest.mark.parametrize("dtype", WIDE)
def test_shapes(dtype: str) -> None:
    x, y = patterns(dtype, 64 * 16).reshape(64, 16), patterns(dtype, 16, seed=2)
    expected = (x.double() + y.double()).mT.reshape(-1)
    expected = expected.float() if dtype == "float32" else nearest(expected, dtype)
    assert_same(run(_shapes, x, y, out=x.dtype, shape=(1024,), M=64, N=16), expected)


@triton.jit
def _shift(x, y, out, OP: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == "left":
        c = a << b
    elif OP == "right":
        c = a >> b
    elif OP == "logical":
        c = (a.to(tl.uint32, bitcast=True) >> b.to(tl.uint32)).to(tl.int32, bitcast=True)
    elif OP == "div":
        c = a // (b + 1)
    elif OP == "mod":
        c = a % (b + 1)
    elif OP == "xor":
        c = (a ^ b) & ~b | b
    tl.store(out + i, c)


@pytest.mark.parametrize("op", ["left", "right", "logical", "div", "mod", "xor"])
def test_integers(op: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31 - 1, (COUNT,), generator=generator)
    y = torch.randint(0, 32, (COUNT,), generator=generator)
    expected = {
        "left": (x << y).int(),
        "right": (x >> y).int(),
        "logical": ((x & 0xFFFFFFFF) >> y).int(),
        "div": torch.div(x, y + 1, rounding_mode="trunc").int(),
        "mod": torch.fmod(x, y + 1).int(),
        "xor": ((x ^ y) & ~y | y).int(),
    }[op]
    assert torch.equal(run(_shift, x.int(), y.int(), out=torch.int32, OP=op, COUNT=COUNT), expected)


@triton.jit
def _atomic(x, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.atomic_add(out + i % 8, tl.load(x + i), mask=i < COUNT - 4)


@pytest.mark.parametrize("dtype", WIDE)
def test_atomic_adds_to_the_same_place(dtype: str) -> None:
    x = torch.arange(64).remainder(5).to(getattr(torch, dtype))
    out = run(_atomic, x, out=x.dtype, shape=(16,), COUNT=64)
    x[60:] = 0
    assert_same(out, 77 + torch.cat([x.reshape(8, 8).sum(0), x.new_zeros(8)]))


@triton.jit
def _descriptor_add(source, target, M: tl.constexpr, N: tl.constexpr):
    target.atomic_add([0, 0], source.load([0, 0]))


@pytest.mark.parametrize("dtype", WIDE)
def test_descriptors_add(dtype: str) -> None:
    x = torch.arange(64 * 32).remainder(5).reshape(64, 32).to(getattr(torch, dtype)).to(DEVICE)
    out = torch.full_like(x, 3)
    of_x, of_out = (TensorDescriptor.from_tensor(t, [64, 32]) for t in (x, out))
    _descriptor_add[(1,)](of_x, of_out, M=64, N=32)
    assert_same(out.cpu(), x.cpu() + 3)


@triton.autotune(
    configs=[triton.Config({"STEP": 1}), triton.Config({"STEP": 1}, num_warps=8)], key=["length"]
)
@triton.heuristics({"COUNT": lambda args: triton.next_power_of_2(args["length"])})
@triton.jit
def _tuned(x, out, length, STEP: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, tl.load(x + i, mask=i < length) + STEP, mask=i < length)


def test_autotune_takes_a_configuration() -> None:
    x = patterns("float16", 100).nan_to_num(1.0)
    out = torch.zeros_like(x).to(DEVICE)
    _tuned[(1,)](x.to(DEVICE), out, 100)
    assert_same(out.cpu(), nearest(x.double() + 1, "float16"))


@triton.jit
def _constant(out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(
        out + i,
        tl.full([COUNT], 0.1, out.dtype.element_ty) * tl.where(i < 8, 1.0, 0.5).to(out.dtype.element_ty),
    )


@pytest.mark.parametrize("dtype", WIDE)
def test_constants(dtype: str) -> None:
    to = getattr(torch, dtype)
    tenth = torch.tensor([0.1] * 8 + [0.05] * 8, dtype=torch.float64).to(to)
    assert_same(run(_constant, out=to, shape=(16,), COUNT=16), tenth)


@triton.jit
def _loop(bound, out):
    for i in range(tl.load(bound)):
        tl.store(out + i, i)


def test_loaded_loop_bounds() -> None:
    out = torch.full((4,), -1, device=DEVICE)
    _loop[(1,)](torch.tensor(3, device=DEVICE), out)
    assert out.tolist() == [0, 1, 2, -1]


@triton.jit
def _flagged(x, out, flag, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    if flag:
        tl.store(out + i, tl.load(x + i))
    tl.store(out + COUNT + i, tl.where((i < 3) & flag, 1.0, 2.0))


@pytest.mark.parametrize("flag", [False, True])
def test_bools_of_python(flag: bool) -> None:
    x = patterns("float32", 16).nan_to_num()
    out = torch.zeros(32, device=DEVICE)
    _flagged[(1,)](x.to(DEVICE), out, flag, COUNT=16)
    assert torch.equal(out[:16].cpu(), x if flag else torch.zeros(16))
    assert out[16:].tolist() == [1.0 if flag else 2.0] * 3 + [2.0] * 13
