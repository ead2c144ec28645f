"""The launchers of kernels: what they keep of one launch must not reach into the next."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.hopper import descriptor
from kernels.common.launching import is_aligned, is_hopper, launch, multiprocessors, new_results
from kernels.common.prepared import Prepared
from kernels.common.tiles import kernel
from kernels.registry import load, unavailable_reason
from tests.unit.support.calling import DEVICE, make


@kernel
def _store_sum(out, x, y, TWICE: tl.constexpr):
    total = x + y
    if TWICE:
        total *= 2
    tl.store(out, total)


def test_each_launch_fits_its_arguments_whatever_was_launched_before() -> None:
    """Each launch differs from the one before in the width or type of a number, in a dtype, or in a constant."""
    calls = [
        (torch.int64, 1, 2, False, 3),
        (torch.int64, 2**31, 2**40, False, 2**31 + 2**40),
        (torch.float32, 1, 2, False, 3.0),
        (torch.float32, 0.5, 2, False, 2.5),
        (torch.float32, 0.5, 2, True, 5.0),
        (torch.float64, 0.5, 2, True, 5.0),
    ]
    for dtype, x, y, twice, expected in [*calls, *reversed(calls)]:
        out = torch.zeros(1, dtype=dtype, device=DEVICE)
        launch(_store_sum, 1, out, x, y, TWICE=twice)
        assert out.item() == expected, (dtype, x, y, twice)


class OnGpu(Tensor):
    """A tensor that says it is on a GPU; there need be none."""

    gpu = 0
    is_cuda = property(lambda self: True)

    def get_device(self) -> int:
        return self.gpu


def on_gpu(*shape: int, dtype: torch.dtype = torch.float16, gpu: int = 0) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype).as_subclass(OnGpu)
    tensor.gpu = gpu
    return tensor


class Run:
    """Stands for what launches a compiled kernel in Triton 3.6: a function around one in C, to which it passes on."""

    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

        def launcher(*arguments: Any) -> None:
            calls.append(("run in C", torch.cuda.current_device(), *arguments))

        self.launch = lambda *arguments: launcher(*arguments)

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(("run", torch.cuda.current_device(), *arguments))


class Compiled:
    """Stands for what Triton compiled."""

    function, packed_metadata = "function", "metadata"
    metadata = SimpleNamespace(tensordesc_meta=["how x is encoded", "how y is encoded"])

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls
        self.run = Run(calls)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.calls.append(("run with hooks", grid, *arguments))


class Kernel:
    """Stands for a kernel; ``calls`` says what was compiled and run, or only run."""

    arg_names = ("out", "n", "CAUSAL", "ROWS")

    def __init__(self) -> None:
        self.fn = object()
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def compile_and_run(*arguments: Any, **options: Any) -> Compiled:
            self.calls.append(("compiled", grid, *arguments, options))
            return Compiled(self.calls)

        return compile_and_run


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Return what stands for a kernel where there seem to be two GPUs, the first of which is the current one."""
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    driver = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return Kernel()


def test_what_was_compiled_is_run_at_once_on_the_stream_and_with_the_constants_of_its_own_order(
    stand_in: Kernel,
) -> None:
    first, second = on_gpu(1), on_gpu(1)
    launch(stand_in, 3, first, 7, ROWS=64, CAUSAL=True, num_warps=4)
    launch(stand_in, 5, second, 8, ROWS=64, CAUSAL=True, num_warps=4)
    options = {"ROWS": 64, "CAUSAL": True, "num_warps": 4, "enable_fp_fusion": False}
    assert stand_in.calls[0] == ("compiled", (3,), first, 7, options)
    handles = ("stream of 0", "function", "metadata", None, None, None)
    assert stand_in.calls[1:] == [("run", 0, 5, 1, 1, *handles, second, 8, True, 64)]


def test_another_type_tile_or_constant_is_compiled_anew(stand_in: Kernel) -> None:
    described = on_gpu(1, 1, 64, 64)
    arguments = [
        *(7, 2**31, 0.5, None, on_gpu(1), on_gpu(1, dtype=torch.float32)),
        *(descriptor(described, 64), descriptor(described, 32), descriptor(described, 64, 32)),
        descriptor(described.to(torch.bfloat16), 64),
    ]
    plain = {"CAUSAL": False, "ROWS": 64}
    others = [{**plain, "CAUSAL": True}, {**plain, "ROWS": 128}, {**plain, "num_warps": 8}]
    launches = [*((argument, plain) for argument in arguments), *((7, other) for other in others)]
    for argument, constants in [*launches, *launches]:
        launch(stand_in, 1, on_gpu(1), argument, **constants)
    assert [call[0] for call in stand_in.calls] == ["compiled"] * len(launches) + ["run"] * len(launches)
    for call, (argument, constants) in zip(stand_in.calls[len(launches) :], launches, strict=True):
        assert call[-3] is argument
        assert call[-2:] == (constants["CAUSAL"], constants["ROWS"])


def test_programs_run_on_the_device_of_the_first_argument(stand_in: Kernel) -> None:
    for out in (on_gpu(1, gpu=1), on_gpu(1), descriptor(on_gpu(1, 1, 64, 64, gpu=1), 64)):
        for _ in range(2):
            launch(stand_in, 1, out, 7, CAUSAL=False, ROWS=64)
    # What was compiled for one device is not launched on another.
    assert [call[0] for call in stand_in.calls] == ["compiled", "run"] * 3
    assert [call[1:6:4] for call in stand_in.calls if call[0] == "run"] == [
        (1, "stream of 1"),
        (0, "stream of 0"),
        (1, "stream of 1"),
    ]
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_left_to_triton(stand_in: Kernel, hook: str) -> None:
    """A profiler adds them, and expects to be told of each launch."""
    out, listener = on_gpu(1), lambda metadata: None
    hooks = getattr(triton.knobs.runtime, hook)
    launch(stand_in, 1, out, 7, CAUSAL=False, ROWS=64)
    hooks.add(listener)
    try:
        launch(stand_in, 5, out, 7, CAUSAL=False, ROWS=64)
    finally:
        hooks.remove(listener)
    assert stand_in.calls[1:] == [("run with hooks", (5, 1, 1), out, 7, False, 64)]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return how the tensors are encoded that are, where Triton 3.6 seems to be installed."""
    log: list[str] = []

    def encode(tiles: Any, encoding: str) -> list[Any]:
        log.append(encoding)
        return [("map", tiles.base.data_ptr(), tiles.kind, encoding), *tiles.shape]

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(triton.backends.nvidia.driver, "make_tensordesc_arg", encode)
    return log


def prepared(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Return the launch of a kernel with a pointer and two descriptors, in tiles of (32, 64) and (16, 128)."""
    monkeypatch.setattr(kernel, "arg_names", ("out", "x", "y", "n", "CAUSAL", "ROWS"))
    of_x, of_y = partial(descriptor, rows=32), partial(descriptor, rows=16, columns=128)
    return Prepared(kernel, 3, [None, of_x, of_y], 7, ROWS=64, CAUSAL=True, num_warps=4)


def operands(gpu: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return on_gpu(1, gpu=gpu), on_gpu(1, 1, 8, 64, gpu=gpu), on_gpu(1, 1, 8, 64, gpu=gpu)


def test_a_prepared_launch_goes_to_the_function_in_c(
    stand_in: Kernel, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one compiles the kernel. What is encoded is kept for each operand and address."""
    kernel = prepared(stand_in, monkeypatch)
    (out, x, y), (other, z, _) = operands(), operands()
    kernel(out, x, y)
    assert stand_in.calls[0][:3] == ("compiled", (3,), out)
    assert [tiles.kind[1:] for tiles in stand_in.calls[0][3:5]] == [(32, 64), (16, 128)]
    kinds = {"x": (torch.float16, 32, 64), "y": (torch.float16, 16, 128)}
    handles = ("stream of 0", "function", False, True, None, None, "metadata", None, None, None)
    for tensors, newly_encoded in (
        ((out, x, y), "xy"),
        ((out, x, y), ""),
        ((other, y, z), "xy"),
        ((out, x, z), ""),
    ):
        encoded.clear()
        stand_in.calls.clear()
        kernel(*tensors)
        assert encoded == [f"how {name} is encoded" for name in newly_encoded]
        maps = [
            (("map", tensor.data_ptr(), kinds[name], f"how {name} is encoded"), 1, 1, 8, 64)
            for tensor, name in zip(tensors[1:], "xy", strict=True)
        ]
        arguments = (tensors[0].data_ptr(), *maps[0], *maps[1], 7, True, 64)
        assert stand_in.calls == [("run in C", 0, 3, 1, 1, *handles, *arguments)]


def test_descriptors_of_few_addresses_are_kept(
    stand_in: Kernel, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.common.prepared.MOST_ADDRESSES", 2)
    kernel = prepared(stand_in, monkeypatch)
    (out, x, y), others = operands(), [on_gpu(1, 1, 8, 64) for _ in range(2)]
    for each in (x, x, *others, others[1], x):
        kernel(out, each, y)
    assert encoded.count("how x is encoded") == 4
    assert encoded.count("how y is encoded") == 1


def test_a_prepared_launch_is_left_to_triton_on_another_device_and_with_hooks(
    stand_in: Kernel, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, listener = prepared(stand_in, monkeypatch), lambda metadata: None
    for _ in range(2):
        kernel(*operands(gpu=1))
    assert [call[:2] for call in stand_in.calls] == [("compiled", (3,)), ("run", 1)]
    with torch.cuda.device(1):
        kernel(*operands(gpu=1))
        triton.knobs.runtime.launch_enter_hook.add(listener)
        try:
            kernel(*operands(gpu=1))
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(listener)
    assert [call[0] for call in stand_in.calls[2:]] == ["run in C", "run with hooks"]


@pytest.mark.usefixtures("encoded")
def test_a_prepared_launch_is_left_to_any_triton_but_3_6(
    stand_in: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    kernel = prepared(stand_in, monkeypatch)
    for _ in range(2):
        kernel(*operands())
    assert [call[0] for call in stand_in.calls] == ["compiled", "run"]


def test_no_programs_are_not_launched(stand_in: Kernel) -> None:
    launch(stand_in, 0, on_gpu(1), 7, CAUSAL=False, ROWS=64)
    assert stand_in.calls == []


def test_a_gpu_is_asked_for_its_properties_each_time_only_where_it_may_be_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meta tensors stand for the GPU that a test compiles for."""
    for major, processors in ((9, 132), (8, 108)):
        properties = SimpleNamespace(major=major, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        device = torch.empty(0, device="meta").device
        assert is_hopper(device) == (major == 9)
        assert multiprocessors(device) == processors
    assert not any(is_hopper(torch.device(x)) for x in ("cpu", "xpu:0"))


def test_results_are_contiguous_and_as_the_contract_has_them() -> None:
    q = torch.empty(2, 5, 3, 4, dtype=torch.float16).transpose(1, 2)
    out, lse = new_results(q, torch.bfloat16)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 3, 5, 4), torch.bfloat16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 3, 5), torch.float32, True)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "expected"),
    [
        ((2, 3, 4, 8), torch.float16, 0, True),
        ((2, 3, 4, 8), torch.float16, 4, False),
        ((2, 3, 4, 4), torch.float16, 0, False),
        ((2, 3, 4, 4), torch.float32, 0, True),
        ((0, 3, 4, 8), torch.bfloat16, 0, True),
    ],
)
def test_rows_are_aligned_if_they_start_at_16_bytes_and_are_as_wide(
    shape: tuple[int, ...], dtype: torch.dtype, offset: int, expected: bool
) -> None:
    x = torch.empty(1024, dtype=dtype)[offset:].as_strided(shape, torch.empty(shape).stride())
    assert is_aligned(x) is expected
    assert is_aligned(torch.empty(1, 1, 1, 16), x) is expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["flash_v2", "flash_v3_gluon", "fp8_gluon", "decode"])
def test_a_call_runs_on_the_gpu_of_its_tensors(name: str) -> None:
    """Each GPU has two calls, because a launcher keeps what it needs for the second one."""
    if reason := unavailable_reason(name, "cuda"):
        pytest.skip(reason)
    ours, results = load(name), []
    for device in ("cuda:0", "cuda:1") * 2:
        q, k, v, dout = (x.to(device) for x in make(100, 130, 64, group=2, dtype=torch.float16))
        options = {"causal": True, "sm_scale": 0.125}
        of_call = ours.forward(q, k, v, **options)
        if ours.backward:
            of_call = (*of_call, *ours.backward(dout, q, k, v, *of_call, **options))
        assert {x.device for x in of_call} == {q.device}
        results.append([x.cpu() for x in of_call])
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))
