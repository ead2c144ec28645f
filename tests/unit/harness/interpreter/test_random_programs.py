"""Random small programs: the executor and the interpreter leave the same bits, and so does a GPU where it can.

``python -m tests.unit.support.programs OUT.npz SEED`` runs one of them alone.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.harness.files import ROOT
from tests.harness.interpreter.repaired import values_of
from tests.unit.support.programs import FEATURES, Program, program
from tests.unit.support.programs.running import module_of, run
from tests.unit.support.programs.spans import is_float
from tests.unit.support.programs.values import Numbers, Shape

SEEDS = 200
GROUP = 10
"""So many programs are one module."""

WRONG_ON_A_GPU = {66}
"""Seeds of programs that Triton 3.6 compiles wrongly for an H200 (28 November 2026), as these few lines show too.

``v = tl.load(x + r * 64 + c).to(tl.float8e4nv)`` and ``tl.store(out + 63 + r * n - c, v.to(tl.float32), mask=r >= 2)``,
with r and c the rows and columns of a tile of 64 x 64: half of the elements land at each other's places.
"""


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in this process, not compiled")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def of_group(first: int) -> list[Program]:
    """Return the programs of a group of seeds."""
    return [program(seed) for seed in range(first, first + GROUP)]


def differences(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    """Return which outputs differ, and where first."""
    told = []
    for name, right in expected.items():
        at = np.flatnonzero(found[name] != right)
        if len(at):
            few = [(int(i), hex(found[name][i]), hex(right[i])) for i in at[:3]]
            told.append(f"{name}: {len(at)} of {len(right)} (index, bits, bits of the interpreter): {few}")
    return told


@on_cpu
@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_the_executor_leaves_the_bits_of_the_interpreter(first: int, tmp_path: Path) -> None:
    from tests.harness.interpreter.ttir.launch import fallbacks, interpreted

    programs = of_group(first)
    module = module_of(programs, tmp_path / f"random_programs_{first}.py")
    told = {}
    for drawn in programs:
        kernel = getattr(module, drawn.name)
        found = run(drawn, kernel)
        with interpreted():
            expected = run(drawn, kernel)
        told[drawn.name] = differences(found, expected)
        # A function that is not inlined is what the executor leaves to the interpreter.
        if drawn.name in fallbacks() and "call_apart" not in drawn.features:
            told[drawn.name].append(f"was interpreted: {fallbacks()[drawn.name]}")
    assert not any(told.values()), "\n".join(f"{name}: {x}" for name, x in told.items() if x)


@on_gpu
@pytest.mark.parametrize("first", range(0, SEEDS, 5 * GROUP))
def test_a_gpu_leaves_the_bits_of_the_executor(first: int, tmp_path: Path) -> None:
    seeds = (seed for seed in range(first, first + 5 * GROUP) if seed not in WRONG_ON_A_GPU)
    programs = [x for x in map(program, seeds) if x.exact]
    out = tmp_path / "bits.npz"
    command = [
        sys.executable,
        "-m",
        "tests.unit.support.programs",
        str(out),
        *(str(x.seed) for x in programs),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    with np.load(out) as file:
        expected = dict(file)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    module = module_of(programs, tmp_path / f"random_programs_{first}.py")
    told = {}
    for drawn in programs:
        found = run(drawn, getattr(module, drawn.name), "cuda")
        right = {name: expected[f"{drawn.seed}.{name}"] for name in found}
        told[drawn.name] = differences(found, right)
    assert not any(told.values()), "\n".join(f"{name}: {x}" for name, x in told.items() if x)


def observe(name: str, value: Any, dtype: str, shape: Shape, span: tuple[Any, ...]) -> None:
    """Raise AssertionError if a value of a program that is interpreted isn't what its generator takes it for."""
    low, high, whole, finite, negative_zero = span
    numbers = values_of(value.handle)
    assert value.dtype == getattr(tl, dtype), f"{name} is {value.dtype}"
    assert not shape or numbers.shape == shape, f"{name} has the shape {numbers.shape}"
    if is_float(dtype):
        numbers = numbers.astype(np.float64)
        assert np.isfinite(numbers).all() or not finite, f"{name} is not finite"
        assert (numbers == np.trunc(numbers)).all() or not whole, f"{name} is not whole"
        assert negative_zero or not ((numbers == 0) & np.signbit(numbers)).any(), f"{name} is -0"
    if finite:
        assert low <= numbers.min() <= numbers.max() <= high, f"{name} is not within {low} and {high}"


@on_cpu
@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_values_are_what_the_generator_takes_them_for(first: int, tmp_path: Path) -> None:
    from tests.harness.interpreter.ttir.launch import interpreted

    programs = [program(seed, "numbers") for seed in range(first, first + 10)]
    module = module_of(programs, tmp_path / f"observed_programs_{first}.py")
    vars(module)["observe"] = observe
    with interpreted():
        for drawn in programs:
            assert run(drawn, getattr(module, drawn.name))


def test_a_seed_gives_the_same_program() -> None:
    assert [program(seed) for seed in range(20)] == [program(seed) for seed in range(20)]
    assert len({program(seed).source.replace(f"_{seed}", "") for seed in range(20)}) == 20


def test_programs_have_all_that_kernels_are_made_of() -> None:
    programs = [program(seed) for seed in range(SEEDS)]
    assert sum(x.exact for x in programs) >= 50
    missing = {x.__name__ for x in FEATURES} - {name for x in programs for name in x.features}
    assert not missing
    text = "\n".join(x.source for x in programs)
    words = (
        "for", "while", "if", "elif", "else", "static_range", "loop_unroll_factor", "return", "dot", "sum",
        "argmax", "cumsum", "cumprod", "associative_scan", "reduce", "xor_sum", "sort", "flip", "histogram", "gather",
        "join", "split", "interleave", "cat", "trans", "permute", "reshape", "broadcast_to", "expand_dims", "where",
        "maximum", "minimum", "fma", "clamp", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf", "sigmoid", "div_rn",
        "sqrt_rn", "abs", "floor", "ceil", "umulhi", "rand", "randint", "atomic_add", "atomic_max", "atomic_xchg",
        "atomic_cas", "make_tensor_descriptor", "debug_barrier", "noinline", "bitcast", "rtz", "None", "propagate_nan",
        "//", "%", "<<", ">>", "~", "^",
    )  # fmt: skip
    found = set(re.findall(r"\w+|<<|>>|//|[%~^]", text))
    assert not set(words) - found
    dtypes = {
        y.dtype
        for x in programs
        for argument in x.arguments
        for y in (argument.given if isinstance(argument.given, tuple) else (argument.given,))
        if isinstance(y, Numbers)
    }
    assert len([x for x in dtypes if is_float(x)]) == 6
    assert len([x for x in dtypes if not is_float(x)]) == 9
