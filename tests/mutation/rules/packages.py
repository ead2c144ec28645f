"""Two packages made for testing GPU kernels: their tolerances, on the inputs that their generators make.

Neither is imported: gpucheck 0.1.0 is a pytest plugin, and gpuemu 0.1.0 a client whose inputs and verdicts
come from a daemon in Rust.
"""

import random
from collections.abc import Sequence
from itertools import cycle

import torch

from kernels.contract import AttentionKernel
from tests.mutation.rules.base import Rule, RuleCase, max_error, normal, plain, problem, require, run, uniform

_GPUCHECK = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4}
"""``_DEFAULT_TOLERANCES`` of gpucheck/assertions/tolerances.py: atol and rtol alike."""

_GPUCHECK_SHAPES = (
    *((0, 16), (1, 1), (1, 16), (16, 1)),  # degenerate; (16, 0) has no columns, which nobody claims
    *((31, 31), (33, 33), (35, 35), (63, 63), (65, 65), (67, 67), (127, 127), (129, 129), (131, 131)),
    *((7, 7), (13, 13)),  # primes
    *((128, 128), (255, 255), (256, 256)),  # around powers of 2
    *((7, 128), (7, 256), (13, 128), (13, 256)),  # mixed
)
"""``fuzz_shapes(ndim=2, max_size=256)`` of gpucheck/fuzzing/shapes.py, in its order."""


class GpuCheck(Rule):
    """The defaults of ``gpucheck.assert_close``: |a - b| <= tolerance + tolerance |b|, by dtype.

    NaN in either tensor fails (``nan_equal=False``), and so does an infinity in one of them. The package has
    nothing on attention, gradients or strides. Its shapes are read as (seqlen, head_dim), with batch 1 and 2 heads;
    its inputs are standard normal (``random_inputs``). Each shape has one dtype of ``FLOAT_DTYPES``, without
    float64, and is causal every other time; the reference is float32. ``edge_inputs`` (NaN sprinkled in, the largest
    numbers) are left out, because the NaN of a sound kernel fails too. On the CPU, every other shape is taken.
    """

    name = "gpucheck"
    source = "https://pypi.org/project/gpucheck/0.1.0/ (https://github.com/Akasxh/gpucheck)"

    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return 11 cases on the CPU, 22 elsewhere."""
        shapes = _GPUCHECK_SHAPES[::2] if device == "cpu" else _GPUCHECK_SHAPES
        masks = cycle((False, True))
        dtypes = cycle(_GPUCHECK)
        return [
            RuleCase(1, 2, 2, length, length, head_dim, dtype=dtype, causal=causal, seed=42)
            for (length, head_dim), dtype, causal in zip(shapes, dtypes, masks, strict=False)
        ]

    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Judge out alone."""
        p = problem(case, device, normal())
        actual = run(kernel, p, backward=False)["out"].double()
        expected = plain(p, p.q.float(), p.k.float(), p.v.float()).double()
        finite = expected.isfinite()
        require(not (actual.isnan() | expected.isnan()).any().item(), "out has NaN")
        require(torch.equal(actual[~finite], expected[~finite]), "other infinities")
        tolerance = _GPUCHECK[case.dtype]
        difference, allowed = (actual - expected).abs()[finite], tolerance * (1 + expected.abs()[finite])
        require(not (difference > allowed).any().item(), f"out: off by more than {tolerance}")


_GPUEMU = {"float16": 1e-2, "float32": 1e-4}
"""Tolerances that its guide configures for flash_attention; without a configuration they are 1e-3 and 1e-5."""

_GPUEMU_SCHEMA = {"B": (1, 2, 5), "H": (1, 3, 8), "S": (1, 2, 17, 128, 257), "D": (8, 16, 64, 65)}
_GPUEMU_CPU = {"B": (1,), "H": (1, 2), "S": (1, 2, 17, 128, 257), "D": (8, 16, 64, 65)}


class GpuEmu(Rule):
    """|a - b| <= tolerance, which is absolute only, and no NaN or infinity in out.

    The daemon's schema for attention: q, k and v of one shape, values uniform in [-10, 10), float32 and
    float16, no mask, gradients off by default. The reference is float64, rounded to the dtype. Layouts
    other than contiguous are named with a case, but the client ignores them. (The published client has no
    ``value_distribution="adversarial"``, which its page shows.) Sizes are chosen by another random generator
    than its own. On the CPU, batch is 1, heads are up to 2, and 12 cases stand for its 100.
    """

    name = "gpuemu"
    source = (
        "https://pypi.org/project/gpuemu/0.1.0/; "
        "https://github.com/Skelf-Research/gpuemu/tree/162f5dfdc2b6a926630e16e78f7c21fbde384f3e/crates "
        "(types.rs: OpSchema::builtin, fuzzer.rs, validator.rs)"
    )

    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return cases whose sizes are drawn at random from the schema: 12 on the CPU, 100 elsewhere."""
        schema = _GPUEMU_CPU if device == "cpu" else _GPUEMU_SCHEMA
        r = random.Random(0)
        cases = []
        for seed in range(12 if device == "cpu" else 100):
            batch, heads, length, head_dim = (r.choice(schema[name]) for name in "BHSD")
            dtype = r.choice(("float32", "float16"))
            cases.append(RuleCase(batch, heads, heads, length, length, head_dim, dtype=dtype, seed=seed))
        return cases

    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Judge out alone."""
        p = problem(case, device, uniform(-10.0, 10.0))
        actual = run(kernel, p, backward=False)["out"]
        expected = plain(p, p.q.double(), p.k.double(), p.v.double()).to(case.torch_dtype)
        error = max_error(actual.double(), expected.double())
        require(bool(actual.isfinite().all()), "out has NaN or infinity")
        require(error <= _GPUEMU[case.dtype], f"out: off by {error}")
