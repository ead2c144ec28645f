"""What the rules of all suites share: cases, their tensors, and the exception that says that a kernel fails."""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from kernels.contract import AttentionKernel
from reference.masks import visible
from tests.harness.trial.problem import Problem
from tests.harness.trial.trial import run_kernel

T = TypeVar("T")

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""A function from a shape and a generator to a float32 tensor on the generator's device."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A differentiable function from q, k and v to out."""


class RuleBroken(AssertionError):
    """The other suite would fail the kernel."""


@dataclass(frozen=True)
class RuleCase:
    """One parametrization of another suite's test; ``variant`` has a meaning only for the rule that made the case."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    _: KW_ONLY
    dtype: str
    causal: bool = False
    sm_scale: float | None = None
    seed: int = 0
    variant: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def scale(self) -> float:
        """``sm_scale``, 1 / sqrt(head_dim) unless given."""
        return 1 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale


class Rule(ABC):
    """How another suite decides, on its own inputs, whether a kernel is right."""

    name: ClassVar[str]
    source: ClassVar[str]

    @abstractmethod
    def cases(self, device: str) -> Sequence[RuleCase]:
        """Return the suite's cases in its order, the same on every call; on the CPU their sizes are reduced."""

    @abstractmethod
    def judge(self, kernel: AttentionKernel, case: RuleCase, device: str) -> None:
        """Raise RuleBroken if the suite would fail the kernel; what the kernel raises passes through."""


def normal(std: float = 1.0) -> Draw:
    """Return a function that draws normal numbers of mean 0."""
    return lambda shape, generator: torch.randn(shape, generator=generator, device=generator.device) * std


def uniform(low: float = 0.0, high: float = 1.0) -> Draw:
    """Return a function that draws numbers in [low, high)."""

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low

    return draw


def problem(
    case: RuleCase, device: str, draw: Draw, *, dout: Draw | None = None, layout: str = "bhnd"
) -> Problem:
    """Draw the tensors of a case by its seed: q, k, v, then dout (by ``draw`` unless given).

    The layouts are those in which these suites pass tensors, all of them views but the first. ``bhnd`` is contiguous.
    ``bnhd`` has the heads inside of the sequence. ``kvpacked`` also has k and v in one tensor, and ``qkvpacked`` all
    three (if lengths and heads are equal).
    """
    generator = torch.Generator(device=device).manual_seed(case.seed)

    def tensor(draw: Draw, *shape: int) -> Tensor:
        return draw(shape, generator).to(case.torch_dtype)

    b, d = case.batch, case.head_dim
    if layout == "bhnd":
        shape_q, shape_k = (b, case.heads_q, case.seqlen_q, d), (b, case.heads_kv, case.seqlen_k, d)
    else:
        shape_q, shape_k = (b, case.seqlen_q, case.heads_q, d), (b, case.seqlen_k, case.heads_kv, d)
    q, k, v = tensor(draw, *shape_q), tensor(draw, *shape_k), tensor(draw, *shape_k)
    grad = tensor(dout or draw, *shape_q)
    if layout == "kvpacked":
        k, v = torch.stack([k, v], 2).unbind(2)
    elif layout == "qkvpacked":
        q, k, v = torch.stack([q, k, v], 2).unbind(2)
    if layout != "bhnd":
        q, k, v, grad = (x.transpose(1, 2) for x in (q, k, v, grad))
    return Problem(q, k, v, grad, case.causal, case.scale)


def run(kernel: AttentionKernel, p: Problem, *, backward: bool = True) -> dict[str, Tensor]:
    """Return the kernel's tensors by name, computed with its default launch settings."""
    return run_kernel(kernel, p, {}, backward=backward).named()


def differentiate(attention: Attention, p: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return out, dq, dk and dv of a reference whose inputs are cast to ``dtype`` first."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (p.q, p.k, p.v)]
    out = attention(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, p.dout.to(out.dtype))
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def hidden(p: Problem) -> Tensor:
    """Return which keys a causal mask, aligned bottom-right, hides: (seqlen_q, seqlen_k) bool."""
    seqlen_q, seqlen_k = p.q.shape[2], p.k.shape[2]
    seen = visible(seqlen_q, seqlen_k, p.causal, "bottom_right", p.q.device)
    return torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=p.q.device) if seen is None else ~seen


def plain(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(sm_scale * q k^T) v in the dtype of the arguments; a row that sees no key is 0."""
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    mask = hidden(p)
    weights = ((q * p.sm_scale) @ k.mT).masked_fill(mask, -math.inf).softmax(-1)
    return weights.masked_fill(mask.all(-1, keepdim=True), 0.0) @ v


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, rounded once, as on GPUs; the CPU's own 16-bit product is up to ten times slower."""
    if a.device.type != "cpu" or a.itemsize > 2:
        return a @ b
    return (a.float() @ b.float()).to(a.dtype)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return k or v with each head repeated for its group of query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def require(held: bool, message: str) -> None:
    """Raise RuleBroken unless ``held``."""
    if not held:
        raise RuleBroken(message)


def max_error(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| as a float; NaN if either has one."""
    return (a - b).abs().max().item()


def sample(items: Sequence[T], count: int) -> list[T]:
    """Choose ``count`` of a suite's cases, always the same ones, in its order."""
    if count >= len(items):
        return list(items)
    return [items[i] for i in sorted(random.Random(0).sample(range(len(items)), count))]
