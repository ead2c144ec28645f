"""The functions that stand-alone scripts are made of. A script contains the source of those that it needs.

So they use torch and the standard library alone, beside the modules ``poison``, whose whole source a script has where
it needs any of it, and ``ways``, and one function each of ``strategies.rotary`` and ``ragged_form``. The global names
that they use are assigned in the script as well, with values of its own.
"""

import base64
import faulthandler
import gc
import math
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from math import nan
from typing import Any, NoReturn

import torch
from torch import Tensor

from strategies.rotary import rotated
from tests.harness.device.poison import PoisonedAllocations, after_fence, behind_fence, inputs_copied
from tests.harness.trial.ragged_form import apart
from tests.harness.trial.streams import placed
from tests.harness.trial.ways import by_autograd, in_its_way

MARGIN = 4096
"""Elements behind each tensor that are filled like the space between its rows, because some bugs read them."""

FILLED_ELEMENTS = 2**26
"""The most elements of a storage that is filled; only tensors with huge strides have more."""

DEVICE = "cpu"
"""The type of the device on which tensors are made."""

USUAL_STREAM = torch.accelerator.current_stream() if DEVICE != "cpu" else None
"""The stream that is the current one as the script begins; None on the CPU."""

LSE_LAYOUT = "bhn"
"""The dimensions of the lse that the kernel returns: (batch, heads, rows), or (batch, rows, heads) if it is "bnh"."""

REPEAT_SECONDS = 20.0
"""The most seconds for calls that are repeated because what they return comes and goes."""

programs: Any = None
"""The order of the programs of Triton kernels, where Triton's interpreter is repaired."""

watched: list[Tensor] = []
"""The storages of the inputs, with what lies around the inputs."""


def run_inside() -> None:
    """Run this script in another process, and exit with 0 if that exits with 0, else with 1, also after a crash."""
    if "--inside" not in sys.argv:
        sys.exit(1 if subprocess.run([sys.executable, __file__, "--inside"]).returncode else 0)
    faulthandler.enable()


def take_configuration(function: str, configuration: str) -> None:
    """Have the tuner of a kernel take one of its configurations. If that is gone, the script ends with 0."""
    wanted, _, number = configuration.partition(" #")
    is_there = False
    for tuner in gc.get_objects():
        if type(tuner).__name__ == "Autotuner" and tuner.base_fn.__name__ == function:
            found = [x for x in tuner.configs if {*wanted.split()} <= parameters(x)]
            tuner.configs = found[int(number or 1) - 1 :][:1] or tuner.configs
            is_there |= bool(found)
    if not is_there:
        print(f"{function} has no configuration {configuration}")
        sys.exit(0)


def parameters(configuration: Any) -> set[str]:
    """Return the parameters of a ``triton.Config`` as texts such as "BLOCK_M=64"."""
    named = {**vars(configuration), **configuration.kwargs}
    return {f"{name}={''.join(str(value).split())}" for name, value in named.items()}


def in_sequences(batch: int, call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Tensor]:
    """Return what a call of packed sequences returns, with a batch element for each of them."""
    return apart(call(*arguments, **options), batch, LSE_LAYOUT)


def attempted(call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Tensor]:
    """Make a call that a kernel need not answer. Nothing is returned, whatever comes of it."""
    try:
        call(*arguments, **options)
    except Exception as error:
        print(f"raised: {type(error).__name__}: {error}")
    return {}


def holding(x: Tensor, numbers: Tensor) -> Tensor:
    """Write other numbers into a tensor, in place, and return it."""
    once = tuple(slice(1) if step == 0 else slice(None) for step in x.stride())
    x[once].copy_(numbers)
    return x


def last_program_first(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Make a call in which the programs of each launch of a Triton kernel run in the opposite order."""
    programs.order = "backward"
    try:
        return call(*arguments, **options)
    finally:
        programs.order = ""


def numbers(dtype: torch.dtype, count: int, data: list[float] | dict[int, float] | str) -> Tensor:
    """Return a flat tensor; ``data`` has all numbers, those that are not 0 by their places, or compressed bytes."""
    if isinstance(data, list):
        return torch.tensor(data, dtype=dtype)
    if isinstance(data, dict):
        places, values = (
            torch.tensor(list(data), dtype=torch.long),
            torch.tensor(list(data.values()), dtype=dtype),
        )
        return torch.zeros(count, dtype=dtype).index_put((places,), values)
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(data))), dtype=dtype)


def window(
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    data: list[float] | dict[int, float] | str,
    around: float = nan,
) -> Tensor:
    """Return a tensor with these strides, at an offset into a larger storage."""
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)
    storage = torch.empty(offset + span + MARGIN, dtype=dtype, device=DEVICE)
    small = storage.numel() <= FILLED_ELEMENTS
    if small and dtype.is_floating_point:
        storage.fill_(around)
    once = [1 if s == 0 and n else n for n, s in zip(shape, stride, strict=True)]
    entries = storage.as_strided(once, stride, offset)
    entries.copy_(numbers(dtype, entries.numel(), data).reshape(once))
    watched.append(storage if small else entries)
    return storage.as_strided(shape, stride, offset)


def through_autograd(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    gradients: Sequence[str],
    way: str = "none",
    dlse: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Call the kernel in a way and return all tensors by name; the wanted ``gradients`` come from autograd."""

    def forward(*tensors: Tensor, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        returned = getattr(kernel, "forward", kernel)(*tensors, **keywords)
        return returned if isinstance(returned, tuple) else (returned, None)

    given = {"q": q, "k": k, "v": v, **options}
    with torch.set_grad_enabled(bool(gradients)):
        found = by_autograd(way, forward, given, dout, dlse, gradients)
    if way == "none":
        found |= {x: torch.zeros_like(given[x[1:]]) for x in gradients if x in found and found[x] is None}
    others = {name: options.get(name) for name in ("bias", "sinks")}
    return finished({"q": q, "k": k, "v": v, "dout": dout, **others, **found})


def by_kernel(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    gradients: Sequence[str],
    way: str = "none",
    **options: Any,
) -> dict[str, Tensor]:
    """Call the kernel in a way and return all tensors by name; the wanted ``gradients`` come from its own backward."""
    if not gradients:
        return through_autograd(kernel, q, k, v, dout, gradients=(), way=way, **options)

    def both_passes() -> dict[str, Tensor | None]:
        out, lse = kernel.forward(q, k, v, **options)
        returned = kernel.backward(dout, q, k, v, out, lse, **options)
        return {"out": out, "lse": lse, **dict(zip(gradients, returned, strict=False))}

    with torch.no_grad():
        found = in_its_way(way, both_passes, q)
    return finished({"q": q, "k": k, "v": v, "dout": dout, "bias": options.get("bias"), **found})


def finished(results: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Wait for the device, unless another stream than the usual one is used, and return what is not None."""
    if DEVICE != "cpu" and torch.accelerator.current_stream() == USUAL_STREAM:
        torch.accelerator.synchronize()
    return {name: x.detach() for name, x in results.items() if x is not None}


def poisoned(
    value: float,
    call: Callable[..., dict[str, Tensor]],
    kernel: Any,
    *args: Any,
    fenced: bool = False,
    is_before: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Make a call with memory full of ``value``.

    If ``fenced``, all memory ends where reading ends the process or, if that ``is_before`` it, begins there.
    """
    if fenced:
        copy = after_fence if is_before else behind_fence
        args = tuple(inputs_copied(copy, *args))
        options = {name: copy(x) if torch.is_tensor(x) else x for name, x in options.items()}
    with PoisonedAllocations(value, fenced=fenced, is_before=is_before) as allocations:
        results = call(kernel, *args, **options)
    if allocations.broken_guards():
        sys.exit("something was written outside of what was allocated")
    return results


def noted(
    storages: Any, call: Callable[..., dict[str, Tensor]], kernel: Any, *args: Any, **options: Any
) -> dict[str, Tensor]:
    """Make a call in a context that notes its tensors."""
    with storages:
        return call(kernel, *args, **options)


def elsewhere(
    place: str,
    call: Callable[..., dict[str, Tensor]],
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    **options: Any,
) -> Any:
    """Make a call on a side stream, beside another current device, or in a CUDA graph."""
    inputs = [q, k, dout] if v.data_ptr() == k.data_ptr() else [q, k, v, dout]
    inputs += [options["cache_seqlens"]] if "cache_seqlens" in options else []
    return placed(place, lambda: call(kernel, q, k, v, dout, **options), inputs)


def is_right(actual: float, expected: float, allowed: float, largest: float) -> bool:
    """Whether a number is as expected. If ``expected`` is close to ``largest``, infinity counts as ``largest``."""
    if math.isnan(actual) or math.isnan(expected):
        return math.isnan(expected) and not math.isfinite(actual)
    if abs(expected) + allowed >= largest:
        actual, expected = (max(-largest, min(largest, x)) for x in (actual, expected))
    return actual == expected or abs(actual - expected) <= allowed


def compare(
    name: str,
    index: tuple[int, ...],
    actual: Tensor,
    expected: Tensor | float,
    allowed: float,
    largest: float,
) -> NoReturn:
    """Print an element beside its expected value; exit with 0 if it is right, with 1 if it is wrong."""
    a = float(actual[index])
    e = float(expected[index] if isinstance(expected, Tensor) else expected)
    print(f"{name}{list(index)}: actual {a!r}, expected {e!r}, allowed error {allowed!r}")
    sys.exit(0 if is_right(a, e, allowed, largest) else 1)


def repeat(name: str, call: Callable[[], Tensor], least: float, times: int) -> NoReturn:
    """Make a call again and again; exit with 1 as soon as a number is further than ``least`` from that of the first."""
    first, until = call().double(), time.perf_counter() + REPEAT_SECONDS
    for number in range(2, times + 1):
        now = call().double()
        same = (now == first) | (now.isnan() & first.isnan()) | ((now - first).abs() <= least)
        if not bool(same.all()):
            index = (~same).nonzero()[0].tolist()
            print(
                f"{name}{index}: {float(first[tuple(index)])!r}, in call {number}: {float(now[tuple(index)])!r}"
            )
            sys.exit(1)
        if time.perf_counter() > until:
            break
    print(f"{name} was the same in {number} calls")
    sys.exit(0)


def must_fit(result: dict[str, Tensor]) -> None:
    """Exit with 1 if a tensor that a call returned has a wrong shape, dtype or device."""
    q, k, v = result["q"], result["k"], result["v"]
    of_q = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    out = torch.Size((*q.shape[:3], v.shape[3]))
    of_lse = q[..., 0].mT.shape if LSE_LAYOUT == "bnh" else q.shape[:3]
    shapes = {"out": out, "lse": of_lse, "dq": q.shape, "dk": k.shape, "dv": v.shape}
    if "bias" in result:
        shapes["dbias"] = result["bias"].shape
    if "sinks" in result:
        shapes["dsinks"] = result["sinks"].shape
    for name in shapes.keys() & result.keys():
        x, dtype = result[name], torch.float32 if name in ("lse", "dsinks") else of_q
        if (x.shape, x.dtype, x.device) != (shapes[name], dtype, q.device):
            print(f"{name} is {tuple(x.shape)}, {x.dtype}, {x.device}")
            sys.exit(f"expected {tuple(shapes[name])}, {dtype}, {q.device}")


def must_flow_back(
    call: Callable[..., dict[str, Tensor]], *args: Any, gradients: Sequence[str], **options: Any
) -> None:
    """Exit with 1 if a call does not return all gradients."""
    found = call(*args, gradients=gradients, **options)
    if lost := [name for name in gradients if name not in found]:
        sys.exit(f"lost: {', '.join(lost)}")
    print("right")


def must_append(
    call: Callable[..., Any], kernel: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any
) -> None:
    """Exit with 1 if a call that has new keys and values does not write them into the cache, and nothing else.

    If the call has tables of quarter turns, new keys are written rotated by their positions.
    """
    lengths, table = options["cache_seqlens"].tolist(), options.get("block_table")
    k_new, wanted = options["k_new"], [k.clone(), v.clone()]
    if "rotary_cos" in options:
        tables = (options[name] for name in ("rotary_cos", "rotary_sin"))
        cos, sin = (torch.stack([x[n : n + k_new.shape[2]] for n in lengths])[:, None] for x in tables)
        k_new = rotated(k_new, cos, sin, options["rotary_interleaved"])
    for cache, added in zip(wanted, (k_new, options["v_new"]), strict=True):
        for b, key in ((b, key) for b in range(len(added)) for key in range(added.shape[2])):
            page, row = divmod(lengths[b] + key, cache.shape[2])
            cache[b if table is None else int(table[b, page]), :, row] = added[b, :, key]
    call(kernel, q, k, v, dout, **options)
    for name, found, cache in zip("kv", (k, v), wanted, strict=True):
        if not torch.allclose(found, cache, rtol=0.0, atol=0.0, equal_nan=True):
            sys.exit(f"{name} does not have the new rows behind the old ones, and else what it had")
    print("right")


def must_be_refused(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Exit with 1 if a call does not raise an exception."""
    try:
        call(*args, **options)
    except Exception as error:
        print(f"refused: {type(error).__name__}: {error}")
    else:
        sys.exit("accepted, but should be refused")


def must_be_unchanged(before: list[Tensor]) -> None:
    """Exit with 1 if an input that was there before the calls, or the memory around it, has changed."""
    pairs = zip(watched, before, strict=False)
    if not all(torch.allclose(x.float(), y.float(), rtol=0.0, atol=0.0, equal_nan=True) for x, y in pairs):
        sys.exit("an input, or what lies around it, was written to")
    print("right")
