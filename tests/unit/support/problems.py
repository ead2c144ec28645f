"""Problems of attention by an emulated kernel, and how large its errors are in relation to the bounds."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from reference.arithmetic import BFLOAT16, FLOAT16, FLOAT32, TF32, TF32_TRUNCATED, Arithmetic
from reference.bounds import Exact, ForwardBounds, backward_bounds, exact, forward_bounds
from reference.bounds.accumulation import SAFETY
from reference.heads import fold, unfold
from reference.mask_pattern import NO_PATTERN, MaskPattern
from strategies.case import Case
from strategies.padding import key_padding_mask
from tests.harness.trial.compare import error_over_bound
from tests.unit.support.emulator import SUMS, Emulator, cast

RULE_1: dict[str, Any] = {}
RULE_2: dict[str, Any] = {"safety": SAFETY}
UNCLUSTERED: dict[str, Any] = {"safety": SAFETY, "clustered": False}
ARITHMETIC = {
    "float16": Arithmetic(weights=FLOAT16, output=FLOAT16),
    "bfloat16": Arithmetic(weights=BFLOAT16, output=BFLOAT16),
    "float32": Arithmetic(weights=FLOAT32, output=FLOAT32),
    "tf32": Arithmetic(weights=TF32, output=FLOAT32, operand_rounding=TF32.roundoff),
    "tf32_truncated": Arithmetic(
        weights=TF32_TRUNCATED, output=FLOAT32, operand_rounding=TF32_TRUNCATED.roundoff
    ),
    # The last rounding is left out, because it would hide the errors of the sums.
    "float16_to_float32": Arithmetic(weights=FLOAT16, output=FLOAT32),
}
INPUTS = {
    "float16": FLOAT16,
    "float16_to_float32": FLOAT16,
    "bfloat16": BFLOAT16,
}


@dataclass(frozen=True)
class Inputs:
    """Float32 q, dout (B, heads_q, M, D) and k, v (B, heads_kv, N, D), of values of the input's format."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> "Inputs":
        """Return the inputs with a function applied to each tensor."""
        return Inputs(f(self.q), f(self.k), f(self.v), f(self.dout))


def normal(
    generator: torch.Generator, batch: int, heads_kv: int, group: int, rows: int, keys: int, head_dim: int
) -> Inputs:
    of_q, of_k = (batch, heads_kv * group, rows, head_dim), (batch, heads_kv, keys, head_dim)
    return Inputs(*(torch.randn(shape, generator=generator) for shape in (of_q, of_k, of_k, of_q)))


def duplicated_keys(x: Inputs) -> Inputs:
    """Repeat three keys and queries, with gradients of one sign, so that all roundings of a kind have one sign."""
    of_k, of_q = torch.arange(x.k.shape[2]) % 3, torch.arange(x.q.shape[2]) % 3
    q, k, v, dout = x.q[:, :, of_q], x.k[:, :, of_k], x.v[:, :, of_k].abs(), x.dout[:, :, of_q].abs()
    return Inputs(q, k, v, dout)


def cancellation(x: Inputs) -> Inputs:
    """Make inputs in which the halves of q k^T cancel, and pairs of values as well."""
    half, even = x.q.shape[3] // 2, torch.arange(x.k.shape[2]) // 2 * 2
    sign = 1.0 - 2.0 * (torch.arange(x.k.shape[2]) % 2)[:, None]
    q = torch.cat([x.q[..., :half], x.q[..., :half]], -1)
    k = torch.cat([x.k[..., :half], 0.01 * x.k[..., half:] - x.k[..., :half]], -1)
    return Inputs(4 * q, 4 * k, x.v[:, :, even] * sign, x.dout)


def ascending(x: Inputs) -> Inputs:
    """Make scores that grow from key to key, so that every tile has a new maximum."""
    steps = torch.linspace(-3, 3, x.k.shape[2])[:, None]
    return replace(x, q=x.q.abs() + 1, k=steps + 0.05 * x.k)


def outliers(x: Inputs) -> Inputs:
    """Add outliers: N(0, 1) + N(0, 100) Bernoulli(0.001), as in FlashAttention-3 (Shah et al. 2024, section 4.3)."""
    generator = torch.Generator().manual_seed(1)

    def spiked(t: Tensor) -> Tensor:
        return t + 10 * t.flip(2) * (torch.rand(t.shape, generator=generator) < 1e-3)

    return x.map(spiked)


FAMILIES: dict[str, Callable[[Inputs], Inputs]] = {
    "normal": lambda x: x,
    "positive": lambda x: x.map(torch.abs),
    "duplicated_keys": duplicated_keys,
    "cancellation": cancellation,
    "ascending": ascending,
    "outliers": outliers,
    "tiny_logits": lambda x: Inputs(x.q * 1e-4, x.k, x.v.abs(), x.dout.abs()),
    "large_logits": lambda x: replace(x, q=8 * x.q),
    "constant_rows": lambda x: replace(x, k=x.k[:, :, :1].expand_as(x.k), v=x.v.abs()),
    "small": lambda x: x.map(lambda t: t * 1e-4),
    "large_v": lambda x: replace(x, v=3000 * x.v, dout=1e-3 * x.dout),
}


@dataclass(frozen=True)
class Run:
    """A kernel's outputs beside the float64 quantities they are judged by."""

    kernel: Emulator
    inputs: Inputs
    e: Exact
    found: dict[str, Tensor]

    @property
    def dout(self) -> Tensor:
        """The gradient of out, folded, in float64."""
        return fold(self.inputs.dout, self.inputs.k.shape[1]).double()

    @cached_property
    def certain(self) -> ForwardBounds:
        """The bounds of out and lse by rule 1."""
        return forward_bounds(self.e, self.kernel.arithmetic)


def run(kernel: Emulator, x: Inputs) -> Run:
    out, lse = kernel.forward(x.q, x.k, x.v)
    dq, dk, dv = kernel.backward(x.dout, x.q, x.k, x.v, out, lse)
    e = exact(
        x.q,
        x.k,
        x.v,
        causal=kernel.causal,
        sm_scale=kernel.sm_scale,
        alignment=kernel.alignment,
        product_floor=kernel.arithmetic.product_floor,
        key_padding_mask=kernel.key_padding_mask,
        pattern=kernel.pattern,
        dropout_p=kernel.dropout_p,
        dropout_seed=kernel.dropout_seed,
    )
    return Run(kernel, x, e, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})


def expected(r: Run, rule: dict[str, Any], teacher_forced: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the expected value of each output, and the bound of its error."""
    a, heads_kv, heads_q = r.kernel.arithmetic, r.inputs.k.shape[1], r.inputs.q.shape[1]
    f = forward_bounds(r.e, a, **rule) if rule else r.certain
    if teacher_forced:
        out, lse = (fold(r.found[name], heads_kv).double() for name in ("out", "lse"))
        b = backward_bounds(r.e, r.dout, a, out=out, lse=lse, **rule)
    else:
        b = backward_bounds(r.e, r.dout, a, forward=r.certain, **rule)
    return {
        "out": (unfold(r.e.out, heads_q), unfold(f.out, heads_q)),
        "lse": (unfold(r.e.lse, heads_q), unfold(f.lse, heads_q)),
        "dq": (unfold(b.dq, heads_q), unfold(b.dq_bound, heads_q)),
        "dk": (b.dk, b.dk_bound),
        "dv": (b.dv, b.dv_bound),
    }


def ratios(r: Run, rule: dict[str, Any], *, teacher_forced: bool = True) -> dict[str, Tensor]:
    """Return the largest error over bound of each output, (B,): one for each problem of the batch."""
    found = {}
    for name, (value, bound) in expected(r, rule, teacher_forced).items():
        maximum = math.inf if name == "lse" else r.kernel.arithmetic.output.maximum
        ratio = error_over_bound(r.found[name], value, bound, maximum).flatten(1)
        found[name] = ratio.amax(1) if ratio.numel() else torch.zeros(len(ratio))
    return found


def problem(
    arithmetic: str,
    family: str,
    seed: int,
    changes: dict[str, Any] | None = None,
    *,
    padding: str = "none",
    dropout_p: float = 0.0,
    pattern: MaskPattern = NO_PATTERN,
) -> Run:
    """Run a random kernel of the given arithmetic on two random problems of the family."""
    choose = random.Random(f"{arithmetic} {family} {seed}")
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    a = replace(ARITHMETIC[arithmetic], **(changes or {}))
    longest = choose.choice([40, 100, 160, 240])
    group, rows, keys = choose.randint(1, 3), choose.randint(1, longest), choose.randint(1, longest)
    head_dim = choose.choice([16, 32, 64, 128])
    default = head_dim**-0.5
    kernel = Emulator(
        arithmetic=a,
        sm_scale=choose.choices([default, 0.5, -default, 0.0], [0.8, 0.1, 0.05, 0.05])[0],
        causal=choose.random() < 0.6,
        alignment=choose.choice(["bottom_right", "top_left"]),
        tile_q=choose.choice([16, 32, 64, 128]),
        tile_k=choose.choice([16, 32, 64, 128]),
        reverse=choose.random() < 0.5,
        # Float32 products are not exact, so no tensor core adds them up.
        sums=choose.choice(SUMS if a.weights is not FLOAT32 else SUMS[:2]),
        fused=choose.random() < 0.5,
        base_2=a.k_prescaled or choose.random() < 0.6,
        key_padding_mask=key_padding_mask(Case(batch=2, seqlen_k=keys, key_padding=padding, seed=seed)),
        pattern=pattern,
        dropout_p=dropout_p,
        dropout_seed=seed,
        generator=generator,
    )
    x = FAMILIES[family](normal(generator, 2, 1, group, rows, keys, head_dim))
    return run(kernel, x.map(lambda t: cast(t, INPUTS.get(arithmetic, FLOAT32))))


def run_normal(
    arithmetic: str,
    *shape: int,
    family: str = "normal",
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Run a kernel on a family of data; ``shape`` is that of ``normal``, ``changes`` are to the arithmetic."""
    generator = torch.Generator().manual_seed(0)
    a = replace(ARITHMETIC[arithmetic], **(changes or {}))
    x = FAMILIES[family](normal(generator, *shape))
    kernel = Emulator(arithmetic=a, generator=generator, **options)
    return run(kernel, x.map(lambda t: cast(t, INPUTS.get(arithmetic, FLOAT32))))


def assert_within(r: Run, rule: dict[str, Any], *, teacher_forced: bool = True) -> None:
    for name, ratio in ratios(r, rule, teacher_forced=teacher_forced).items():
        assert ratio.max() <= 1, f"{name}: error over bound {ratio.max():.3f} by {rule} for {r.kernel}"


def assert_within_both_rules(r: Run) -> None:
    """Assert that the kernel stays within them, with gradients judged at its own out and lse, and at the exact ones."""
    assert_within(r, RULE_1)
    assert_within(r, RULE_2)
    assert_within(r, RULE_1, teacher_forced=False)
