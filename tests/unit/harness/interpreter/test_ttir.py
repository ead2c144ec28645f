"""Kernels run by code made of their IR: what falls back, lines of faults, code on disk, and odd control flow."""

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import load
from triton.language.extra import libdevice
from triton.runtime.errors import InterpreterError

from tests.harness.interpreter.ttir import launch, store
from tests.harness.interpreter.ttir.ir.parse import Unsupported, parse
from tests.harness.interpreter.ttir.launch import fallbacks, interpreted
from tests.harness.interpreter.ttir.writing.translate import translate
from tests.unit.support.triton_toys import _doubled

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU that is here")

SIZE = 16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep code in a folder of the test's own."""
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "code"))
    monkeypatch.setattr(launch, "_fallbacks", {})
    return tmp_path / "code"


def both(call: Callable[[], Tensor]) -> Tensor:
    """Return what a call gives; the interpreter has to give the same bits, and nothing may have been left to it."""
    found = call()
    assert not fallbacks()
    with interpreted():
        assert torch.equal(call(), found)
    return found


@triton.jit
def _by_name(x, out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), load(x + tl.arange(0, SIZE)) + 1)


@triton.jit
def _assembly(x, out, SIZE: tl.constexpr):
    asm: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
    y = tl.load(x + tl.arange(0, SIZE))
    y = tl.inline_asm_elementwise(asm, "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out + tl.arange(0, SIZE), y + libdevice.rsqrt(y))


def test_what_the_interpreter_alone_can_not_run() -> None:
    x = torch.linspace(-2, 2, SIZE)
    for kernel, expected in ((_by_name, x + 1), (_assembly, torch.exp2(x) + torch.exp2(x).rsqrt())):
        out = torch.empty(SIZE)
        kernel[(1,)](x, out, SIZE)
        assert not fallbacks()
        torch.testing.assert_close(out, expected)


@triton.jit
def _returns_early(x, out, length, SIZE: tl.constexpr):
    pid = tl.program_id(0)
    if pid * SIZE >= length:
        return
    at = pid * SIZE + tl.arange(0, SIZE)
    if pid == 1:
        tl.store(out + at, tl.load(x + at, mask=at < length) * 2, mask=at < length)
        return
    tl.store(out + at, tl.load(x + at, mask=at < length), mask=at < length)


def test_programs_that_return_early() -> None:
    x = torch.arange(60.0)

    def call() -> Tensor:
        out = torch.full((80,), -1.0)
        _returns_early[(5,)](x, out, 60, SIZE)
        return out

    found = both(call)
    assert found[16:32].tolist() == (2 * x[16:32]).tolist()
    assert found[60:].eq(-1).all()


@triton.jit
def _either(x, y, out, SIZE: tl.constexpr):
    pid = tl.program_id(0)
    source = x
    if pid % 2 == 1:
        source = y
    for _ in range(pid):
        source += SIZE
    tl.store(out + pid * SIZE + tl.arange(0, SIZE), tl.load(source + tl.arange(0, SIZE)))


def test_a_pointer_that_is_chosen_between_tensors() -> None:
    x, y = torch.arange(64.0), -torch.arange(64.0)

    def call() -> Tensor:
        out = torch.empty(64)
        _either[(4,)](x, y, out, SIZE)
        return out

    assert both(call).reshape(4, SIZE)[:, 1].tolist() == [1.0, -17.0, 33.0, -49.0]


def test_more_programs_than_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_ELEMENTS", 4 * SIZE)

    def call() -> Tensor:
        x = torch.arange(37.0 * SIZE)
        _doubled[(37,)](x, SIZE)
        return x

    assert torch.equal(both(call), 2 * torch.arange(37.0 * SIZE))


@triton.jit
def _checked(x, limit):
    for i in range(3):
        value = tl.load(x + i)
        tl.device_assert(value < limit, "too large")
        tl.store(x + i, value + 1)


def test_an_assertion_is_told_at_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checked, "debug", True)
    x = torch.tensor([0, 1, 5])
    with pytest.raises(InterpreterError, match="too large") as raised:
        _checked[(1,)](x, 3)
    cause = raised.value.__cause__
    assert cause is not None
    last = traceback.extract_tb(cause.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, 'tl.device_assert(value < limit, "too large")')
    assert x.tolist() == [1, 2, 5]


@triton.jit(noinline=True)
def _apart(x):
    return x + 1


@triton.jit
def _calls_apart(x):
    tl.store(x, _apart(tl.load(x)))


def test_a_fallback_is_told_once_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.zeros(1)
    for _ in range(2):
        _calls_apart[(1,)](x)
    assert x.item() == 2
    line = _calls_apart.fn.__code__.co_firstlineno + 2
    reason = f"it has a call of a function that is not inlined (test_ttir.py:{line})"
    assert capsys.readouterr().err == f"Triton's interpreter runs _calls_apart, slowly, because {reason}\n"
    assert fallbacks() == {"_calls_apart": reason}


def test_an_operation_that_is_not_there_yet_is_named_with_its_line() -> None:
    text = """
#loc = loc("kernel.py":7:4)
module {
  tt.func public @f(%x: !tt.ptr<f32> loc("x"(#loc))) attributes {noinline = false} {
    %0 = tt.load %x : !tt.ptr<f32> loc(#loc1)
    %1 = tt.odd %0 : f32 loc(#loc1)
    tt.store %x, %1 : !tt.ptr<f32> loc(#loc1)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc1 = loc("kernel.py":9:8)
"""
    with pytest.raises(Unsupported, match=r"^the operation tt\.odd \(kernel\.py:9\)$"):
        translate(parse(text), "kernel.py")


def test_an_error_of_the_code_is_none_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise NameError("name 'v7' is not defined")

    monkeypatch.setattr(launch, "execute", broken)
    monkeypatch.setattr(_doubled, "codes", {})
    x = torch.ones(32)
    _doubled[(2,)](x, SIZE)
    assert x.eq(2).all()
    assert fallbacks() == {"_doubled": "Flashproof's code for it raised NameError: name 'v7' is not defined"}


KERNEL = """
import triton
import triton.language as tl
from {helper} import triple


@triton.jit
def _sum(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, {value})
"""
HELPER = """
import triton
import triton.language as tl


@triton.jit
def triple(x):
    return 3 * tl.load(x)
"""


def outside_of(kernel: ModuleType) -> str:
    """Return the file in which a launch of a kernel that reads past the end does so."""
    kernel._sum[(2,)](torch.ones(24), torch.ones(32), SIZE)
    (access,) = launch.accesses_outside()
    return access.frames[-1][0]


def test_a_copy_of_a_kernel_shares_its_code_and_has_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def ir_of(kernel: Any, *args: Any, _of: Callable[..., str] = launch.ir_of, **options: Any) -> str:
        made.append(Path(kernel.path).stem)
        return _of(kernel, *args, **options)

    monkeypatch.setattr(launch, "ir_of", ir_of)
    for name in ("first_helper", "other_helper"):
        (tmp_path / f"{name}.py").write_text(HELPER)
    tripled = "triple(x + at)"
    for number, (helper, value) in enumerate(
        [*[("first_helper", tripled)] * 2, ("first_helper", f"-{tripled}"), ("other_helper", tripled)]
    ):
        path = tmp_path / f"kernel{number}.py"
        path.write_text(KERNEL.format(helper=helper, value=value))
        if helper == "other_helper":
            monkeypatch.delitem(sys.modules, "first_helper")
        assert outside_of(importlib.import_module(path.stem)) == str(path)
    assert made == ["kernel0", "kernel2", "kernel3"]
